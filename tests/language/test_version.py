"""The version line of a policy: kept by the formatter, allowed in imports, refused if it is newer."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyc.language.diagnostics import PolicyError
from policyc.language.formatter import format_text
from policyc.language.loader import load, parse

pytestmark = pytest.mark.any_jax


def test_the_formatter_keeps_it_and_the_policy_is_the_same() -> None:
    assert (
        format_text("# about\npolicyc   1 # the first\n\nmlp->fp8\n")
        == "# about\npolicyc 1  # the first\n\nmlp -> fp8\n"
    )
    assert parse("policyc 1; mlp -> fp8") == parse("mlp -> fp8")


def test_an_imported_policy_may_say_its_version(tmp_path: Path) -> None:
    (tmp_path / "base.policy").write_text("policyc 1\nmlp -> fp8\n")
    (tmp_path / "main.policy").write_text('policyc 1\nimport "base"\nvariant a { import "base" }\n')
    assert len(load(tmp_path / "main.policy:a").rules) == 2


@pytest.mark.parametrize("version", [0, 2, 10])
def test_another_version_is_the_only_error(version: int) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(f"policyc {version}\nmlp ~> fp8\nseed = x\n")
    assert [d.code for d in caught.value.diagnostics] == ["unknown-version"]
    assert "pip install --upgrade policyc" in str(caught.value)
