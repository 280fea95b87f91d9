"""Processor time to parse, lint, fix and format policies of many statements. It should grow linearly with their number.

    python -m benchmarks.large_policies [STATEMENTS]        default: 2500

For each kind of policy it prints the milliseconds for a tenth of the statements and for all of them, and the ratio of
the two: 10 is linear, 100 is quadratic. Then it lints policies whose conditions, selectors and slices are compared in
pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.command_line import make_parser, print_header, print_row
from policyc.language.formatter import format_text
from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded
from policyc.linter.fixes import apply_fixes


def large_policies(count: int) -> dict[str, str]:
    """Policies of many statements, each one hard for a different part of the linter."""
    numbers = range(count)
    half = range(count // 2)
    return {
        "distinct": "".join(f"layers[{i}].mlp.up{i}x -> fp8\n" for i in numbers),
        "same": "mlp.up -> fp8\n" * count,
        "globs": "".join(f"*a{i}x*.b* -> fp8\n" for i in numbers),
        "conditions": "".join(f"a{i}x where k % 16 == {i % 16} and n > {i} -> fp8\n" for i in numbers),
        "phases": "".join(f"after {i} {{ mlp -> fp8 }}\n" for i in numbers),
        "percentages": "".join(f"layers[-{i * 90 / count:.3f}%:].a{i}x -> fp8\n" for i in numbers),
        "recipes": "".join(f"recipe r{i} = fp8\na{i}x -> r{i}\n" for i in half),
        "variants": "".join(f"a{i}x -> fp8\nvariant v{i} {{ a{i}x -> bf16 }}\n" for i in half),
        "one variant": "* -> bf16\nvariant v {\n" + "".join(f"a{i}x -> fp8\n" for i in numbers) + "}\n",
        "suppressions": "".join(f"a{i}x -> fp8  # allow: shadowed-rule, shadowed-rul{i}\n" for i in numbers),
        "splits": "".join(f"a{i}x -> split(fprop=nvfp4)\n" for i in numbers),
        "invalid": "".join(f"decoder.layers[{i}].mlp.* => bf16\n" for i in numbers),
    }


def pairwise_policies() -> dict[str, str]:
    """Policies whose terms, selectors, slices or alternatives are compared in pairs."""
    terms = [f"k == {7 * i}" for i in range(10_000)]
    fifty = [" or ".join(f"{v} % {i % 9 + 2} == {j}" for v in "mnk" for j in range(17)) for i in range(200)]
    names = [f"a{i}" for i in range(2000)]
    return {
        "or": f"* where {' or '.join(terms)} -> fp8\nmlp -> bf16\n",
        "and": f"* where {' and '.join(terms)} -> fp8\nmlp -> bf16\n",
        "not": f"* where {' or '.join(f'not ({t})' for t in terms)} -> fp8\n* where weight -> bf16\n",
        "chain": f"* where {' < '.join(['k'] * 10_000)} -> fp8\nmlp -> bf16\n",
        "many rules": "".join(f"a{i}.* where {c} -> fp8\n" for i, c in enumerate(fifty)),
        "many rules of one name": "".join(f"mlp where {c} -> fp8\n" for c in fifty),
        "two rules": f"* where {' or '.join(terms[:5000])} -> fp8\n* where {' or '.join(terms[5000:])} -> bf16\n",
        "selectors": f"{', '.join(f'{n}.*' for n in names)} -> fp8\n{', '.join(names)} -> bf16\n",
        "braces": f"{'{a,b}' * 10}.x -> fp8\n" * 20,
        "slices": "".join(f"layers[{i * 7}:{i * 11 + 3}:{i % 13 + 1}] -> fp8\n" for i in range(300)),
        "ranges": "".join(f"layers[{i * 0.7:.1f}%:{i * 0.9 + 3:.1f}%] -> fp8\n" for i in range(60)),
    }


def lint_text(text: str) -> object:
    return lint_loaded(parse_with_diagnostics(text))


def fix_text(text: str) -> object:
    return apply_fixes(text, parse_with_diagnostics, lint_loaded)


WORK: dict[str, Callable[[str], object]] = {
    "parse": parse_with_diagnostics,
    "lint": lint_text,
    "fix": fix_text,
    "format": format_text,
}


def milliseconds(work: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    work(text)
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("statements", nargs="?", type=int, default=2500, help="statements (default: 2500)")
    count = parser.parse_args().statements
    print_header(["policy", *(f"{name}: {count // 10}, {count}, times" for name in WORK)])
    few = large_policies(count // 10)
    for kind, text in large_policies(count).items():
        pairs = [(milliseconds(work, few[kind]), milliseconds(work, text)) for work in WORK.values()]
        print_row([kind, *(f"{small:.0f}, {large:.0f} ms, {large / small:.1f}" for small, large in pairs)])
    print()
    print_header(["compared in pairs", "lint"])
    for kind, text in pairwise_policies().items():
        print_row([kind, f"{milliseconds(lint_text, text):.0f} ms"])


if __name__ == "__main__":
    main()
