"""The lint engine: severities, imports, and that its time grows in proportion to the size of a policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from policyc.language.loader import parse_with_diagnostics
from policyc.linter.engine import lint
from tests.support.linting import fix_text, lint_codes
from tests.support.processor_time import seconds_of

pytestmark = pytest.mark.any_jax


def test_an_error_while_reading_hides_what_the_rules_would_find() -> None:
    assert lint_codes("mlp -> fp8\nmlp -> bf17\nmlp -> bf16") == ["unknown-format"]
    assert lint_codes("mlp -> bf17", codes={"shadowed-rule"}) == ["unknown-format"]


def test_only_selected_codes_are_checked() -> None:
    text = "a.b -> bf16\na -> split(fprop=fp8)"
    assert lint_codes(text) == ["shadowed-rule", "incomplete-split"]
    assert lint_codes(text, codes={"incomplete-split"}) == ["incomplete-split"]


def test_an_error_in_an_imported_file_is_reported_in_that_file(tmp_path: Path) -> None:
    (tmp_path / "lib.policy").write_text("mlp -> fp9\n")
    (diagnostic,) = parse_with_diagnostics('import "lib"\n', path=tmp_path / "main.policy").diagnostics
    assert diagnostic.code == "unknown-format"
    assert Path(diagnostic.span.source.path).name == "lib.policy"


# ---- time


def large_policies(count: int) -> dict[str, str]:
    """Policies of many statements, each difficult for another part of the linter."""
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
    }


def assert_linear(make_work: Callable[[int], Callable[[], object]]) -> None:
    """2,500 items take less than 1.25 seconds, or less than 15 times as long as 250.

    Linear work takes 10 times as long, quadratic work 100 times. The limit of 1.25 seconds finds a quadratic part of
    0.2 µs for each pair of items; the ratio of 15 one that takes 0.6 times as long as the linear part.
    """

    def is_linear() -> bool:
        seconds = seconds_of(make_work(2_500))
        return seconds < 1.25 or seconds < 15 * seconds_of(make_work(250))

    assert any(is_linear() for _ in range(3))  # a busy machine may slow some of them down


@pytest.mark.slow
@pytest.mark.parametrize("kind", large_policies(2))
def test_the_time_to_lint_is_linear_in_the_number_of_rules(kind: str) -> None:
    """Questions about coverage have a budget for the whole policy, so their time grows more slowly."""
    assert_linear(lambda count: partial(lint, parse_with_diagnostics(large_policies(count)[kind])))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "suppressions", "splits"])
def test_the_time_to_fix_is_linear_in_the_number_of_fixes(kind: str) -> None:
    """Each of a few rounds parses the text again."""
    assert_linear(lambda count: partial(fix_text, large_policies(count)[kind]))


@pytest.mark.slow
def test_the_time_to_read_and_lint_a_megabyte_is_linear() -> None:
    def make_work(count: int) -> Callable[[], object]:
        line = "decoder.layers[3].mlp.{gate,up,down}_proj where weight and k % 16 == 0 -> fp8(grad=e4m3)  # a comment\n"
        return lambda: lint(parse_with_diagnostics(line * (200 * count // len(line))))

    assert_linear(make_work)
