"""The linears of a model as a server stores them: each layer of each weight GEMM, derived from the parameters."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from policyc.compiler.matching.decisions import Phase
from policyc.compiler.planning.plan import Decision, Plan
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.recipes import Gemm, Role, Treatment
from policyc.language.selectors import DottedPath
from policyc.numerics.operands import quantize_operand
from policyc.numerics.products import OperandSpec
from policyc.numerics.quantize import Axes, Quantized, make_key
from policyc.numerics.quantize.reference.blocks import bound_of
from policyc.serving.formats import BLOCK, BOUNDS, Array, StoredLinear, group_names
from policyc.serving.servable import ForwardGemm, find_obstacle, served_format

Names: TypeAlias = Mapping[str, str]
"""The name of the tensor in the file for each parameter: `model.layers.{layer}.mlp.up_proj.weight` for
`layers.mlp.up_proj`, the path without the index of the layer. `{layer}` is that index, `{expert}` that of the expert.
Other indices stay: `decoder.layers.mlp.wi[0].kernel`."""

Convert: TypeAlias = Callable[[Array], Array]
"""Turns a weight [N, K] as its GEMM reads it into that of the server's model: permutes rows, or multiplies by a
factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight GEMM in one layer and, if it has experts, of one expert.

    Attributes:
      module: its name in the file, without `.weight`.
      path: the parameter without the index of its layer, as in `names` and `stats.jsonl`.
      layer: the index of the layer; None if there is none.
      load: returns the weight, [N, K], as the GEMM reads it in training.
      convert: turns it into the weight of the server's model.
    """

    module: str
    path: str
    layer: int | None
    site: Site
    decision: Decision
    load: Callable[[], Array]
    convert: Convert | None = None

    def load_converted(self) -> Array:
        """The weight of the server's model."""
        return self.load() if self.convert is None else self.convert(self.load())

    @property
    def format(self) -> str:
        """The format of its codes; empty if it is stored as it is."""
        return served_format(self.decision)

    @property
    def scales_tokens(self) -> bool:
        """Whether FP8 activations have a scale for each token: servers compute it then."""
        activation = self.decision.applied_recipe.treatment(Gemm.FPROP, Role.ACTIVATION)
        return (activation.format, activation.outer) == ("fp8", "row")

    @property
    def weight_treatment(self) -> Treatment:
        return self.decision.applied_recipe.treatment(Gemm.FPROP, Role.WEIGHT)


def find_linears(
    params: Any, plan: Plan, phase: Phase, names: Names, convert: Mapping[str, Convert] | None = None
) -> list[Linear]:
    """The linears of a plan in a phase of its schedule.

    `params` are the parameters that the loss was traced with: arrays, or their shapes if no weight is loaded. Raises
    ValueError for everything that cannot be exported, with the edit of the policy that would do.
    """
    leaves = jax.tree.leaves(params)
    check_names(plan, leaves, names)
    convert = convert or {}
    faults: dict[str, list[str]] = {}
    found: dict[str, Linear] = {}
    decisions = plan.decisions(phase)

    @lru_cache(maxsize=2)  # the experts of a layer are loaded one by one, those of gate and up in turn
    def derive(site: Site, layer: Layer) -> Array:
        return derive_weight(plan, site, layer, leaves)

    for site in (s for s in plan.sites if s.weight is not None and not s.has_one_hot):
        for layer in site.layers():
            decision = decisions[site.address, layer]
            for linear in _linears_of(site, layer, decision, plan, names, derive, faults):
                other = found.setdefault(linear.module, linear)
                if other.path != linear.path:
                    raise ValueError(
                        f"names gives {other.path} and {linear.path} the tensor {linear.module}.weight"
                    )
                if other.decision.recipe != decision.recipe:
                    text = "it is used twice, under different recipes: give both the same"
                    faults.setdefault(text, []).append(linear.module)
    for site in plan.sites:
        for layer in site.layers():
            recipe = decisions[site.address, layer].recipe
            if recipe and (obstacle := find_obstacle(ForwardGemm(site=site, recipe=recipe))):
                faults.setdefault(f"{obstacle.reason}: {obstacle.edit}", []).append(_label(site, layer))
    if faults:
        lines = (f"{group_names(dict.fromkeys(where))}: {what}" for what, where in faults.items())
        raise ValueError("this cannot be exported:\n  " + "\n  ".join(lines))
    if unknown := sorted(set(convert) - {linear.path for linear in found.values()}):
        raise ValueError(f"convert has {group_names(unknown)}, which is not the weight of a site")
    return [replace(linear, convert=convert.get(linear.path)) for linear in found.values()]


