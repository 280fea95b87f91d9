"""Scores: the damage that each format does in each product of each layer of each site.

Everything is measured at fixed parameters on a few recorded batches, all sites at once, one format at a time. Damage is
in nats per token. A forward error costs half the mean square of the change that it makes to the loss of a token: the
second-order term of the loss, with the Fisher information in place of the Hessian. A gradient error, from any product,
costs `NOISE_WEIGHT` times its squared norm as a multiple of that of the noise of a batch, both in Adam's update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.compiler.pipeline import no_reentry
from policyc.compiler.planning.plan import Decision, Decisions, make_plan
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.experiments.record import RecordedLoss
from policyc.experiments.search.candidates import Cell, CellKey, Format, find_cells
from policyc.experiments.search.gradients import Arrays, BadLoss, Gradients, as_float, measure_gradients
from policyc.experiments.search.site_error import ERROR_SUMS, ScoreRewriter, UnprobedRewriter
from policyc.experiments.taps import TappedLoss, TapRewriter
from policyc.experiments.telemetry import stacked_parameters
from policyc.hardware.training_step import microbatch_tokens
from policyc.language.loader import parse
from policyc.language.recipes import Gemm

MOMENTUM_STEPS = 10
"""Steps over which Adam's momentum (beta1 = 0.9) averages gradients: noise averages out, bias does not."""

NOISE_WEIGHT = 0.02
"""Nats per token for a gradient error that is as large as the noise of a batch. Not derived, but chosen on a Llama with
three layers: for 20 random policies, the rank correlation of damage with the error of the plain gradient was 0.84 at
0.005, 0.85 at 0.02, 0.79 at 0.05 and 0.75 at 0.5. For 20 other policies it was 0.91 at 0.02. Measured gaps suggest
0.001 (see docs/results), but below 0.005 a wgrad that is ruined by its format would cost less than a healthy fprop."""

STALLS_BELOW = math.sqrt(3)
"""Gradient norm over quantization noise below which training stalls, arXiv:2505.19115."""


NO_TANGENT = ("forward-mode", "custom_lin", "Differentiation rule for")
"""Parts of JAX's error messages if a derivative rule of the program, or a primitive in it, has no derivative itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The effect of a format in one product of one layer.

    Attributes:
      loss: the effect of the error on the loss, in nats per token; 0 except for fprop.
      noise: the squared error of Adam's update of all parameters, as a multiple of the batch noise in that update.
      error: for fprop and dgrad, the norm of the error over that of the result; for wgrad, the change of Adam's update
        over the update, |u(g + dg) - u(g)| / |u(g)|.
      bias: the part of the error that is the same in every batch (wgrad), or proportional to the result (the others).
    """

    loss: float = 0.0
    noise: float
    error: float
    bias: float

    @property
    def damage(self) -> float:
        """In nats per token."""
        return self.loss + NOISE_WEIGHT * self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """All scores of a loss, by layer of a linear, product and name of the format.

    Attributes:
      gradient_to_noise: by layer of a linear and format, the norm of the mean gradient of its weight over the noise of
        its wgrad. Training stalls below `STALLS_BELOW`.
      losses: the plain losses of the recorded batches.
      notes: sentences about scores that are less certain than usual.
    """

    by_product: Mapping[tuple[CellKey, Gemm, str], Score]
    gradient_to_noise: Mapping[tuple[CellKey, str], float]
    losses: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def damage(self, key: CellKey, gemm: Gemm, format: str | None) -> float:
        """The damage of a format; 0 if the product is kept or does not run."""
        if format is None:
            return 0.0
        score = self.by_product.get((key, gemm, format))
        return 0.0 if score is None else score.damage


def score_formats(
    recorded: RecordedLoss, formats: Sequence[Format], progress: Callable[[str], None] = lambda _: None
) -> Scores:
    """Scores formats on the recorded batches. Raises BadLoss if the loss is not finite, or not deterministic.

    `progress` gets a line before each format.
    """
    cells, _ = find_cells(recorded.sites)
    with no_reentry():
        gradients = measure_gradients(recorded)
        _check_losses(recorded, gradients.losses, cells, formats[0])
        scorer = _Scorer(recorded, gradients, cells)
        by_product: dict[tuple[CellKey, Gemm, str], Score] = {}
        ratios: dict[tuple[CellKey, str], float] = {}
        for number, format in enumerate(formats, start=1):
            progress(f"{format.name}, {number} of {len(formats)} formats, {len(cells)} linears")
            for key, gemm, score in scorer.score(format):
                by_product[key, gemm, format.name] = score
            ratios |= {(key, format.name): ratio for key, ratio in scorer.ratios.items()}
    return Scores(
        by_product=by_product,
        gradient_to_noise=ratios,
        losses=tuple(gradients.losses),
        notes=tuple(dict.fromkeys(scorer.notes)),
    )


