"""The lint engine: severities and imports. `benchmarks/large_policies.py` measures its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyc.language.loader import parse_with_diagnostics
from tests.support.linting import lint_codes

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