def _label(site: Site, layer: Layer) -> str:
    return ".".join(map(str, site.layer_path(site.stack_indices(layer)))) or site.name


def check_names(plan: Plan, leaves: Sequence[Any], names: Names) -> None:
    """Raises ValueError if the parameters are not those of the plan, or if `names` does not name each."""
    paths = plan.sites.parameters
    if len(paths) != len(leaves):
        raise ValueError(f"the plan has {len(paths)} parameters, and {len(leaves)} were given: use those that the loss "
                         "was traced with")  # fmt: skip
    found = {".".join(map(str, path)): find_key(path, names) for path in paths}
    if missing := sorted(path for path, key in found.items() if key is None):
        raise ValueError(f"names has no tensor for {group_names(missing)}")
    if unknown := sorted(set(names) - {key[0] for key in found.values() if key}):
        raise ValueError(f"names has {group_names(unknown)}, which no parameter is called: "
                         f"there are {group_names(sorted(found))}")  # fmt: skip


def find_key(path: DottedPath, names: Names) -> tuple[str, int | None] | None:
    """The key of a parameter in `names`, and the first index that it leaves out, that of the layer.

    Of several keys, it is the one with the most indices. None if `names` has none.
    """
    numbered = [i for i, segment in enumerate(path) if segment.index is not None]
    for count in range(len(numbered) + 1):
        for left_out in itertools.combinations(numbered, count):
            key = ".".join(s.text if i in left_out else str(s) for i, s in enumerate(path))
            if key in names:
                return key, path[left_out[0]].index if left_out else None
    return None


def _linears_of(
    site: Site,
    layer: Layer,
    decision: Decision,
    plan: Plan,
    names: Names,
    derive: Callable[[Site, Layer], Array],
    faults: dict[str, list[str]],
) -> Iterator[Linear]:
    path = site.layer_path(site.stack_indices(layer))
    named = find_key(path, names)
    if plan.sites.equation(site).derivation is None or named is None:
        text = "the weight is computed from parameters, not one of them: export the merged weights"
        faults.setdefault(text, []).append(_label(site, layer))
        return
    key, index = named
    if named in (find_key(other, names) for other in plan.sites.looked_up):
        if served_format(decision):
            text = "the embedding has the same weight, and servers store it once, in bf16: keep the head"
            faults.setdefault(text, []).append(_label(site, layer))
        return
    experts = site.weight_shape[site.batch_dims[0]] if site.batch_dims else 0
    fields = {name for _, name, _, _ in string.Formatter().parse(names[key]) if name}
    if ("expert" in fields) != bool(experts) or ("layer" in fields) != (index is not None):
        raise ValueError(f"names: '{names[key]}' for {key} must have {{expert}} if its site has experts "
                         f"(it has {'some' if experts else 'none'}), and {{layer}} if it is a layer")  # fmt: skip
    for expert in range(experts or 1):
        tensor = names[key].format(layer=index, expert=expert)

        def load(expert: int | None = expert if experts else None) -> Array:
            weight = derive(site, layer)
            return weight if expert is None else np.asarray(weight[expert])

        yield Linear(
            module=tensor.removesuffix(".weight"),
            path=key,
            layer=index,
            site=site,
            decision=decision,
            load=load,
        )


def derive_weight(plan: Plan, site: Site, layer: Layer, leaves: Sequence[Any]) -> Array:
    """The weight of a site in a layer as its GEMM reads it, [N, K], or [experts, N, K]: casts and slices included."""
    equation = plan.sites.equation(site)
    assert equation.derivation is not None
    indices = site.stack_indices(layer)
    value: Any = leaves[equation.derivation.input]
    for step in equation.derivation.steps:
        if isinstance(step, tuple):
            value = value[indices[step]]  # of a NumPy array, which copies no other layer
        else:
            (value,) = jaxprs.bind_at(step, jnp.asarray(value))
    params, batch = equation.eqn.params, site.batch_dims
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
    contracted = numbers[0][0 if site.weight == "lhs" else 1]
    free = [i for i in range(value.ndim) if i not in (*contracted, *batch)]
    ordered = np.asarray(value).transpose([*batch, *free, *contracted])
    lead = [value.shape[i] for i in batch]
    return ordered.reshape(*lead, -1, int(np.prod([value.shape[i] for i in contracted])))


