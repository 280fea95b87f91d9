"""What inference servers cannot run of the forward GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm, Treatment
from policyc.linter.context import Context
from policyc.linter.products import quantized_products, report_rule, report_sites
from policyc.serving.formats import BOUNDS
from policyc.serving.servable import (
    SERVERS,
    ForwardGemm,
    Obstacle,
    Server,
    describe_needs,
    find_obstacle,
    is_quantized,
    served_format,
)

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
    find = partial(
        _find, context.server, _find_siblings(context.program_plan), _find_kept(context.program_plan)
    )
    return report_sites(context, partial(_describe, context.server, find), partial(_suggest, find))


def serving_hardware(context: Context) -> Iterable[Diagnostic]:
    """Note: The GPUs on which a server runs a format as training does.

    Reported with `--for SERVER`. On older GPUs, servers multiply codes of weights by activations in bf16: other values
    than those of training, from the same file.

    Bad:  mlp -> nvfp4  # to be served on H100
    Good: mlp -> fp8
    """
    if context.server is None:
        return context.skip("serving-hardware")
    first: dict[str, tuple[int, PlannedProduct]] = {}
    for rule, product in quantized_products(context):
        recipe = product.decision.recipe
        if product.gemm is Gemm.FPROP and recipe is not None and product.site.weight is not None:
            first.setdefault(recipe.gemm_treatments(Gemm.FPROP)[1].format, (rule, product))
    plan, name = context.program_plan, SERVERS[context.server]
    return [
        report_rule(plan, rule, (product.site,), f"{name} {describe_needs(context.server, format)}", "")
        for format, (rule, product) in first.items()
        if format in BOUNDS
    ]


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


def _find_kept(plan: Plan) -> frozenset[str]:
    """The names of the sites whose weights no layer quantizes."""
    names: dict[str, bool] = {}
    for run in plan.runs(plan.phases[-1]):
        if run.site.weight is not None:
            names[run.site.name] = names.get(run.site.name, False) or bool(served_format(run.decision))
    return frozenset(name for name, is_quantized in names.items() if not is_quantized)


_Find = Callable[[PlannedProduct], Obstacle | None]


def _find(
    server: Server, siblings: _Siblings, kept: frozenset[str], product: PlannedProduct
) -> Obstacle | None:
    recipe = product.decision.recipe
    if product.gemm is not Gemm.FPROP or recipe is None:
        return None
    others = {t: None for layer in product.layers for t in siblings.get(_key(product.site, layer), ())}
    gemm = ForwardGemm(site=product.site, recipe=recipe, siblings=tuple(others), kept=kept)
    return find_obstacle(gemm, server)


def _describe(server: Server, find: _Find, product: PlannedProduct) -> str | None:
    obstacle = find(product)
    return (
        None if obstacle is None else f"{SERVERS[server]} cannot run '{product.site.name}': {obstacle.reason}"
    )


def _suggest(find: _Find, plan: Plan, rule: int, products: Sequence[PlannedProduct]) -> str:
    del plan, rule
    obstacles = map(find, products)
    return "; ".join(dict.fromkeys(obstacle.edit for obstacle in obstacles if obstacle))
