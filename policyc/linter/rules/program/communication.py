"""Faults that only the compiled step shows, because XLA decides what devices exchange."""

from __future__ import annotations

from collections.abc import Iterable

from policyc.compiler.sites.site import Site
from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Context
from policyc.linter.products import quantized_products, report_rule


def bf16_gathered(context: Context) -> Iterable[Diagnostic]:
    """Warning: Devices gather an operand in 16 or 32 bits, and each of them quantizes it.

    Reported by `policyc compile`. Codes are two to four times smaller than bfloat16: quantize the shards, and gather
    the codes. policyc does so where the GEMM reads a sharded operand. It cannot if the program gathers the operand
    itself, with `all_gather` or a sharding constraint between the parameter and the GEMM: leave out that gather. A
    kernel may also need more rows or columns than a device has; then JAX warns, and a smaller mesh axis helps.

    Bad:  mlp.* -> nvfp4  # of a program that calls `jax.lax.all_gather(w, "fsdp")` before `x @ w`
    Good: mlp.* -> nvfp4  # of a program whose `x @ w` reads the sharded `w`
    """
    if context.collectives is None:
        return context.skip("bf16-gathered")
    late = [total for total in context.collectives if total.is_quantized_later]
    types = {product: total.type for total in late for product in total.products}
    size = sum(total.bytes for total in late) / 1e9
    found: dict[int, dict[Site, str]] = {}
    for rule, product in quantized_products(context):
        if type_ := types.get(f"{product.site.name} @ {product.gemm}"):
            text = f"devices gather an operand of '{product.site.name}' in {type_}, and each of them quantizes it"
            found.setdefault(rule, {}).setdefault(product.site, text)
    help = f"gather codes: let the GEMM read the shards (such gathers move {size:.3g} GB a step)"
    return [
        report_rule(context.program_plan, rule, sites, next(iter(sites.values())), help)
        for rule, sites in sorted(found.items())
    ]
