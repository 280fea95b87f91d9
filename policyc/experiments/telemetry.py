"""What quantization does to the operands and gradients of a loss, measured in a step of its own.

In: a policy, a loss and its arguments. Out: rows: for each operand of each quantized GEMM of each layer its SQNR, what
was flushed and what saturated, and its largest magnitude; for each parameter the cosine between its gradient under the
policy and its plain one. The loss is run once more for it, with a tap at every site: an input that is never read, and
whose gradient is what was measured there. The one trap: taps go where sites are. A site in a container that is not
entered here (cond, shard_map), or of a ragged product, runs as the policy says and is not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.compiler.analysis import analyze
from policyc.compiler.hoist import LayerRange
from policyc.compiler.pipeline import as_policy, current, no_reentry, present
from policyc.compiler.plan import ExecutionOptions, Phase, Plan, make_plan
from policyc.compiler.plan_tables import as_json
from policyc.compiler.rewrite import Fixed, Rewriter, dot
from policyc.compiler.sites import Address, Layer, Site
from policyc.compiler.trace import inputs_of, trace
from policyc.jaxcore import autodiff, jaxprs
from policyc.language.files import atomic_write
from policyc.language.formats import FORMATS
from policyc.language.policy import Policy
from policyc.language.recipes import Recipe
from policyc.language.selectors import DottedPath as Names
from policyc.numerics.gemm import Backends, GemmOptions, operands
from policyc.numerics.measure import FIGURES, figures, told

StatsRow = dict[str, Any]
Taps = Mapping[Address, jax.Array]

_PER_SITE = 6  # operands of the three products


def stats(policy: Policy | str | Path, loss: Callable[..., Any], *args: Any) -> list[StatsRow]:
    """What a policy does to the numbers of a loss, called with these arguments. The first holds the parameters."""
    return StatsRecorder(policy, loss)(*args)


def set_output_dir(folder: Path | str) -> None:
    """For training programs: says where they put their results. The plan and what is measured go there too.

    Without an active policy it does nothing.
    """
    session = current()
    if session is None:
        return
    session.folder = Path(folder)
    if session.plans and jax.process_index() == 0:
        session.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(session.folder / "plan.json") as stream:
            stream.write(as_json(max(session.plans, key=lambda p: sum(p.counts))).encode())


def should_observe(step: int) -> bool:
    """For training programs: is this a step to be measured? That is what `--stats-every` asks for."""
    session = current()
    return session is not None and session.stats_every > 0 and step % session.stats_every == 0


def observe(step: int, loss: Callable[..., Any], *args: Any) -> None:
    """For training programs: measures a step, if it is one to be measured, and appends its rows to `stats.jsonl`."""
    session = current()
    if session is None or not should_observe(step):
        return
    if loss not in session.measured:
        session.measured[loss] = StatsRecorder(session.policy, loss, session.execution)
    rows = session.measured[loss](*args)
    if jax.process_index() == 0:
        _append((session.folder or Path()) / "stats.jsonl", step, rows)


class StatsRecorder:
    """Measures one loss. It is compiled once for each phase of the policy's schedule."""

    def __init__(
        self, policy: Policy | str | Path, loss: Callable[..., Any], execution: ExecutionOptions | None = None
    ) -> None:
        self._policy, self._loss, self._execution = as_policy(policy), loss, execution or ExecutionOptions()
        self._tapped: dict[Phase, Tapped] = {}
        self._measure = jax.jit(self._traced)

    def __call__(self, *args: Any) -> list[StatsRow]:
        with no_reentry():
            found = jax.device_get(self._measure(*args))
        plan = next(iter(self._tapped.values())).plan
        tapped = self._tapped[present(plan)]
        losses = {"loss": _number(found["loss"]), "plain_loss": _number(found["plain"])}
        return [*tapped.rows(found["taps"]), *_gradient_rows(plan, found["cosines"]), losses]

    def _traced(self, *args: Any) -> dict[str, Any]:
        traced = trace(self._loss, args, {}, (0,), autodiff.argument_names(self._loss, 1))
        plan = make_plan(self._policy, analyze(traced.closed, traced.paths), self._execution)
        plan.check()
        tapped = self._tapped[present(plan)] = Tapped(plan)

        def under_policy(inputs: Sequence[Any], taps: Taps) -> jax.Array:
            return _loss_of(traced.result(tapped.evaluate(inputs, taps)))

        def plain(inputs: Sequence[Any]) -> jax.Array:
            return _loss_of(traced.run(traced.closed, inputs))

        inputs = inputs_of(args, (0,))
        both = jax.value_and_grad(under_policy, argnums=(0, 1), allow_int=True)
        loss, (ours, taps) = both(inputs, tapped.taps())
        reference, theirs = jax.value_and_grad(plain, allow_int=True)(inputs)
        stacks = _stacks(plan)
        cosines = [
            _cosine(a, b, bool(stacks.get(path)))
            for a, b, path in zip(ours, theirs, plan.sites.parameters, strict=True)
        ]
        return {"taps": taps, "cosines": cosines, "loss": loss, "plain": reference}


