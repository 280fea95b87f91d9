"""Finds a minimal set of products that must return to high precision to cure a policy.

The loss is compiled once, with a switch for every product of every layer. The switch selects the policy's precision or
the program's own. A trial sets the switches and evaluates the recorded batches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from policyc.base.files import atomic_write, read_json
from policyc.base.progress import stage, track
from policyc.compiler.pipeline import no_reentry
from policyc.compiler.planning.plan import Decision, Plan, make_plan
from policyc.compiler.rewriting.rewrite import SiteInputs, SiteTemplate, quantized_gemm
from policyc.compiler.sites.linears import full_name, sort_into_linears
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer
from policyc.experiments.record import RecordedLoss
from policyc.experiments.taps import TappedLoss, TapRewriter
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.loader import parse
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm

Metric = Literal["loss", "grad-cosine", "nan"]
CellKey = tuple[str, int | None]
"""A layer of a linear: the path of the linear without indices, and the index."""
Unit = tuple[CellKey, Gemm]
"""One product (fprop, dgrad or wgrad) in one layer of a linear."""

MOST_CULPRITS = 8
CURED_FRACTION = 0.5
"""Fraction of the policy's damage that a cure may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of keeping some products in high precision.

    `damage` is 0 without the policy, and infinite if a result is not finite.
    """

    kept: tuple[Unit, ...]
    damage: float
    cured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The products that must return to high precision, and the rules that do so."""

    culprits: tuple[Unit, ...]
    rules: tuple[str, ...]


class NoCulprit(ValueError):
    """Bisection found no culprits. The message says why."""


