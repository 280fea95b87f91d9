"""An option of a recipe does nothing where the recipe is used.

`rht=wgrad` has no effect on a rule for `@ fprop`, `rht_size` none without `rht`, `sr_headroom` none without
`sr`. Whoever reads the policy believes otherwise. An option that spells out its default is not reported.

## Bad

```policy
attention.wo @ fprop -> nvfp4(rht=wgrad)
layers[-4:] -> bf16
```

## Good

```policy
attention.wo @ fprop -> nvfp4
layers[-4:] -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.language.policy import RecipeCall, option_values
from policyc.language.recipes import OPTIONS, Gemm, make_recipe
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    products: dict[int, set[Gemm]] = {}
    written: dict[int, RecipeCall] = {}
    for applied in context.applied:
        for gemm in applied.products:
            use = applied.use(gemm)
            products.setdefault(id(use), set()).add(gemm)
            written[id(use)] = use
    for key, use in written.items():
        given = option_values(use)
        full = make_recipe(use.name, given) if use.settings else None
        for setting in use.settings:
            rest = {name: value for name, value in given.items() if name != setting.name}
            bare = make_recipe(use.name, rest)
            idle = full is not None and all(
                full.gemm_treatments(g) == bare.gemm_treatments(g) for g in products[key]
            )
            if idle and given[setting.name] != OPTIONS[setting.name].default:
                where = ", ".join(g for g in Gemm if g in products[key])
                yield from context.report(
                    "idle-option",
                    setting.span,
                    f"'{setting}' changes nothing in {where}, and the recipe is used for nothing else",
                    "remove it, or use the recipe for the products it was meant for",
                )