def _loss_of(result: Any) -> jax.Array:
    """The loss among what a loss function returns: the first of it."""
    loss = jnp.asarray(jax.tree.leaves(result)[0])
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"a loss is one number, and this is {loss.dtype}{list(loss.shape)}")
    return loss


# ---- the loss, with taps


@dataclass(frozen=True, eq=False)
class Tap:
    """A site as it is run and measured. What its operands are called, and their formats, is known once traced."""

    site: Site
    recipe: Recipe
    backends: Backends
    names: list[tuple[str, str]] = field(default_factory=list)

    def run(self, lhs: jax.Array, rhs: jax.Array) -> Any:
        return dot(self.site.eqn, self.site, (self.recipe, self.backends))(lhs, rhs)

    def measure(self, lhs: jax.Array, rhs: jax.Array, dy: jax.Array) -> jax.Array:
        numbers = self.site.eqn.params["dimension_numbers"]
        options = GemmOptions(weight=self.site.weight, site=self.site.number)
        entering = operands(lhs, rhs, dy, numbers, self.recipe, options)
        self.names[:] = [
            (f"{e.gemm}.{e.role}" if self.site.weight else e.side.name, e.side.treatment.format)
            for e in entering
        ]
        nothing = jnp.zeros(len(FIGURES))
        return jnp.stack([
            figures(e) if FORMATS[e.side.treatment.format].is_quantized else nothing for e in entering
        ])  # fmt: skip


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(site_tap: Tap, lhs: jax.Array, rhs: jax.Array, tap: jax.Array) -> Any:
    del tap
    return site_tap.run(lhs, rhs)


def _tapped_fwd(site_tap: Tap, lhs: jax.Array, rhs: jax.Array, tap: jax.Array) -> tuple[Any, Any]:
    del tap
    y, back = jax.vjp(site_tap.run, lhs, rhs)
    return y, (back, lhs, rhs)


