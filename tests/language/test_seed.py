"""The statement `seed = N`."""

from __future__ import annotations

from pathlib import Path

import pytest

from policyc.language.loader import load, parse, parse_with_diagnostics

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize("text", ["seed = 7", "seed=7", "seed =\n7", "seed = 0_7;", "seed = 7  # why"])
def test_the_seed_is_read_and_printed(text: str) -> None:
    policy = parse(f"{text}\n* -> nvfp4(sr=grad)")
    assert policy.seed == 7
    assert str(policy) == "seed = 7\n* -> nvfp4(sr=grad)\n"


def test_a_seed_changes_the_hash() -> None:
    policy = parse("* -> bf16")
    assert policy.with_seed(3).sha256 != policy.sha256
    assert policy.with_seed(3) == parse("seed = 3\n* -> bf16")


@pytest.mark.parametrize("text", ["seed -> bf16", "seed.mlp -> bf16", "seed, x -> bf16", "*.seed[0] -> bf16"])
def test_a_scope_may_be_called_seed(text: str) -> None:
    policy = parse(text)
    assert (len(policy.rules), policy.seed) == (1, 0)


def test_a_variant_has_its_own_seed() -> None:
    policy = parse("seed = 1\n* -> bf16\nvariant b { seed = 2 }\nvariant c { * -> fp8 }")
    assert policy.variant("b").seed == 2
    assert policy.variant("c").seed == 1
    assert parse(str(policy)) == policy


def test_the_importing_file_overrides_an_imported_seed(tmp_path: Path) -> None:
    (tmp_path / "base.policy").write_text("seed = 1\n* -> bf16\n")
    main = tmp_path / "main.policy"
    main.write_text('import "base.policy"\n')
    assert load(main).seed == 1
    main.write_text('import "base.policy"\nseed = 2\n')
    assert load(main).seed == 2
    main.write_text('seed = 2\nimport "base.policy"\n')
    diagnostics = parse_with_diagnostics(main.read_text(), path=main).diagnostics
    assert [(d.code, d.span.text) for d in diagnostics] == [("duplicate-seed", 'import "base.policy"')]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("seed = 1\nseed = 2", "duplicate-seed"),
        ("after 5 { seed = 1 }", "misplaced-statement"),
        ("seed = 4294967296", "number-out-of-range"),
        ("seed = 1.5", "number-out-of-range"),
        ("seed = -1", "syntax-error"),
        ("seed = x", "syntax-error"),
        ("seed 7", "syntax-error"),
    ],
)
def test_what_is_no_seed_is_reported(text: str, code: str) -> None:
    assert [d.code for d in parse_with_diagnostics(text + "\n").diagnostics] == [code]


def test_the_largest_seed_has_32_bits() -> None:
    assert parse("seed = 4294967295").seed == 2**32 - 1
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="not a number from 0 to 4294967295"):
            parse("* -> bf16").with_seed(seed)
