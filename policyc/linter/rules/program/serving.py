"""What inference servers cannot run of the forward GEMMs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm, Treatment
from policyc.linter.context import Context
from policyc.linter.products import report_sites
from policyc.serving.servable import SERVERS, ForwardGemm, Obstacle, Server, find_obstacle, is_quantized

_Siblings = dict[Hashable, dict[Treatment | None, None]]


def not_servable(context: Context) -> Iterable[Diagnostic]:
    """Warning: The server has no counterpart for the forward GEMM of a quantized linear.

    Reported with `--for SERVER`. The server would compute other values than training, or refuse the file that `policyc
    export` writes. The backward GEMMs do not matter to a server. The message names the version whose source was read.

    Bad:  mlp -> mxfp8
    Good: mlp -> fp8
    """
    if context.server is None:
        return context.skip("not-servable")
    siblings = _find_siblings(context.program_plan)
    return report_sites(
        context, partial(_describe, context.server, siblings), partial(_suggest, context.server, siblings)
    )


def _find_siblings(plan: Plan) -> _Siblings:
    """The recipes of the weights that read an activation, by activation and layer. A weight may be kept: None."""
    siblings: _Siblings = {}
    for run in plan.runs(plan.phases[-1]):
        if run.site.weight is not None and not run.site.kind.flags.get("router"):
            for layer in run.layers:
                recipe = run.decision.recipe
                weight = recipe.gemm_treatments(Gemm.FPROP)[1] if recipe else None
                kept = weight if weight and is_quantized(weight) else None
                siblings.setdefault(_key(run.site, layer), {})[kept] = None
    return siblings


def _key(site: Site, layer: Layer) -> Hashable:
    return site.address[:-1], site.activation, layer


def _find(server: Server, siblings: _Siblings, product: PlannedProduct) -> Obstacle | None:
    recipe = product.decision.recipe
    if product.gemm is not Gemm.FPROP or recipe is None:
        return None
    others = {t: None for layer in product.layers for t in siblings.get(_key(product.site, layer), ())}
    return find_obstacle(ForwardGemm(site=product.site, recipe=recipe, siblings=tuple(others)), server)


def _describe(server: Server, siblings: _Siblings, product: PlannedProduct) -> str | None:
    obstacle = _find(server, siblings, product)
    return (
        None if obstacle is None else f"{SERVERS[server]} cannot run '{product.site.name}': {obstacle.reason}"
    )


def _suggest(
    server: Server, siblings: _Siblings, plan: Plan, rule: int, products: Sequence[PlannedProduct]
) -> str:
    del plan, rule
    obstacles = (_find(server, siblings, product) for product in products)
    return "; ".join(dict.fromkeys(obstacle.edit for obstacle in obstacles if obstacle))