def _tapped_bwd(site_tap: Tap, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    back, lhs, rhs = kept
    return (*back(dy), site_tap.measure(lhs, rhs, dy))


_tapped.defvjp(_tapped_fwd, _tapped_bwd)


class Tapped:
    """The loss of a plan, evaluated equation by equation with a tap at every site."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._decisions = plan.decisions(present(plan))
        self._rewriter = Rewriter(plan.sites, self._decisions)
        self._sites = {s.address: s for s in plan.sites if self._measurable(s)}
        self._scans: dict[Address, tuple[tuple[Address, int], ...]] = {}
        self._known: dict[tuple[Address, Layer], Tap] = {}
        self._find(plan.sites.jaxpr, (), ())

    def _measurable(self, site: Site) -> bool:
        recipes = (self._decisions[site.address, la].recipe for la in site.layers())
        formats = {t.format for r in recipes if r is not None for t in r.treatments}
        return site.kind == "dot" and not site.opaque and any(FORMATS[f].is_quantized for f in formats)

    def _find(self, held: Any, address: Address, scans: tuple[tuple[Address, int], ...]) -> None:
        """The sites that taps can reach, with the scans around each."""
        for at, eqn in enumerate(jaxprs.body_eqns(held)):
            here, name = (*address, at), jaxprs.primitive_name(eqn)
            if here in self._sites:
                self._scans[here] = scans
            elif name == "scan":
                (body,) = jaxprs.bodies(eqn)
                self._find(body.held, (*here, 0), (*scans, (here, eqn.params["length"])))
            elif name in jaxprs.CALLS:
                (body,) = jaxprs.bodies(eqn)
                self._find(body.held, (*here, 0), scans)

    def taps(self) -> Taps:
        shape = (_PER_SITE, len(FIGURES))
        return {a: jnp.zeros((*(n for _, n in scans), *shape)) for a, scans in self._scans.items()}

    def evaluate(self, inputs: Sequence[Any], taps: Taps) -> list[Any]:
        closed = self.plan.sites.jaxpr
        return self._body(closed, (), {}, inputs, taps)

    def _body(self, held: Any, address: Address, fixed: Fixed, args: Sequence[Any], taps: Taps) -> list[Any]:
        jaxpr = getattr(held, "jaxpr", held)
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, getattr(held, "consts", ()), strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if jaxprs.is_literal(atom) else values[atom]

        for at, eqn in enumerate(jaxpr.eqns):
            here = (*address, at)
            below = {a: t for a, t in taps.items() if a[: len(here)] == here}
            given = [read(a) for a in eqn.invars]
            if below:
                found = self._container(eqn, here, fixed, given, below)
                values.update(zip(eqn.outvars, found, strict=True))
                continue
            # As the policy has it: a site without a tap, a container with such sites, or an equation of its own.
            for made in self._rewriter.equation(eqn, here, fixed, jaxprs.AxisEnv())[0]:
                values.update(zip(made.outvars, jaxprs.bind(made, *map(read, made.invars)), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _container(self, eqn: Any, here: Address, fixed: Fixed, given: list[Any], taps: Taps) -> list[Any]:
        if here in taps:
            return self._site(eqn, here, fixed, given, taps[here])
        (body,) = jaxprs.bodies(eqn)
        if jaxprs.primitive_name(eqn) == "scan":
            return self._scan(eqn, body.held, here, fixed, given, taps)

        def call(given: Sequence[Any], taps: Taps) -> list[Any]:
            return self._body(body.held, (*here, 0), fixed, given, taps)

        if jaxprs.primitive_name(eqn) in jaxprs.REMAT:
            call = jax.checkpoint(call, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        return call(given, taps)

    def _site(self, eqn: Any, here: Address, fixed: Fixed, given: list[Any], tap: jax.Array) -> list[Any]:
        site = self._sites[here]
        layer: Layer = tuple(fixed[s.address] for s in site.stacks)
        done = self._rewriter.done(here, layer)
        if done is None:
            return jaxprs.bind(eqn, *given)
        site_tap = self._known[here, layer] = Tap(site, *done)
        return [_tapped(site_tap, *given, tap)]

    def _scan(
        self, eqn: Any, held: Any, here: Address, fixed: Fixed, given: list[Any], taps: Taps
    ) -> list[Any]:
        """A scan, its taps beside what it runs over. Where layers of a stack differ, several after each other."""
        parts, params, inside = jaxprs.scan_parts(eqn), eqn.params, (*here, 0)
        consts, rest = given[: parts.consts], given[parts.consts :]
        carry, xs = rest[: parts.carry], rest[parts.carry :]
        stack = self._rewriter.stack(here)
        runs = (
            [LayerRange(0, params["length"])] if stack is None else self._rewriter.runs(stack, inside, fixed)
        )
        pieces: list[Any] = []
        for run in reversed(runs) if params["reverse"] else runs:
            held_at = fixed if stack is None else {**fixed, here: run.start}

            def step(carry: list[Any], each: Any, held_at: Fixed = held_at) -> tuple[list[Any], list[Any]]:
                found = self._body(held, inside, held_at, [*consts, *carry, *each[0]], each[1])
                return found[: parts.carry], found[parts.carry :]

            part = jax.tree.map(
                partial(lax.slice_in_dim, start_index=run.start, limit_index=run.stop), (xs, taps)
            )
            length = run.stop - run.start
            unroll = min(params["unroll"], length)
            carry, ys = lax.scan(step, carry, part, length, params["reverse"], unroll)
            pieces.append(ys)
        if params["reverse"]:
            pieces.reverse()
        return [*carry, *(jnp.concatenate(each) for each in zip(*pieces, strict=True))]

    # ---- what came out

    def rows(self, taps: Mapping[Address, np.ndarray]) -> Iterator[StatsRow]:
        for address, scans in self._scans.items():
            site = self._sites[address]
            stacks = [s.address for s in site.stacks]
            # The axes of stacks come first; other scans are uses of the same layer.
            order = sorted(range(len(scans)), key=lambda i: (scans[i][0] not in stacks, i))
            found = np.transpose(taps[address], [*order, len(scans), len(scans) + 1])
            for layer in site.layers():
                yield from self._layer_rows(site, layer, found[layer])

    def _layer_rows(self, site: Site, layer: Layer, found: np.ndarray) -> Iterator[StatsRow]:
        recipe = self._decisions[site.address, layer].recipe
        alike = (tap for (a, _), tap in self._known.items() if a == site.address and tap.recipe == recipe)
        tap = next(alike, None)
        if tap is None:
            return
        indices = {s.address: i for s, i in zip(site.stacks, layer, strict=True)}
        label = site.parameters[0] if site.parameters else site.scope
        where = _named(next(iter(label.at(indices))), site.name)
        for at, (name, form) in enumerate(tap.names):
            if FORMATS[form].is_quantized:
                yield {**where, "operand": name, "format": form, **told(found[..., at, :])}


def _named(path: Names, otherwise: str = "") -> StatsRow:
    """A path without its index, and the index: the layer."""
    indices = [n.index for n in path if n.index is not None]
    return {
        "site": ".".join(n.text for n in path) or otherwise,
        "layer": indices[0] if len(indices) == 1 else indices or None,
    }


# ---- gradients


def _stacks(plan: Plan) -> dict[Names, int]:
    """Parameters that hold a stack of layers, with its size."""
    return {
        label.path: s.stacks[0].size for s in plan.sites if s.stacks for label in s.parameters if label.marks
    }


def _cosine(a: jax.Array, b: jax.Array, by_layer: bool) -> jax.Array:
    """Between two gradients, or between their layers."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.zeros(0)
    rows = a.shape[0] if by_layer else 1
    x, y = (g.astype(jnp.float32).reshape(rows, -1) for g in (a, b))
    # Their lengths do not count, and squares of small numbers would be lost.
    x, y = (g / jnp.maximum(jnp.max(jnp.abs(g), axis=1, keepdims=True), 1e-30) for g in (x, y))
    return jnp.sum(x * y, 1) / jnp.sqrt(jnp.sum(x * x, 1) * jnp.sum(y * y, 1))


def _gradient_rows(plan: Plan, cosines: Sequence[np.ndarray]) -> Iterator[StatsRow]:
    stacks = _stacks(plan)
    for path, found in zip(plan.sites.parameters, cosines, strict=True):
        for at, cosine in enumerate(found.tolist()):
            where = _named(path)
            yield {
                "parameter": where["site"],
                "layer": at if stacks.get(path) else where["layer"],
                "cosine": _number(cosine),
            }


def _number(value: Any) -> float | None:
    """A number as JSON has it: there is no NaN in it."""
    return float(value) if math.isfinite(value) else None


# ---- files


def _append(path: Path, step: int, rows: Sequence[StatsRow]) -> None:
    """Adds rows to a file, whole. Those of the same step and later ones are of a run that was taken up again."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] < step]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        stream.write("".join(f"{line}\n" for line in kept).encode())
        stream.write("".join(json.dumps({"step": step, **row}) + "\n" for row in rows).encode())
