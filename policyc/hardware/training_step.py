"""A training step to be estimated: its plan, and its layers grouped by recipe.

A plan covers one evaluation of the loss. If a batch is computed in microbatches, the plan covers one of them, and
`TrainingStep.accumulate` is their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from policyc.compiler.matching.decisions import Phase
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.planning.plan import Decision, Plan, make_plan
from policyc.compiler.sites.site import Site
from policyc.hardware.mesh import MeshShape
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm, Recipe
from policyc.models.llama.configs import ModelConfig
from policyc.numerics import backends
from policyc.numerics.backends import Backend
from policyc.numerics.products import Backends
from policyc.numerics.targets import Target

RECOMPUTES_GEMMS = ("full", "quantized")
"""Values of `remat` under which the backward pass runs the forward GEMMs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The plan of one evaluation of the loss, the number of evaluations per step, and facts that a plan cannot show.

    The plan says which backend runs each product, so it must be made for the GPU that is estimated.

    `causal` says that half of the attention scores are never computed. `remat` says what the backward pass recomputes:
    nothing (none), everything but GEMMs (dots), or everything (full; or quantized, which saves operands but not
    results). `gathers_once` says that weights are gathered, and gradients added over devices, once per step instead of
    once per evaluation. `model` has the sizes of a block, if known: they determine what the context and tensor axes
    move. `phase` is one of the plan's; None is the first. `sequences` is the number of sequences per step, and
    `sequence` their length, if known.
    """

    plan: Plan
    accumulate: int = 1
    causal: bool = False
    remat: str = "none"
    gathers_once: bool = False
    model: ModelConfig | None = None
    phase: Phase | None = None
    sequences: int | None = None
    sequence: int | None = None

    @property
    def target(self) -> Target:
        """The GPU that the plan is for."""
        target = self.plan.execution.target
        assert target is not None, "a step is priced for a GPU"
        return target

    def under(self, policy: Policy, execution: ExecutionOptions | None = None) -> TrainingStep:
        """The same step under another policy, and for another machine if `execution` says so."""
        plan = make_plan(policy, self.plan.sites, execution or self.plan.execution)
        return replace(self, plan=plan, phase=None)

    def with_other_backend(self) -> TrainingStep:
        """The same step on the other backend of predictions: `PRICED`, or its fallback if that runs a product."""
        priced = backends.PRICED
        other = backends.load(priced).fallback if priced in count_backends(self.plan) else priced
        return self.under(self.plan.policy, replace(self.plan.execution, backend=other))

    def groups(self) -> Iterator[LayerGroup]:
        """Yields the layers of every site, grouped by recipe."""
        return group_layers(self.plan, self.phase or self.plan.phases[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """The layers of a site that share a recipe, and the rule of their first quantized product.

    `count` is how often their products run in one evaluation of the loss. `backends` run fprop, dgrad and wgrad.
    """

    site: Site
    recipe: Recipe | None
    rule: int | None
    count: float
    backends: Backends

    @classmethod
    def from_decision(cls, site: Site, decision: Decision, count: float = 1) -> LayerGroup:
        recipe = None if site.opaque else decision.recipe
        bits = [0 if recipe is None else recipe.bits(gemm) for gemm in Gemm]
        rule = next((decision.rule(gemm) for gemm, b in zip(Gemm, bits, strict=True) if 0 < b <= 8), None)
        fprop, dgrad, wgrad = (lowering.backend for lowering in decision.lowerings)
        return cls(site=site, recipe=recipe, rule=rule, count=count, backends=(fprop, dgrad, wgrad))

    def backend(self, gemm: Gemm) -> Backend | None:
        """The backend that runs a product; None if nothing is quantized."""
        name = dict(zip(Gemm, self.backends, strict=True))[gemm]
        return backends.load(name) if name else None

    @property
    def quantizer(self) -> str:
        """The backend that quantizes the operands of these layers."""
        able = (name for name in backends.preferred() if not backends.load(name).only_ragged)
        return next((name for name in able if name in self.backends), "emulate")


def group_layers(plan: Plan, phase: Phase) -> Iterator[LayerGroup]:
    """Yields the layers of every site of a plan in a phase, grouped by recipe."""
    decisions = plan.decisions(phase)
    for site in plan.sites:
        counts = Counter(decisions[site.address, layer] for layer in site.layers())
        for decision, count in counts.items():
            yield LayerGroup.from_decision(site, decision, count * site.repeats / site.count)


OperandKey = tuple[object, ...]
ReaderCounts = dict[OperandKey, int]


def count_readers(plan: Plan) -> ReaderCounts:
    """Counts the sites that read each activation. They share its codes if it is rounded to nearest."""
    return dict(Counter(activation_key(site) for site in plan.sites))


def activation_key(site: Site) -> OperandKey:
    """A key for the variable that is the activation of a site."""
    return (*site.address[:-1], site.activation)


def microbatch_tokens(plan: Plan) -> int:
    """The number of tokens in one evaluation of the loss. Ragged products have a row for each expert of a token."""
    return max(s.m * s.batch for s in plan.sites if s.weight is not None and not s.is_ragged)


def count_backends(plan: Plan) -> Counter[str]:
    """Counts the quantized products that each backend runs, in all layers, in the first phase."""
    counts: Counter[str] = Counter()
    for product in plan.products(plan.phases[0]):
        if product.lowering.backend:
            counts[product.lowering.backend] += len(product.layers)
    return counts


def is_quantized(recipe: Recipe | None) -> bool:
    """Whether a recipe puts any operand into 8 bits or fewer."""
    return recipe is not None and any(0 < t.bits <= 8 for t in recipe.treatments)


def unquantized_format(site: Site) -> str:
    """The format that the products of a site have without a policy."""
    return "f32" if site.types[0] == "float32" else "bf16"


def local_shape(site: Site, mesh: MeshShape) -> tuple[float, float, float, float]:
    """m, n, k and batch of a product on one device. The tensor axis divides the longer side of a weight."""
    n, k = (site.n / mesh.tensor, site.k) if site.n >= site.k else (site.n, site.k / mesh.tensor)
    return site.m / mesh.token_shards, n, k, site.batch


def weight_elements(site: Site) -> int:
    """The elements of the weights that one product reads. A ragged product reads a matrix for each group of rows."""
    groups = site.shapes[1][0] if site.is_ragged else 1
    return int(site.batch * site.n * site.k * groups)


def count_parameters(plan: Plan) -> float:
    """Counts the parameters that GEMMs read."""
    sizes = {
        tuple(p.path for p in s.parameters): weight_elements(s) * s.count
        for s in plan.sites
        if s.weight is not None
    }
    return sum(sizes.values())
