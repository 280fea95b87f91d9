"""Measures the operands of quantized GEMMs inside a training step.

Each measured site gets an extra input, its tap, that it does not read. The site's backward rule returns its
measurements as the gradient of the tap. So they leave the step through scans, remat and branches like any gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn

from policyc.compiler.planning.plan import Decision, Decisions, Plan
from policyc.compiler.rewriting.hoist import ROUNDING_KEY
from policyc.compiler.rewriting.rewrite import (
    SharedActivation,
    SiteInputs,
    SiteRewriter,
    SiteTemplate,
    quantized_gemm,
)
from policyc.compiler.rewriting.rounding import RandomSource
from policyc.compiler.rewriting.run_step import RunStep
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import SCAN, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address, ExtraInput, Position
from policyc.language.formats import FORMATS
from policyc.numerics.gemm import GemmOptions
from policyc.numerics.operand_stats import ERROR_SUMS, QuantizedOperand, quantize_operands, sum_errors

_OPERANDS_PER_SITE = 6
_SHAPE = (_OPERANDS_PER_SITE, len(ERROR_SUMS))


class _Tap:
    """Marks the extra input of a measured site."""


TAP = _Tap()


@dataclass(frozen=True, eq=False)
class MeasuredGemm:
    """A site, the function that runs it, and the recipe that its measurements follow."""

    site: Site
    eqn: JaxprEqn
    decision: Decision
    gemm: Callable[..., Any]
    is_gated: bool = False
    """Whether it is measured only where its tap is 0."""

    def _operands(self, lhs: jax.Array, rhs: jax.Array, dy: jax.Array) -> list[QuantizedOperand]:
        dims = self.eqn.params["dimension_numbers"]
        options = GemmOptions(weight=self.site.weight, site=self.site.id)
        return quantize_operands(lhs, rhs, dy, dims, self.decision.applied_recipe, options)

    def measure(self, lhs: jax.Array, rhs: jax.Array, dy: jax.Array) -> jax.Array:
        """The `ERROR_SUMS` of the six operands; zeros for an operand that is not quantized or not read."""
        measured = self._operands(lhs, rhs, dy)
        zeros = jnp.zeros(len(ERROR_SUMS))
        return jnp.stack([sum_errors(o) if self._format(o) else zeros for o in measured])

    def measure_tapped(self, lhs: jax.Array, rhs: jax.Array, dy: jax.Array, tap: jax.Array) -> jax.Array:
        """The cotangent of the tap: what `measure` returns, or zeros if the tap says not to measure."""
        if not self.is_gated:
            return self.measure(lhs, rhs, dy)
        is_due = tap.ravel()[0] == 0
        figures: jax.Array = lax.cond(is_due, self.measure, lambda *_: jnp.zeros_like(tap), lhs, rhs, dy)
        return figures

    def _format(self, operand: QuantizedOperand) -> str:
        """The format of a quantized operand; empty if it is not quantized, or if the site does not run its product."""
        name = operand.spec.treatment.format
        is_read = operand.spec.gemm in self.site.products
        return name if is_read and FORMATS[name].is_quantized else ""

    def operand_names(self) -> list[tuple[str, str]]:
        """The name and the format of each operand, in the order of `measure`. The format is empty if not measured."""
        names: list[tuple[str, str]] = []

        def record(lhs: jax.Array, rhs: jax.Array, dy: jax.Array) -> None:
            names.extend(
                (f"{o.spec.gemm}.{o.role}" if self.site.weight else o.spec.name, self._format(o))
                for o in self._operands(lhs, rhs, dy)
            )

        avals: list[Any] = [v.aval for v in (*self.eqn.invars[:2], self.eqn.outvars[0])]
        jax.eval_shape(record, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return names


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_tapped(measured: MeasuredGemm, lhs: Any, rhs: Any, key_words: Any, tap: Any) -> Any:
    del tap
    return measured.gemm(lhs, rhs, *key_words)


def _run_tapped_fwd(measured: MeasuredGemm, lhs: Any, rhs: Any, key_words: Any, tap: Any) -> tuple[Any, Any]:
    y, vjp = jax.vjp(lambda a, b: measured.gemm(a, b, *key_words), lhs, rhs)
    return y, (vjp, lhs, rhs, tap)


def _run_tapped_bwd(measured: MeasuredGemm, residuals: Any, dy: Any) -> tuple[Any, ...]:
    vjp, lhs, rhs, tap = residuals
    return (*vjp(dy), None, measured.measure_tapped(lhs, rhs, dy, tap))


_run_tapped.defvjp(_run_tapped_fwd, _run_tapped_bwd)


class TapRewriter(SiteRewriter):
    """Replaces sites as `SiteRewriter` does, and adds a tap to each that can be measured."""

    tap_shape: tuple[int, ...] = _SHAPE
    """The shape of what a site measures."""
    is_gated = False
    """Whether a tap that is not 0 says not to measure."""

    def is_measured(self, site: Site) -> bool:
        """Whether a site is measured. Not if it is ragged, or in a shard_map, where no extra input reaches it."""
        return not site.is_ragged and site.takes_extra_inputs

    def key(self, position: Position) -> Hashable | None:
        key = super().key(position)
        return None if key is None else (type(self), key)

    def slices(self, scan: Address, extra: ExtraInput) -> bool:
        return extra.content is TAP or super().slices(scan, extra)

    def share(self, position: Position) -> Mapping[Address, SharedActivation]:
        del position
        return {}

    def make_template(self, site: Site, decision: Decision, inputs: SiteInputs) -> SiteTemplate:
        quantizes = any(FORMATS[t.format].is_quantized for t in decision.applied_recipe.treatments)
        if not self.is_measured(site) or not quantizes:
            return super().make_template(site, decision, inputs)
        eqn, axis_env = self.equations[site.address].eqn, self.equations[site.address].axis_env
        gemm = quantized_gemm(site, eqn, decision, inputs)
        measured = MeasuredGemm(site, eqn, decision, gemm, self.is_gated)
        key = jaxprs.array_aval((), "uint32", eqn, axis_env)
        keys = ((ROUNDING_KEY, (key, key)),) if inputs.has_rounding_key else ()

        def tapped(lhs: Any, rhs: Any, *rest: Any) -> Any:
            *key_words, tap = rest
            return _run_tapped(measured, lhs, rhs, tuple(key_words), tap)

        return self.tap(site, tapped, keys)

    def tap(
        self,
        site: Site,
        run: Callable[..., Any],
        keys: tuple[tuple[Any, tuple[AbstractValue, ...]], ...] = (),
    ) -> SiteTemplate:
        """The template of a site that runs a function of its operands, further inputs, and its tap."""
        eqn, axis_env = self.equations[site.address].eqn, self.equations[site.address].axis_env
        extra = (*keys, (TAP, (jaxprs.array_aval(self.tap_shape, "float32", eqn, axis_env),)))
        avals = [*(a.aval for a in eqn.invars), *(a for _, group in extra for a in group)]
        return SiteTemplate(jaxprs.trace_at(run, avals, eqn, axis_env), extra)


class GatedTapRewriter(TapRewriter):
    """Adds taps that measure only where they are 0."""

    is_gated = True


class TappedLoss:
    """The loss of a plan with a tap at every site that is measured."""

    def __init__(
        self,
        plan: Plan,
        decisions: Decisions,
        rewriter: type[TapRewriter] = TapRewriter,
        run_step: RunStep | None = None,
    ) -> None:
        self.plan = plan
        self._source = RandomSource(seed=plan.policy.seed, run_step=run_step)
        self._rewriter = rewriter(plan.sites, decisions, source=self._source)
        result = self._rewriter.transform(plan.sites.jaxpr)
        self.jaxpr: ClosedJaxpr = result.jaxpr
        self._extra = result.inputs

        self._taps = [e for e in self._extra if e.content is TAP]

    def taps(self) -> list[jax.Array]:
        """Zeros: the values of the taps to differentiate at."""
        avals: list[Any] = [e.avals[0] for e in self._taps]
        return [jnp.zeros(aval.shape) for aval in avals]

    def evaluate(
        self, inputs: Sequence[Any], taps: Sequence[jax.Array], consts: Sequence[Any] | None = None
    ) -> list[Any]:
        """Evaluates the loss for its inputs and these taps. `consts` replace the values of its constants."""
        remaining = iter(taps)
        extra: list[Any] = []
        with_keys = [e for e in self._extra if e.content is not TAP]
        keys = iter(self._source.layer_keys([(self._rewriter.sites[e.address], e.ranges) for e in with_keys]))
        for e in self._extra:
            if e.content is TAP:
                extra.append(next(remaining))
            else:
                extra += next(keys)
        values = self.jaxpr.consts if consts is None else consts
        return jaxprs.evaluate_with_consts(self.jaxpr, values, *inputs, *extra)

    def fill(self, values: Mapping[tuple[Address, Layer], np.ndarray]) -> list[np.ndarray]:
        """Builds taps from values by address and layer; the inverse of `figures`. Missing values are zeros."""
        taps = []
        for extra in self._taps:
            site = self._rewriter.sites[extra.address]
            scans = enclosing_scans(self.plan.sites.jaxpr, site.address)
            whole = np.zeros((*scans.values(), *self._rewriter.tap_shape), np.float32)
            for layer in site.layers():
                place = site.stack_indices(layer)
                index = tuple(place.get(address, slice(None)) for address in scans)
                whole[index] = values.get((site.address, layer), 0)
            taps.append(whole[tuple(slice(r.start, r.stop) for r in extra.ranges)])
        return taps

    def measurements(
        self, taps: Sequence[np.ndarray]
    ) -> Iterator[tuple[Site, Layer, list[tuple[str, str]], np.ndarray]]:
        """Yields the site, index, operands and figures of each measured layer.

        The figures have leading axes for the scans around the site that are not stacks: uses of the same layer.
        """
        names: dict[Hashable, list[tuple[str, str]]] = {}
        for site, layer, figures in self.figures(taps):
            decision = self._rewriter.decision(site.address, layer)
            assert decision is not None, "only what is quantized is measured"
            key = (site.address, id(decision))  # layers share decisions
            if key not in names:
                eqn = self.plan.sites.equation(site).eqn
                names[key] = MeasuredGemm(site, eqn, decision, _not_run).operand_names()
            yield site, layer, names[key], figures

    def figures(self, taps: Sequence[np.ndarray]) -> Iterator[tuple[Site, Layer, np.ndarray]]:
        """Yields the site, index and figures of each measured layer."""
        pieces: dict[Address, list[tuple[ExtraInput, np.ndarray]]] = {}
        for extra, values in zip(self._taps, taps, strict=True):
            pieces.setdefault(extra.address, []).append((extra, values))
        for address, tapped in pieces.items():
            site = self._rewriter.sites[address]
            figures_of = self._figures_by_layer(site, tapped)
            for layer in site.layers():
                if figures_of[layer].any():  # zeros: kept, or in a branch that was not taken
                    yield site, layer, figures_of[layer]

    def _figures_by_layer(self, site: Site, tapped: Sequence[tuple[ExtraInput, np.ndarray]]) -> np.ndarray:
        """The figures of a site, with the axes of its stacks first."""
        scans = enclosing_scans(self.plan.sites.jaxpr, site.address)
        whole = np.zeros((*scans.values(), *self._rewriter.tap_shape), np.float32)
        for extra, values in tapped:  # one piece for each part of a split scan
            whole[tuple(slice(r.start, r.stop) for r in extra.ranges)] = values
        stacks = [s.address for s in site.stacks]
        addresses = list(scans)
        order = sorted(range(len(scans)), key=lambda i: (addresses[i] not in stacks, i))
        return np.transpose(whole, [*order, *range(len(scans), whole.ndim)])


def first_loss(result: Any) -> jax.Array:
    """The loss: the first leaf of a loss function's result. Raises ValueError if it is no floating-point scalar."""
    loss = jnp.asarray(jax.tree.leaves(result)[0])
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(f"a loss must be one floating-point number, not {loss.dtype}{list(loss.shape)}")
    return loss


def _not_run(*_: Any) -> Any:
    raise AssertionError("only the operands' names are asked for")


def enclosing_scans(jaxpr: AnyJaxpr, address: Address) -> dict[Address, int]:
    """The addresses and lengths of the scans around an equation, outermost first."""
    scans: dict[Address, int] = {}
    for depth in range(0, len(address) - 1, 2):
        eqn = jaxprs.equations(jaxpr)[address[depth]]
        if container_of(eqn) is SCAN:
            scans[address[: depth + 1]] = eqn.params["length"]
        jaxpr = jaxprs.sub_jaxprs(eqn)[address[depth + 1]].jaxpr
    return scans
