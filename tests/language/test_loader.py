"""The loader: names and paths. tests/ui/commands has what imports mean, and what is wrong with them."""

from __future__ import annotations

import pytest

from policyc import PolicyError, load, parse
from policyc.language.bundled import bundled_policies
from policyc.language.loader import locate, parse_with_diagnostics

pytestmark = pytest.mark.any_jax


def load_errors(path) -> list[tuple[str, str, int]]:
    """The code, file and line of each diagnostic."""
    with pytest.raises(PolicyError) as caught:
        load(path)
    return [(d.code, d.span.source.path.rpartition("/")[2], d.span.line) for d in caught.value.diagnostics]


def heads(policy) -> list[str]:
    return [rule.head for rule in policy.rules]


# ---- order and search


def test_a_local_file_hides_a_bundled_policy(write):
    folder = write(main='import "bf16"', bf16="mine -> bf16")
    assert heads(load(folder / "main.policy")) == ["mine"]
    assert heads(parse('import "bf16"')) == heads(load("bf16")) != ["mine"]


def test_a_text_without_a_file_finds_bundled_policies_only(write, monkeypatch):
    monkeypatch.chdir(write(here="a -> bf16"))
    with pytest.raises(PolicyError, match=r"no 'here\.policy' among the bundled policies"):
        parse('import "here"')
    assert heads(parse('import "here"', path="some.policy")) == ["a"]


@pytest.mark.parametrize("name", sorted(bundled_policies()))
def test_bundled_policies_load_by_name_and_by_import(name):
    policy = load(name)
    assert policy == load(f"{name}.policy") == parse(f'import "{name}"') == parse(f'import "{name}.policy"')
    assert parse(str(policy)) == policy
    for variant in policy.variants:
        assert parse(str(policy.variant(variant.name))) == policy.variant(variant.name)


def test_a_folder_does_not_hide_a_bundled_policy(tmp_path, monkeypatch):
    (tmp_path / "bf16").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("bf16") == load(bundled_policies()["bf16"])
    assert locate("bf16") == bundled_policies()["bf16"]


# ---- cycles


def test_a_cycle_of_symbolic_links_is_reported(write):
    folder = write(a='import "x"')
    (folder / "x.policy").symlink_to("y.policy")
    (folder / "y.policy").symlink_to("x.policy")
    assert load_errors(folder / "a.policy") == [("import-not-found", "a.policy", 1)]
    with pytest.raises(PolicyError):
        load(folder / "x.policy")
    # A text that is given needs no readable path.
    for path in (folder / "x.policy", "\0", folder / ("x" * 5000)):
        assert heads(parse("a -> bf16", path=path)) == ["a"]


# ---- paths


@pytest.mark.parametrize("written", ["..", ".", "sub", "sub/", "nope/../../x", "x" * 5000, "\udcff", "a\nb"])
def test_a_path_without_a_policy_is_reported(write, tmp_path, written):
    (tmp_path / "sub").mkdir()
    diagnostics = parse_with_diagnostics(f"import '{written}'", path=tmp_path / "main.policy").diagnostics
    assert diagnostics
    assert {d.code for d in diagnostics} <= {"import-not-found", "syntax-error"}
    str(PolicyError(diagnostics))