# ---- quantizing


def quantize_served(
    group: Sequence[Linear], sharing: Mapping[str, Sequence[Linear]]
) -> list[tuple[StoredLinear, StoredLinear]]:
    """Each linear of a server's module as it is stored, under one outer scale, and with the codes of training.

    `sharing` is what `find_sharing` returns for the model.
    """
    trained: dict[str, StoredLinear] = {}
    for linear in group:
        if linear.module not in trained:
            members = sharing[linear.module]
            codes = quantize_linears([member.load() for member in members], linear.decision)
            trained |= {member.module: code for member, code in zip(members, codes, strict=True)}
    shared = {linear.module for linear in sharing[group[0].module]}
    is_converted = any(linear.convert for linear in group)
    if not is_converted and (group[0].format == "fp8-row" or {linear.module for linear in group} <= shared):
        return [(trained[linear.module], trained[linear.module]) for linear in group]
    stored = quantize_linears([linear.load_converted() for linear in group], group[0].decision)
    return [(each, trained[linear.module]) for linear, each in zip(group, stored, strict=True)]


def find_sharing(linears: Iterable[Linear]) -> dict[str, list[Linear]]:
    """For each linear, those whose weights share an outer scale with it in training, itself included.

    With outer=shared, these are all that read an activation.
    """
    groups: dict[tuple[Any, ...], list[Linear]] = {}
    for linear in linears:
        key: tuple[Any, ...] = (linear.module,)
        if linear.format and linear.weight_treatment.outer == "shared":
            site = linear.site
            key = site.address[:-1], site.activation, linear.layer, linear.weight_treatment
        groups.setdefault(key, []).append(linear)
    return {linear.module: members for members in groups.values() for linear in members}


def quantize_linears(weights: Sequence[Array], decision: Decision) -> list[StoredLinear]:
    """Quantizes weights under one outer scale, or one for each row, as their forward GEMM does.

    Weights that share a scale are quantized as one tensor, with whole tiles between them.
    """
    treatment = decision.applied_recipe.treatment(Gemm.FPROP, Role.WEIGHT)
    treatment = replace(treatment, outer="tensor" if treatment.outer == "shared" else treatment.outer)
    padded = [np.pad(w, [(0, -len(w) % BLOCK if treatment.tile2d else 0), (0, 0)]) for w in weights]
    codes, scales, maximum = _quantize(jnp.concatenate(padded), treatment)
    if not np.isfinite(maximum).all():
        raise ValueError("the weights are not finite: export an earlier checkpoint")
    bound = np.float32(bound_of(treatment))
    outer = np.where(maximum, maximum, 1).astype(np.float32) / bound  # a scale of 0 has no reciprocal
    is_per_row = treatment.outer == "row"
    stored, start = [], 0
    for weight, block in zip(weights, padded, strict=True):
        rows = slice(start, start + len(weight))
        stored.append(
            StoredLinear(
                format="fp8-row" if is_per_row else treatment.format,
                codes=codes[rows],
                scales=None if scales is None else scales[rows],
                outer=outer[rows].astype(np.float32) if is_per_row else np.float32(outer.reshape(-1)[0]),
            )
        )
        start += len(block)
    return stored


def _quantize(weight: jax.Array, treatment: Treatment) -> tuple[Array, Array | None, Array]:
    """The packed codes, the block scales of each row, and the maximum."""
    axes, key = Axes(axis=-1, tile=-2), make_key()
    spec = OperandSpec(
        gemm=Gemm.FPROP, role=Role.WEIGHT, label="rhs", treatment=treatment, axes=axes, tokens=(0,)
    )
    (part,) = quantize_operand(weight, spec, (key, key))
    q = cast("Quantized", part)
    scales = None if q.scales is None else np.asarray(q.scales)
    if scales is not None and treatment.tile2d:
        scales = np.repeat(scales, BLOCK, axis=0)
    return np.asarray(q.codes), scales, np.asarray(q.amax)


def input_scale(format: str, amax: float) -> np.float32:
    """The outer scale of an activation whose largest magnitude is known."""
    return np.float32(np.float32(amax) / np.float32(BOUNDS[format]))


def plain_tensor(leaf: Any, dtype: str) -> Array:
    """A parameter that is not quantized, as it is stored."""
    return np.ascontiguousarray(np.asarray(leaf).astype(_DTYPES[dtype]))


_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
