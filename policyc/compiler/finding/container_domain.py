"""How the analysis passes through containers: branches, loops, and the shards of a shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jax.extend.core import JaxprEqn

from policyc.compiler.finding.analysis_records import Branch, JaxprContext
from policyc.compiler.sites.stacks import Stack
from policyc.compiler.weights.layer_indices import EnclosingLoop, LayerIndices
from policyc.compiler.weights.provenance.graph import (
    CarriedSource,
    IterationSource,
    ShardSource,
    StackedResultSource,
    UnknownSource,
)
from policyc.compiler.weights.provenance.integers import (
    Integers,
    LoopIterations,
    carried_integers,
    loop_slice,
)
from policyc.compiler.weights.var_info import VarInfo, carry_info, join_branches, widen_carry
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import container_of, shard_map_axes, shard_map_parts
from policyc.jaxcore.jaxprs.dataflow import unchanged_carries
from policyc.jaxcore.jaxprs.reading import AnyJaxpr, shape_of

_WHILE = "in a while loop, counted as one iteration: how many it runs depends on values"


class ContainerDomain:
    """How `VarInfo`s pass through one container. See `dataflow.Domain`.

    `run` propagates them through a jaxpr inside it. `layers` records which parameters its scan slices.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        operands: Sequence[VarInfo],
        context: JaxprContext,
        run: Callable[[AnyJaxpr, Sequence[VarInfo], JaxprContext], list[VarInfo]],
        layers: LayerIndices,
    ) -> None:
        self._eqn, self._run, self._layers = eqn, run, layers
        self._branch_index = operands[0].integers if jaxprs.primitive_name(eqn) == "cond" else None
        container = container_of(eqn)
        assert container is not None
        extra = container.takes_extra_inputs and not (container.is_loop and jaxprs.has_indexed_effects(eqn))
        length = eqn.params.get("length") if container.is_loop else None
        loops = context.loops
        if length is not None:
            depth = len(context.scope) + len(jaxprs.name_scopes(eqn))
            loops = (*loops, EnclosingLoop(Stack(context.address, length), depth))
        self._context = replace(
            context,
            takes_extra_inputs=context.takes_extra_inputs and extra,
            in_remat=context.in_remat or container.is_remat,
            loop_depth=context.loop_depth + container.is_loop,
            repeats=context.repeats * (length or 1),
            loops=loops,
        )
        if jaxprs.primitive_name(eqn) == "shard_map":
            self._context = replace(self._context, axis_env=context.axis_env.enter_shard_map(eqn))
        elif container.is_loop and length is None:
            self._context = replace(self._context, uncertain_repeats=_WHILE)
        self._bodies = [sub.jaxpr for sub in jaxprs.sub_jaxprs(eqn)]

    def enter(self, number: int, infos: Sequence[VarInfo]) -> list[VarInfo]:
        context = self._context.enter(self._eqn, number)
        if jaxprs.primitive_name(self._eqn) == "cond":
            context = replace(context, branches=(*context.branches, Branch(self._branch_index, number)))
        return self._run(self._bodies[number], infos, context)

    def join(self, values: Sequence[VarInfo]) -> VarInfo:
        return join_branches(values, self._branch_index)

    def enter_loop(
        self, body: AnyJaxpr, consts: Sequence[VarInfo], init: Sequence[VarInfo], xs: Sequence[VarInfo]
    ) -> list[VarInfo]:
        unchanged = unchanged_carries(body, len(consts), len(init))
        integers: list[Integers | None] = [None] * len(init)
        if "length" in self._eqn.params:
            loop = LoopIterations(
                self._context.address, self._eqn.params["length"], bool(self._eqn.params["reverse"])
            )
            of_consts, of_init, of_xs = ([i.integers for i in group] for group in (consts, init, xs))
            integers = carried_integers(body, of_consts, of_init, of_xs, loop)
        carry = []
        for value, is_unchanged, of_value in zip(init, unchanged, integers, strict=True):
            carried = CarriedSource(shape=(), loop=self._context.address)
            if not is_unchanged:
                self._layers.note_carried(carried, value.projections)
            carry.append(value if is_unchanged else carry_info(value, of_value, carried))
        return carry

    def may_change(self, carry: Sequence[VarInfo], others: Sequence[VarInfo]) -> bool:
        if any(c.is_constant or isinstance(c.source, UnknownSource) for c in carry):
            return True
        return not all(c.is_active for c in carry) and any(v.is_active for v in (*carry, *others))

    def widen(self, carry: VarInfo, result: VarInfo) -> VarInfo:
        return widen_carry(carry, result)

    def leave_loop(self, result: VarInfo, carry: VarInfo | None) -> VarInfo:
        if carry is not None:
            for carried in carry.projections:
                if isinstance(carried, CarriedSource) and carried.loop == self._context.address:
                    self._layers.note_carried(carried, result.projections)
            return carry._replace(integers=None, is_active=carry.is_active or result.is_active)
        source = result.source
        if source is not None:
            shape, loop = (self._eqn.params["length"], *source.shape), self._context.address
            source = StackedResultSource(shape=shape, operand=source, loop=loop)
        return VarInfo(
            source=source,
            is_modified=result.is_modified,
            is_lookup=result.is_lookup,
            is_active=result.is_active,
            depends_on=result.depends_on,
            projections=result.projections,
        )

    def slice_inputs(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        del eqn
        address = self._context.address
        infos = []
        for value in values:
            source, origin, integers = None, None, None
            if value.source is not None:
                source = IterationSource(shape=value.source.shape[1:], operand=value.source, loop=address)
                origin = None if value.origin is None else value.origin.then(address)
            if value.integers is not None:
                integers = loop_slice(value.integers, address)
            infos.append(value._replace(source=source, origin=origin, integers=integers))
        sources = tuple(i.source for i in infos if i.source is not None and not i.is_lookup)
        self._layers.note_scanned(sources, self._context.loops)
        return infos

    def split_over_devices(self, eqn: JaxprEqn, values: Sequence[VarInfo]) -> list[VarInfo]:
        """Each device has a shard of every operand."""
        infos = []
        invars = jaxprs.open_jaxpr(self._bodies[0]).invars
        axes = shard_map_axes(eqn)
        for value, var, axes_by_dim, parts in zip(values, invars, axes, shard_map_parts(eqn), strict=True):
            source = value.source
            if source is not None and math.prod(parts) > 1:
                source = ShardSource(
                    shape=shape_of(var),
                    operand=source,
                    shard_map=self._context.address,
                    parts=parts,
                    first_axes=axes_by_dim[0] if axes_by_dim else (),
                )
            infos.append(value._replace(source=source, integers=None))
        return infos
