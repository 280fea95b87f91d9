"""Prints a policy as a table or as JSON: what each rule does to the operands of each product.

Conditions of the schedule are printed with each rule, because a rule may appear both inside and outside a phase.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from policyc.base.files import read_json
from policyc.base.text import escape_lines
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.diagnostics import Paint
from policyc.language.loader import load
from policyc.language.policy import Policy, Rule
from policyc.language.recipes import OPERANDS, Gemm, Recipe
from policyc.language.treatments import describe_treatment, normalize_if_valid

_COLORS_BY_BITS = {4: "green", 8: "cyan", 16: "white", 32: "white", 0: "dim"}


def read_measured() -> dict[str, dict[str, Any]]:
    """What the runs at 19M parameters say of bundled policies, by name, those first that reach the loss of BF16 first.

    Fields: `gap` to BF16 and its `interval`, in nats; `tokens` for its loss, over its tokens; the predicted `speed_up`
    (Llama 3 8B on 8 GB200); `to_loss`, their quotient; `to_loss_of_fp8`, the same over fp8; and `runs`, their folder in
    docs/results. tests/experiments/test_results.py writes the file.
    """
    measured: dict[str, dict[str, Any]] = read_json(data_folder("policies") / "measured.json")
    return measured


def list_bundled_policies(paint: Paint) -> str:
    """Returns the names of the bundled policies, with titles, measurements and variants.

    Those that reach a loss first come first.
    """
    lines = []
    order = list(read_measured())
    policies = sorted(
        _describe_bundled_policies(),
        key=lambda p: order.index(p["name"]) if p["name"] in order else len(order),
    )
    width = max(len(policy["name"]) for policy in policies)
    for policy in policies:
        lines.append(f"{paint('path', policy['name'].ljust(width))}  {policy['title']}")
        if row := policy["measured"]:
            speeds = f"{row['to_loss']:.2f}x to the loss of BF16: {row['speed_up']:.2f}x a step"
            text = f"{speeds}, {row['gap']:.4f} nats above it ({row['runs']})"
            lines.append(f"{'':{width}}  {paint('gutter', text)}")
        if policy["variants"]:
            lines.append(f"{'':{width}}  {paint('gutter', 'variants: ' + ', '.join(policy['variants']))}")
    return "".join(f"{line}\n" for line in lines)


def bundled_policies_to_json() -> str:
    """Returns the same as `list_bundled_policies`, as JSON."""
    return json.dumps(_describe_bundled_policies(), indent=2) + "\n"


def _describe_bundled_policies() -> list[dict[str, Any]]:
    measured = read_measured()
    return [
        {
            "name": name,
            "title": path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "),
            "variants": [variant.name for variant in load(path).variants],
            "measured": measured.get(name),
        }
        for name, path in bundled_policies().items()
    ]


def literal(text: str, style: str = "") -> Text:
    """Text for a cell or a title of a rich table: markup is not interpreted, and control characters are escaped."""
    return Text(escape_lines(text), style=style)


def as_table(policy: Policy, title: str, color: bool | None = None) -> str:
    """Returns a table of the rules, with the treatment of both operands of each product."""
    console = Console(force_terminal=color)
    resolve = policy.resolver()
    table = Table(
        title=literal(title), title_justify="left", title_style="bold", header_style="bold", expand=False
    )
    table.add_column("rule", overflow="fold")
    for gemm in Gemm:
        roles = " x ".join(role for g, role in OPERANDS if g is gemm)
        table.add_column(literal(f"{gemm}\n{roles}"), overflow="fold")
    for rule in policy.rules:
        recipe = normalize_if_valid(resolve(rule.recipe))
        table.add_row(_rule_cell(rule), *(_product_cell(rule, recipe, gemm) for gemm in Gemm))
    with console.capture() as capture:
        console.print(table)
        console.print(
            "Later rules override earlier ones; a site that no rule matches is kept as it is.", style="dim"
        )
    return capture.get()


def _rule_cell(rule: Rule) -> Text:
    text = literal(rule.head)
    for condition in rule.when:
        text.append(f"\n{condition}", style="magenta")
    if rule.expect is not None:
        text.append(f"\nexpect {rule.expect}", style="magenta")
    return text


def _product_cell(rule: Rule, recipe: Recipe, gemm: Gemm) -> Text:
    if gemm not in rule.products:
        return Text("-", style="dim")
    treatments = dict.fromkeys(describe_treatment(t) for t in recipe.gemm_treatments(gemm))
    cell = literal("\n".join(treatments), style=_COLORS_BY_BITS[recipe.bits(gemm)])
    if not all(gemm in s.products for s in rule.selectors):
        cell.append(f"\nof {', '.join(str(s) for s in rule.selectors if gemm in s.products)}", style="dim")
    return cell


def to_json(policy: Policy) -> str:
    """Returns the rules with the treatment of every operand, as JSON."""
    resolve = policy.resolver()
    rules: list[dict[str, Any]] = []
    for rule in policy.rules:
        recipe = normalize_if_valid(resolve(rule.recipe))
        rules.append(
            {
                "selectors": [str(s) for s in rule.selectors],
                "where": None if rule.where is None else str(rule.where),
                "when": [str(c) for c in rule.when],
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
