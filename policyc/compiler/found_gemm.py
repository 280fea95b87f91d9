"""A GEMM that the analysis found: the containers around it, and the site that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn

from policyc.compiler.layers import LayerIndices, LoopLayers
from policyc.compiler.provenance.graph import Source
from policyc.compiler.sites import Site
from policyc.jaxcore import jaxprs
from policyc.jaxcore.jaxprs import AxisEnv
from policyc.jaxcore.transform import Address
from policyc.language.selectors import DottedPath


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprContext:
    """The containers around a jaxpr, and what follows from them for the sites in it."""

    address: Address = ()
    scope: tuple[str, ...] = ()
    loops: tuple[LoopLayers, ...] = ()
    """The scans around it, the outermost first."""
    repeats: int = 1
    opaque: str = ""
    opaque_parameters: tuple[Source, ...] = ()
    """The parameters that an opaque container reads, where it is not known which of its GEMMs reads them."""
    axis_env: AxisEnv = AxisEnv()
    loop_depth: int = 0
    in_remat: bool = False
    takes_extra_inputs: bool = True

    def enter(self, eqn: JaxprEqn, number: int, **changes: Any) -> JaxprContext:
        """The context of a jaxpr inside an equation. `self.address` must be that of the equation."""
        scope = (*self.scope, *jaxprs.name_scopes(eqn))
        return replace(self, address=(*self.address, number), scope=scope, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGemm:
    """A GEMM that was found. Its layers are known once the whole loss is analyzed."""

    fields: dict[str, Any]
    scope: DottedPath
    context: JaxprContext
    sources: tuple[Source, ...] = ()
    projections: frozenset[Source] = frozenset()
    batch_dims: tuple[int, ...] = ()

    def site(self, layers: LayerIndices) -> Site:
        loops = tuple(loop for loop in self.context.loops if layers.is_layered(loop))
        parameters = layers.weight_templates(self.sources, self.batch_dims, self.context.loops)
        weight_stacks = layers.stacks(self.sources, self.context.loops)
        scope = layers.scope_template(self.scope, loops, weight_stacks if parameters else None)
        around = layers.template_around(self.projections, self.context.loops) if not parameters else None
        stacks = (
            weight_stacks if parameters else layers.template_stacks((scope, *([around] if around else ())))
        )
        return Site(
            **self.fields,
            around=around,
            address=self.context.address,
            scope=scope,
            parameters=parameters,
            stacks=stacks,
            loops=tuple(loop.stack for loop in loops),
            repeats=self.context.repeats,
            axis_env=self.context.axis_env,
            takes_extra_inputs=self.context.takes_extra_inputs,
        )