def _check_losses(
    recorded: RecordedLoss, losses: Sequence[float], cells: Sequence[Cell], format: Format
) -> None:
    """Raises BadLoss if a loss is not finite. The message names the first site whose result is not."""
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is None:
        return
    tapped = _tap(recorded, f"* -> {format.text}", cells, UnprobedRewriter)

    def loss(taps: Any) -> jax.Array:
        call = recorded.calls[bad]
        return recorded.loss_of(tapped.evaluate(recorded.inputs, taps, call.consts))

    taps = jax.device_get(jax.jit(jax.grad(loss))(tapped.taps()))
    counts = {
        (s.address, la): f.reshape(-1, len(ERROR_SUMS))[:, 0].sum() for s, la, f in tapped.figures(taps)
    }
    first = next((c for c in cells if counts.get((c.site.address, c.layer), 0)), None)
    where = (
        f"the first non-finite result is that of {first.name}"
        if first is not None
        else "no GEMM has a non-finite result from finite operands: look at what runs between GEMMs"
    )
    raise BadLoss(f"the loss of batch {bad + 1} is {losses[bad]} without any policy: {where}")


def _tap(
    recorded: RecordedLoss, policy: str, cells: Sequence[Cell], rewriter: type[TapRewriter]
) -> TappedLoss:
    """The loss under a policy, with taps at the sites of these cells. Other sites are kept."""
    plan = make_plan(parse(policy), recorded.sites, recorded.plan.execution)
    scored = {(c.site.address, c.layer) for c in cells}
    decisions: Decisions = {
        key: decision if key in scored else Decision(decision.rules, None)
        for key, decision in plan.decisions(plan.phases[0]).items()
    }
    return TappedLoss(plan, decisions, rewriter)


# ---- one format


