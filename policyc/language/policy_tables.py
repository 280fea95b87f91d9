"""A policy as people look at it: tables of what its rules do to the operands of each product.

In: a `Policy`. Out: text, a table on the terminal, or JSON. The one trap: a schedule shows beside each rule,
since a rule in a phase and the same rule outside one are different things.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import Paint
from policyc.language.loader import load
from policyc.language.policy import Policy, Rule
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Treatment
from policyc.language.treatments import normalize_if_valid

_COLOURS = {4: "green", 8: "cyan", 16: "white", 32: "white", 0: "dim"}


def list_bundled_policies(paint: Paint) -> str:
    """The bundled policies, a line each: name, intent, variants."""
    lines = []
    known = bundled_policies()
    width = max(map(len, known))
    for name, path in known.items():
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        variants = ", ".join(v.name for v in load(path).variants)
        lines.append(f"{paint('path', name.ljust(width))}  {title}")
        if variants:
            lines.append(f"{'':{width}}  {paint('gutter', f'variants: {variants}')}")
    return "".join(f"{line}\n" for line in lines)


def describe_treatment(treatment: Treatment) -> str:
    """A treatment in a few words: `nvfp4 16x16`, `nvfp4 1x16 rht16 sr`."""
    if treatment.bits in (0, 16, 32):
        return treatment.format
    words = [treatment.format]
    if treatment.format == "nvfp4":
        words.append("16x16" if treatment.tile2d else "1x16")
    if treatment.format == "fp8":
        words.append(treatment.element)
    if treatment.rounding == "ms_eden":
        words.append("ms_eden")
    elif treatment.rht:
        words.append(f"rht{treatment.rht}")
    if treatment.rounding == "sr":
        words.append("sr" if treatment.headroom == 1 else f"sr({treatment.headroom})")
    extras = {
        "four_over_six": treatment.scale == "four_over_six",
        "mean_split": treatment.mean_split,
        "outer=row": treatment.outer == "row",
        treatment.scale_rounding: treatment.format == "mxfp4" and treatment.scale_rounding != "floor",
    }
    return " ".join([*words, *(word for word, given in extras.items() if given)])


def print_table(policy: Policy, title: str, colour: bool | None = None) -> None:
    """Print the rules, and for each what happens to both operands of each product."""
    console = Console(force_terminal=colour)
    resolve = policy.resolver()
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
    grid.add_column("rule", overflow="fold")
    for gemm in Gemm:
        roles = " x ".join(role for g, role in OPERANDS if g is gemm)
        grid.add_column(Text(f"{gemm}\n{roles}"), overflow="fold")
    for rule in policy.rules:
        recipe = normalize_if_valid(resolve(rule.recipe))
        grid.add_row(_heading(rule), *(_cell(rule, recipe, gemm) for gemm in Gemm))
    console.print(grid)
    console.print(
        "Later rules override earlier ones; a site that no rule matches is kept as it is.", style="dim"
    )


def _heading(rule: Rule) -> Text:
    text = Text(rule.head)
    for when in rule.when:
        text.append(f"\n{when}", style="magenta")
    if rule.expect is not None:
        text.append(f"\nexpect {rule.expect}", style="magenta")
    return text


def _cell(rule: Rule, recipe: Recipe, gemm: Gemm) -> Text:
    if gemm not in rule.products:
        return Text("-", style="dim")
    first, second = recipe.gemm_treatments(gemm)
    words = dict.fromkeys(describe_treatment(t) for t in (first, second))
    cell = Text("\n".join(words), style=_COLOURS[recipe.bits(gemm)])
    if not all(gemm in s.products for s in rule.selectors):
        cell.append(f"\nof {', '.join(str(s) for s in rule.selectors if gemm in s.products)}", style="dim")
    return cell


def to_json(policy: Policy) -> str:
    """The rules with the treatment of every operand."""
    resolve = policy.resolver()
    rules: list[dict[str, Any]] = []
    for rule in policy.rules:
        recipe = normalize_if_valid(resolve(rule.recipe))
        rules.append(
            {
                "selectors": [str(s) for s in rule.selectors],
                "where": None if rule.where is None else str(rule.where),
                "when": [str(w) for w in rule.when],
                "expect": rule.expect,
                "recipe": str(rule.recipe),
                "operands": {
                    f"{gemm}.{role}": describe_treatment(recipe.treatment(gemm, role))
                    for gemm, role in OPERANDS
                    if gemm in rule.products
                },
            }
        )
    variants = [v.name for v in policy.variants]
    return json.dumps({"rules": rules, "variants": variants}, indent=2) + "\n"
