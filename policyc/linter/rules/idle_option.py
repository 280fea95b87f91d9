"""An option of a recipe has no effect where the recipe is used.

`rht=wgrad` does nothing in a rule for `@ fprop`, `rht_size` does nothing without `rht`, and `sr_headroom` does
nothing without `sr`. Readers of the policy will assume that the option works. Remove it, or use the recipe for the
products that it was written for.

An option that is set to its default value is not reported.

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

from policyc.language.policy import RecipeCall, option_values
from policyc.language.recipes import OPTIONS, Gemm, make_recipe
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for call, products in context.recipe_calls:
        yield from _find_idle_options(call, products)


def _find_idle_options(call: RecipeCall, products: frozenset[Gemm]) -> Iterator[Finding]:
    options = option_values(call)
    for setting in call.settings:
        others = {name: value for name, value in options.items() if name != setting.name}
        complete, without = make_recipe(call.name, options), make_recipe(call.name, others)
        is_idle = all(complete.gemm_treatments(g) == without.gemm_treatments(g) for g in products)
        if is_idle and options[setting.name] != OPTIONS[setting.name].default:
            names = ", ".join(g for g in Gemm if g in products)
            yield Finding(
                span=setting.span,
                message=f"'{setting}' has no effect in {names}, and the recipe is used for nothing else",
                help="remove it, or use the recipe for the products that it was written for",
            )


RULES = (LintRule(code="idle-option", doc=__doc__, check=check),)