class _Scorer:
    """Scores one format at a time."""

    def __init__(self, recorded: RecordedLoss, gradients: Gradients, cells: Sequence[Cell]) -> None:
        self._recorded, self._gradients, self._cells = recorded, gradients, cells
        self._tokens = microbatch_tokens(recorded.plan)
        self._stacked = [path in stacked_parameters(recorded.plan) for path in recorded.sites.parameters]
        self._unit = max(float(jnp.max(p)) for p in gradients.precondition)
        self._probes = True
        self.notes: list[str] = []
        self.ratios: dict[CellKey, float] = {}
        """Gradient norm over noise of each weight, for the format that was scored last."""
        if len(set(gradients.losses)) == 1:
            self.notes.append(
                "one batch was recorded: the noise of a batch is taken to be as large as its gradient"
                if len(recorded.calls) == 1
                else "all recorded batches are the same: their noise is taken to be as large as the gradient"
            )

    def _directions(self) -> Arrays:
        """A random tangent of the parameters, scaled by Adam's preconditioner over `_unit`."""
        keys = jax.random.split(jax.random.key(0), len(self._recorded.inputs))
        return tuple(
            (jax.random.rademacher(k, p.shape, jnp.float32) * p / self._unit).astype(x.dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else np.zeros(np.shape(x), jax.dtypes.float0)
            for k, p, x in zip(keys, self._gradients.precondition, self._recorded.inputs, strict=True)
        )

    def _make_measure(self, tapped: TappedLoss, *, probes: bool) -> Callable[..., Any]:
        recorded, stacked = self._recorded, self._stacked

        def loss(inputs: Any, taps: Any, consts: Any) -> jax.Array:
            return recorded.loss_of(tapped.evaluate(inputs, taps, consts))

        def derivative(directions: Any, taps: Any, inputs: Any, consts: Any) -> jax.Array:
            _, tangent = jax.jvp(lambda inputs: loss(inputs, taps, consts), (inputs,), (directions,))
            return jnp.asarray(tangent)

        def measure(inputs: Any, consts: Any, directions: Any, precondition: Any) -> Any:
            taps = tapped.taps()
            if probes:
                # The gradient of a directional derivative with respect to the direction is that of the loss.
                grads, sums = jax.grad(derivative, argnums=(0, 1))(directions, taps, inputs, consts)
            else:
                grads, sums = jax.grad(loss, argnums=(0, 1), allow_int=True)(inputs, taps, consts)
            plain = jax.grad(recorded.plain_loss, allow_int=True)(inputs, consts)
            errors = [as_float(a) - as_float(b) for a, b in zip(grads, plain, strict=True)]
            rows = [
                (_row_sums((p * e) ** 2, s), _row_sums(e**2, s))
                for p, e, s in zip(precondition, errors, stacked, strict=True)
            ]
            return sums, errors, rows

        return jax.jit(measure)

    def score(self, format: Format) -> list[tuple[CellKey, Gemm, Score]]:
        """The scores of a format in all products of all cells."""
        try:
            sums, errors, rows = self._run(format, probes=self._probes)
        except (TypeError, NotImplementedError) as error:  # depends on the version of JAX
            if not any(words in str(error) for words in NO_TANGENT):
                raise
            self._probes = False
            self.notes.append(
                "the program has a custom derivative rule without a forward mode: the effect of fprop and dgrad "
                "errors on gradients is measured for all sites together, and divided among them by the size of errors"
            )
            sums, errors, rows = self._run(format, probes=False)
        weights = self._weight_errors(errors, rows)
        self.ratios = {key: weight.gradient_to_noise for key, weight in weights.items()}
        cells = {
            c.key: c for c in self._cells if (c.site.address, c.layer) in sums
        }  # without cells in branches that were not taken
        figures = {key: sums[c.site.address, c.layer] for key, c in cells.items()}
        by_gemm = {
            Gemm.FPROP: {key: self._fprop(each) for key, each in figures.items()},
            Gemm.DGRAD: {key: self._dgrad(each) for key, each in figures.items()},
            Gemm.WGRAD: {key: self._wgrad(weights[key]) for key in cells if key in weights},
        }
        for gemm in () if self._probes else (Gemm.FPROP, Gemm.DGRAD):
            by_gemm[gemm] = _divide(self._inject(format, gemm), by_gemm[gemm], cells)
        scores = [(key, gemm, score) for gemm, by_key in by_gemm.items() for key, score in by_key.items()]
        return [score for score in scores if score[1] in cells[score[0]].site.products]

    def _inject(self, format: Format, gemm: Gemm) -> float:
        """The noise of one product in a format at all sites together, from one gradient per batch."""
        recorded, gradients = self._recorded, self._gradients
        tapped = _tap(recorded, f"* @ {gemm} -> {format.text}", self._cells, TapRewriter)

        def loss(inputs: Any, consts: Any) -> jax.Array:
            return recorded.loss_of(tapped.evaluate(inputs, tapped.taps(), consts))

        @jax.jit
        def measure(inputs: Any, consts: Any, precondition: Any) -> jax.Array:
            grads, plain = (jax.grad(f, allow_int=True)(inputs, consts) for f in (loss, recorded.plain_loss))
            scaled = [
                p * (as_float(a) - as_float(b)) for p, a, b in zip(precondition, grads, plain, strict=True)
            ]
            return jnp.asarray(sum(jnp.sum(x**2) for x in scaled))

        squares = [float(measure(recorded.inputs, c.consts, gradients.precondition)) for c in recorded.calls]
        return float(np.mean(squares)) / gradients.noise

    def _run(self, format: Format, *, probes: bool) -> tuple[Any, Any, Any]:
        """Returns the error sums by site and layer, the mean gradient errors, and their mean squared norms by row."""
        recorded = self._recorded
        rewriter = ScoreRewriter if probes else UnprobedRewriter
        tapped = _tap(recorded, f"* -> {format.text}", self._cells, rewriter)
        measure = self._make_measure(tapped, probes=probes)
        directions, count = self._directions(), len(recorded.calls)
        sums: dict[tuple[Any, Layer], np.ndarray] = {}
        mean: list[Any] = []
        rows: list[Any] = []
        for call in recorded.calls:
            taps, errors, squares = measure(
                recorded.inputs, call.consts, directions, self._gradients.precondition
            )
            for site, layer, figures in tapped.figures(jax.device_get(taps)):
                flat = figures.reshape(-1, len(ERROR_SUMS)).astype(np.float64).sum(0) / count
                sums[site.address, layer] = sums.get((site.address, layer), 0) + flat
            mean = (
                [e / count for e in errors]
                if not mean
                else [m + e / count for m, e in zip(mean, errors, strict=True)]
            )
            squares = jax.tree.map(lambda x: np.asarray(x, np.float64) / count, squares)
            rows = squares if not rows else jax.tree.map(np.add, rows, squares)
        return sums, mean, rows

    # ---- the three products

    def _fprop(self, sums: np.ndarray) -> Score:
        s = dict(zip(ERROR_SUMS, sums.tolist(), strict=True))
        return Score(
            loss=self._tokens / 2 * s["loss_squared"],
            noise=s["loss_probe"] * self._unit**2 / self._gradients.noise,
            error=math.sqrt(s["output_error"] / s["output"]) if s["output"] else 0.0,
            bias=abs(s["output_signal"]) / s["output"] if s["output"] else 0.0,
        )

    def _dgrad(self, sums: np.ndarray) -> Score:
        s = dict(zip(ERROR_SUMS, sums.tolist(), strict=True))
        local = s["dgrad_error"] / s["dgrad"] if s["dgrad"] else 0.0
        return Score(
            noise=s["dgrad_probe"] * self._unit**2 / self._gradients.noise,
            error=math.sqrt(local),
            bias=abs(s["dgrad_signal"]) / s["dgrad"] if s["dgrad"] else 0.0,
        )

    def _wgrad(self, weight: _WeightError) -> Score:
        return Score(
            noise=(weight.squared + (MOMENTUM_STEPS - 1) * weight.bias) / self._gradients.noise,
            error=math.sqrt(weight.squared / weight.update) if weight.update else 0.0,
            bias=math.sqrt(weight.bias / weight.update) if weight.update else 0.0,
        )

    def _weight_errors(self, errors: Sequence[Any], rows: Sequence[Any]) -> dict[CellKey, _WeightError]:
        count, gradients = len(self._recorded.calls), self._gradients
        by_input: list[list[_WeightError]] = []
        for p, m, v, e, stacked, (scaled, plain) in zip(
            gradients.precondition,
            gradients.mean,
            gradients.mean_square,
            errors,
            self._stacked,
            rows,
            strict=True,
        ):
            shared, norm, update = (_row_sums(x, stacked).tolist() for x in ((p * e) ** 2, m**2, p * p * v))
            by_input.append(
                [
                    _WeightError(
                        squared=float(scaled[row]),
                        # The mean of `count` errors contains the bias, and their noise over `count`.
                        bias=max(0.0, shared[row] - scaled[row] / count) * count / max(count - 1, 1),
                        update=update[row],
                        gradient_to_noise=math.sqrt(norm[row] / plain[row]) if plain[row] else math.inf,
                    )
                    for row in range(len(shared))
                ]
            )
        located = {c.key: _locate_weight(self._recorded, c.site, c.layer, self._stacked) for c in self._cells}
        return {key: by_input[place[0]][place[1]] for key, place in located.items() if place is not None}


def _divide(
    noise: float, scores: Mapping[CellKey, Score], cells: Mapping[CellKey, Cell]
) -> dict[CellKey, Score]:
    """Divides noise among sites, in proportion to the loss (fprop) or the squared error times its blocks (dgrad).

    The error of dgrad reaches its own block and all earlier ones.
    """
    numbers = {key: cells[key].number for key in scores}
    blocks = 1 + max((n for n in numbers.values() if n is not None), default=0)
    sizes = {
        key: score.loss or score.error**2 * (blocks if (number := numbers[key]) is None else number + 1)
        for key, score in scores.items()
    }
    total = sum(sizes.values()) or 1.0
    return {key: replace(score, noise=noise * sizes[key] / total) for key, score in scores.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _WeightError:
    """Squared norms in Adam's update: the error of wgrad, the part of it that all batches share, and the update.

    `gradient_to_noise` is the norm of the mean gradient over that of the error of one batch.
    """

    squared: float
    bias: float
    update: float
    gradient_to_noise: float


def _row_sums(x: jax.Array, stacked: bool) -> jax.Array:
    """Sums over all elements, or over those of each layer of a stack."""
    return jnp.sum(x.reshape(x.shape[0] if stacked else 1, -1), axis=1)


def _locate_weight(
    recorded: RecordedLoss, site: Site, layer: Layer, stacked: Sequence[bool]
) -> tuple[int, int] | None:
    """Returns the number of the input that is a site's weight, and the row that a layer reads; None if not known."""
    indices = site.stack_indices(layer)
    for template in site.parameters:
        if template.path in recorded.sites.parameters and next(template.paths(indices), None) is not None:
            number = recorded.sites.parameters.index(template.path)
            row = next((slot.index[indices] for slot in template.slots if slot.axis == 0), None)
            return number, (row or 0) if stacked[number] else 0
    return None
