"""Prints a policy as a table or as JSON: what each rule does to the operands of each product.

Conditions of the schedule are printed with each rule, because a rule may appear both inside and outside a phase.
"""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from policyc.base.files import read_json
from policyc.base.text import escape_lines
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.diagnostics import Paint
from policyc.language.kinds import name_of_kind
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
    columns = max(shutil.get_terminal_size().columns, width + 40)
    for policy in policies:
        title, *others = textwrap.wrap(policy["title"], columns - width - 2)
        texts = []
        if row := policy["measured"]:
            speeds = f"{row['to_loss']:.2f}x to the loss of BF16: {row['speed_up']:.2f}x a step"
            texts.append(f"{speeds}, {row['gap']:.4f} nats above it ({row['runs']})")
        if policy["variants"]:
            texts.append(f"variants: {', '.join(policy['variants'])}")
        others += (
            paint("gutter", line) for text in texts for line in textwrap.wrap(text, columns - width - 2)
        )
        lines.append(f"{paint('path', policy['name'].ljust(width))}  {title}")
        lines += (f"{'':{width}}  {line}" for line in others)
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
    """Text for rich: markup is not interpreted, and control characters are escaped."""
    return Text(escape_lines(text), style=style)


def as_table(policy: Policy, title: str, color: bool | None = None) -> str:
    """Returns each rule, followed by a line per product with the treatment of its operands."""
    console = Console(force_terminal=color)
    resolve = policy.resolver()
    with console.capture() as capture:
        console.print(literal(title, style="bold"))
        for rule in policy.rules:
            console.print(_rule_line(rule))
            for line in _product_lines(rule, normalize_if_valid(resolve(rule.recipe))):
                console.print(line)
        console.print(
            "\nLater rules override earlier ones; a site that no rule matches is kept as it is.", style="dim"
        )
    return capture.get()


def _rule_line(rule: Rule) -> Text:
    conditions = [str(c) for c in rule.when] + ([] if rule.expect is None else [f"expect {rule.expect}"])
    kind = name_of_kind(rule.selectors)
    note = f"  (the name '{kind}'; the kind is '* where {kind}')" if kind else ""
    line = Text("\n").append_text(literal(rule.head, style="bold"))
    return line.append("".join(f"  {c}" for c in conditions), "magenta").append(note, "dim")


def _product_lines(rule: Rule, recipe: Recipe) -> Iterator[Text]:
    """A line per product; one for all three if they treat both operands alike."""
    lines: dict[Gemm, tuple[str, str]] = {}
    for gemm in (g for g in Gemm if g in rule.products):
        operands = {role: describe_treatment(recipe.treatment(g, role)) for g, role in OPERANDS if g is gemm}
        alike = len(set(operands.values())) == 1
        left, right = (text if alike else f"{role} {text}" for role, text in operands.items())
        chosen = [str(s) for s in rule.selectors if gemm in s.products]
        note = f"  of {', '.join(chosen)}" if len(chosen) < len(rule.selectors) else ""
        lines[gemm] = left if alike else f"{left:28}  {right}", note
    is_one = len(lines) == len(Gemm) and len(set(lines.values())) == 1
    for gemm, (text, note) in itertools.islice(lines.items(), 1 if is_one else None):
        label = "all" if is_one else gemm
        yield literal(f"  {label:5}  {text}", _COLORS_BY_BITS[recipe.bits(gemm)]).append(note, "dim")


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
