"""The last blocks run in 4 bits like all others.

The last blocks are the ones that 4 bits hurt: published runs keep the last 4 of 32 (Llama 3 8B) or the last 8
of 62 (12B) in BF16. Add a rule for them behind the others; it works on a scanned stack too.

## Bad

```policy
mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
```

## Good

```policy
mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
layers[-4:].mlp.* -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, PathSegment, Pattern
from policyc.lint.automata import witness
from policyc.lint.context import Context
from policyc.lint.sensitive import NAMES, decision, stacks, text

_DEPTH = 32  # any depth will do: a tail is a tail


def check(context: Context) -> Iterator[Diagnostic]:
    last = [PathSegment(name, _DEPTH - 1, _DEPTH) for name in stacks(context)]
    for claim in context.cover.claims:
        if claim.recipe.bits(Gemm.FPROP) != 4 or not context.mine(claim.rule.span):
            continue
        for pattern, products in claim.parts:
            paths = [_inside(pattern, stack) for stack in last]
            known = text(witness(pattern)) in NAMES
            if Gemm.FPROP in products and not known and all(_low(context, p) for p in paths):
                yield from context.report(
                    "no-high-precision-tail",
                    claim.rule.span,
                    "the last blocks run in 4 bits too",
                    f"add a rule after it: {last[0].text}[-4:] -> bf16",
                )
                return


def _inside(pattern: Pattern, stack: PathSegment) -> DottedPath:
    """What the pattern names, in the last layer of a stack."""
    if any(p.indices is not None for p in pattern.segments):
        return tuple(
            PathSegment(n.text, stack.index, stack.size) if n.index is not None else n
            for n in witness(pattern)
        )
    plain = witness(pattern)
    if any(n.text == stack.text for n in plain):
        return tuple(stack if n.text == stack.text else n for n in plain)
    return (*plain,) if pattern.anchored else (stack, *plain)


def _low(context: Context, path: DottedPath) -> bool:
    claim = decision(context, path, Gemm.FPROP)
    return claim is not None and claim.recipe.bits(Gemm.FPROP) == 4