class Bisection:
    """The search for the culprits of one policy on one recorded loss."""

    def __init__(
        self, policy: Policy, recorded: RecordedLoss, metric: Metric, limit: float | None = None
    ) -> None:
        self._recorded, self._metric = recorded, metric
        self.plan: Plan = make_plan(policy, recorded.sites, recorded.plan.execution)
        decisions = self.plan.decisions(self.plan.phases[0])
        cells = find_cells(recorded.sites)
        quantized = {address for (address, _), decision in decisions.items() if decision.recipe is not None}
        switched = {c.site.address for c in cells}
        others = (s for s in recorded.sites if s.address in quantized - switched and not s.opaque)
        self.not_switched: tuple[str, ...] = tuple(dict.fromkeys(s.name for s in others))
        """Quantized linears without switches. They follow the policy in all trials."""
        self._cells = [c for c in cells if decisions[c.site.address, c.layer].recipe is not None]
        self.units: list[Unit] = []
        for gemm in Gemm:
            for cell in self._cells:
                recipe = decisions[cell.site.address, cell.layer].recipe
                is_changed = recipe is not None and recipe.gemm_treatments(gemm)[0].format != "keep"
                self.units += [(cell.key, gemm)] if is_changed and gemm in cell.site.products else []
        if not self.units:
            raise NoCulprit("the policy changes no product that can be switched")
        self._switched = TappedLoss(self.plan, decisions, SwitchRewriter)
        self._evaluate = jax.jit(self._make_evaluate())
        self._limit = limit
        self.trials: list[Trial] = []
        self._known: dict[frozenset[Unit], float] = {}
        self.on_trial: Callable[[Trial], None] = lambda _trial: None

    @property
    def most_trials(self) -> int:
        """Upper bound on the number of trials: two at the start, then a binary search and one trial per culprit."""
        return 2 + MOST_CULPRITS * (math.ceil(math.log2(len(self.units) + 1)) + 1)

    # ---- trials

    def _make_evaluate(self) -> Callable[..., Any]:
        recorded = self._recorded

        def loss(inputs: Any, switches: Any, consts: Any) -> jax.Array:
            return recorded.loss_of(self._switched.evaluate(inputs, switches, consts))

        def evaluate(inputs: Any, switches: Any, consts: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Returns the loss, the cosine of its gradient with the plain gradient, and whether both are finite."""
            value, grads = jax.value_and_grad(loss, allow_int=True)(inputs, switches, consts)
            if self._metric == "loss":
                return value, jnp.float32(1), jnp.isfinite(value)
            plain = jax.grad(recorded.plain_loss, allow_int=True)(inputs, consts)
            pairs = [
                (a, b) for a, b in zip(grads, plain, strict=True) if jnp.issubdtype(a.dtype, jnp.floating)
            ]
            dots = [sum(jnp.vdot(x, y).astype(jnp.float32) for x, y in p) for p in (
                pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])]  # fmt: skip
            are_finite = jnp.stack([jnp.all(jnp.isfinite(a)) for a, _ in pairs])
            return value, dots[0] / jnp.sqrt(dots[1] * dots[2]), jnp.isfinite(value) & jnp.all(are_finite)

        return evaluate

    def damage(self, kept: Sequence[Unit]) -> float:
        """Damage of the policy with these products in high precision: the mean over the batches, by the metric."""
        units = set(kept)
        switches = self._switched.fill(
            {
                (c.site.address, c.layer): np.array([(c.key, g) not in units for g in Gemm], np.float32)
                for c in self._cells
            }
        )
        values = []
        with no_reentry():
            for number, call in track(list(enumerate(self._recorded.calls))):
                loss, cosine, is_finite = jax.device_get(
                    self._evaluate(self._recorded.inputs, switches, call.consts)
                )
                if not is_finite:
                    return math.inf
                if self._metric == "loss":
                    values.append(abs(float(loss) - self._plain_losses[number]))
                else:
                    values.append(1 - float(cosine) if self._metric == "grad-cosine" else 0.0)
        return float(np.mean(values))

    @cached_property
    def _plain_losses(self) -> list[float]:
        plain = jax.jit(self._recorded.plain_loss)
        with no_reentry():
            return [float(plain(self._recorded.inputs, c.consts)) for c in self._recorded.calls]

    def _try(self, kept: Sequence[Unit]) -> bool:
        """Whether the policy is cured by keeping these products in high precision. Reuses known results."""
        key = frozenset(kept)
        if key not in self._known:
            with stage(f"trial {len(self.trials) + 1}"):
                self._known[key] = self.damage(kept)
        damage = self._known[key]
        trial = Trial(kept=tuple(kept), damage=damage, cured=damage <= self.limit)
        self.trials.append(trial)
        self.on_trial(trial)
        return trial.cured

    @property
    def limit(self) -> float:
        """The damage up to which the policy counts as cured.

        The default is half the damage of the whole policy, or any finite damage if that is infinite.
        """
        if self._limit is not None:
            return self._limit
        damage = self._known.get(frozenset())
        return CURED_FRACTION * damage if damage is not None and math.isfinite(damage) else _FINITE

    # ---- the search

    def run(self) -> Diagnosis:
        """Finds the culprits. Raises NoCulprit if the policy does no damage, or nothing cures it."""
        if self._metric == "loss" and not all(map(math.isfinite, self._plain_losses)):
            raise NoCulprit("the loss is not finite without the policy either")
        if self._try([]):
            raise NoCulprit(f"the policy does no damage by this metric: {self.trials[-1].damage:.3g}")
        if not self._try(self.units):
            raise NoCulprit(
                "the policy does damage even with all of its products in high precision: "
                + (
                    f"look at {', '.join(self.not_switched)}"
                    if self.not_switched
                    else "the program is the cause"
                )
            )
        culprits: list[Unit] = []
        rest = list(self.units)
        while len(culprits) < MOST_CULPRITS:
            # Find the shortest prefix that cures the policy together with the known culprits. Its last product is a
            # culprit.
            low, high = 0, len(rest)
            while low + 1 < high:
                middle = (low + high) // 2
                if self._try([*culprits, *rest[:middle]]):
                    high = middle
                else:
                    low = middle
            culprits.append(rest[high - 1])
            rest = rest[: high - 1]
            if self._try(culprits):
                return Diagnosis(culprits=tuple(culprits), rules=tuple(self._write_rules(culprits)))
        raise NoCulprit(
            f"keeping {MOST_CULPRITS} products does not cure it: the damage is spread over many. Those kept were "
            f"{', '.join(map(unit_name, culprits))}"
        )

    def _write_rules(self, culprits: Sequence[Unit]) -> list[str]:
        """Rules that return the culprits to high precision. They are appended to the policy."""
        cells = {cell.key: cell for cell in self._cells}
        gemms: dict[CellKey, list[Gemm]] = {}
        for key, gemm in culprits:
            gemms.setdefault(key, []).append(gemm)
        return [
            self._write_rule(cells[key], sorted(of_cell, key=list(Gemm).index))
            for key, of_cell in gemms.items()
        ]

    def _write_rule(self, cell: Cell, gemms: Sequence[Gemm]) -> str:
        """Keeps products of one cell: by the shortest name that matches no other, otherwise all in its block."""
        products = gemms[0] if len(gemms) == 1 else f"{{{','.join(gemms)}}}"
        layer = "" if cell.number is None else f" where layer == {cell.number}"
        words = cell.key[0].split(".")
        names = [".".join(words[-length:]) for length in range(1, len(words) + 1)]
        for name in (*names, f"^{names[-1]}") if all(w.replace("_", "").isalnum() for w in words) else ():
            rule = f"{name} @ {products}{layer} -> keep"
            matched = make_plan(parse(rule), self.plan.sites).matched_layers(0)
            if {(site.address, each) for site, each in matched} == {(cell.site.address, cell.layer)}:
                return rule
        return f"* @ {products}{layer or ' where not block'} -> keep"

    # ---- resuming

    def save(self, path: Path) -> None:
        """Writes the trials, so that a later run need not repeat them. If killed, it leaves the old file."""
        rows = [
            {"kept": sorted(map(unit_name, kept)), "damage": damage if math.isfinite(damage) else None}
            for kept, damage in self._known.items()
        ]
        with atomic_write(path) as stream:
            stream.write((json.dumps({"of": self.identity, "trials": rows}, indent=1) + "\n").encode())

    def load(self, path: Path) -> int:
        """Reads the trials of an earlier run of the same policy, loss and batches. Returns their number."""
        try:
            data = read_json(path)
        except ValueError:
            raise ValueError(
                f"'{path}' was not written by policyc bisect --trials: name another file"
            ) from None
        if data["of"] != self.identity:
            raise ValueError(
                f"'{path}' belongs to another policy, program, checkpoint or metric: name another file"
            )
        by_name = {unit_name(unit): unit for unit in self.units}
        for row in data["trials"]:
            damage = math.inf if row["damage"] is None else row["damage"]
            self._known[frozenset(by_name[name] for name in row["kept"])] = damage
        return len(self._known)

    @property
    def identity(self) -> Mapping[str, Any]:
        """Everything that trials depend on: policy, program, plain losses and metric."""
        return {
            "policy": self.plan.policy.sha256,
            "loss": self._recorded.sites.hash,
            "plain": self._plain_losses,
            "metric": self._metric,
        }


# ---- what can be switched


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layer of one linear. `number` is that of its block; None if it is in no block, or this is not known."""

    key: CellKey
    site: Site
    layer: Layer
    number: int | None


def find_cells(sites: Sites) -> list[Cell]:
    """The layers of all linears that can be switched."""
    return [
        Cell(
            key=(full_name(linear.stack, linear.name), index),
            site=site,
            layer=layer,
            number=None if (number := site.attributes(layer).get("layer")) is None else int(number),
        )
        for linear in sort_into_linears(sites)
        for index, (site, layer) in linear.ordered()
        if _can_switch(site)
    ]


def _can_switch(site: Site) -> bool:
    is_changed = not site.opaque and site.weight is not None and site.kind.name not in ("embedding", "router")
    # A ragged product has rows without a group, and a site in a shard_map takes no switches.
    has_input = not site.is_ragged and site.takes_extra_inputs
    return is_changed and has_input and set(site.types[:2]) <= {"float32", "bfloat16", "float16"}


_FINITE = 1e30
"""Upper bound on any finite damage."""


def unit_name(unit: Unit) -> str:
    (linear, index), gemm = unit
    return f"{linear}{'' if index is None else f'[{index}]'} @ {gemm}"


# ---- switches


@dataclass(frozen=True, eq=False)
class _SwitchedSite:
    """A site whose products are switched one by one between the policy's precision and the program's own."""

    site: Site
    eqn: JaxprEqn
    quantized: Callable[..., Any]

    def plain(self, lhs: Any, rhs: Any) -> Any:
        return jaxprs.bind(self.eqn, lhs, rhs)[0]

    def gemms(self) -> Iterator[Gemm]:
        """Yields the products that compute the gradients of lhs and rhs, in this order."""
        yield from (Gemm.WGRAD, Gemm.DGRAD) if self.site.weight == "lhs" else (Gemm.DGRAD, Gemm.WGRAD)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_switched(switched: _SwitchedSite, lhs: Any, rhs: Any, switches: Any) -> Any:
    return _run_switched_fwd(switched, lhs, rhs, switches)[0]


def _run_switched_fwd(switched: _SwitchedSite, lhs: Any, rhs: Any, switches: Any) -> tuple[Any, Any]:
    y = jnp.where(switches[0] > 0, switched.quantized(lhs, rhs), switched.plain(lhs, rhs))
    return y, (lhs, rhs, switches)


def _run_switched_bwd(switched: _SwitchedSite, residuals: Any, dy: Any) -> tuple[Any, ...]:
    lhs, rhs, switches = residuals
    quantized = jax.vjp(switched.quantized, lhs, rhs)[1](dy)
    plain = jax.vjp(switched.plain, lhs, rhs)[1](dy)
    order = list(Gemm)
    gradients = [
        jnp.where(switches[order.index(gemm)] > 0, q, p)
        for gemm, q, p in zip(switched.gemms(), quantized, plain, strict=True)
    ]
    return *gradients, jnp.zeros_like(switches)


_run_switched.defvjp(_run_switched_fwd, _run_switched_bwd)


class SwitchRewriter(TapRewriter):
    """Gives each site an extra input with a switch for each product, instead of a tap."""

    tap_shape: tuple[int, ...] = (len(Gemm),)

    def make_template(self, site: Site, decision: Decision, inputs: SiteInputs) -> SiteTemplate:
        if not self.is_measured(site):
            return super().make_template(site, decision, inputs)
        eqn = self.equations[site.address].eqn
        gemm = quantized_gemm(site, eqn, decision, SiteInputs(constant_key=inputs.constant_key))
        return self.tap(site, partial(_run_switched, _SwitchedSite(site, eqn, gemm)))
