"""The loader: imports, names across files, and variants of imported policies. Messages: tests/ui/policies."""

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


def test_an_import_inserts_the_statements_of_the_file(write):
    folder = write(
        main='a -> bf16\nimport "other"\nc -> bf16\nimport "third.policy"\nd -> bf16',
        other="b1 -> bf16\nb2 -> bf16",
        third="t -> bf16",
    )
    assert heads(load(folder / "main.policy")) == ["a", "b1", "b2", "c", "t", "d"]


def test_an_import_is_looked_for_beside_the_importing_file(write):
    folder = write(
        main='import "sub/one"', sub__one='import "two"', sub__two="right -> bf16", two="wrong -> bf16"
    )
    assert heads(load(folder / "main.policy")) == ["right"]


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


def test_a_file_may_be_imported_through_two_others(write):
    folder = write(
        top='import "a"; import "b"', a='import "c"; a -> bf16', b='import "c"; b -> bf16', c="c -> bf16"
    )
    assert heads(load(folder / "top.policy")) == ["c", "a", "c", "b"]


# ---- names


def test_an_imported_recipe_can_be_redefined(write):
    folder = write(
        main='import "base"; recipe nv = fp8',
        base="recipe nv = nvfp4; recipe other = nv; a -> nv; b -> other",
    )
    policy = load(folder / "main.policy")
    formats = [policy.resolver()(rule.recipe).treatments[0].format for rule in policy.rules]
    assert formats == ["fp8", "fp8"]


def test_an_imported_file_may_use_a_recipe_of_the_importing_file(write):
    folder = write(main='recipe mine = bf16; import "base"', base="a -> mine")
    assert heads(load(folder / "main.policy")) == ["a"]


def test_variants_are_imported_and_can_be_replaced(write):
    folder = write(
        main='import "base"; variant x { mine -> bf16 }',
        base="variant x { theirs -> bf16 }; variant y { also -> bf16 }",
    )
    variants = {v.name: [r.head for r in v.rules] for v in load(folder / "main.policy").variants}
    assert variants == {"x": ["mine"], "y": ["also"]}


def test_a_variant_may_import_rules_and_recipes(write):
    folder = write(
        main='recipe r = bf16; a -> r; variant x { import "edit" }',
        edit="recipe r = fp8; b -> r; variant lost { c -> bf16 }",
    )
    policy = load(folder / "main.policy")
    assert heads(policy) == ["a"]
    assert [v.name for v in policy.variants] == ["x"]
    edited = policy.variant("x")
    assert heads(edited) == ["a", "b"]
    assert str(edited.named_recipes["r"]) == "fp8"
    assert parse(str(policy)) == policy


# ---- cycles


def test_an_import_follows_links_and_names_folders_above(write):
    folder = write(
        main='import "link"', sub__real="a -> bf16", sub__up='import "../sub/real"\nimport "../other/link"'
    )
    (folder / "link.policy").symlink_to("sub/real.policy")
    (folder / "other").mkdir()
    (folder / "other" / "link.policy").symlink_to("../sub/real.policy")
    assert heads(load(folder / "main.policy")) == ["a"]
    assert heads(load(folder / "sub" / "up.policy")) == ["a", "a"]


def test_a_folder_that_is_itself_a_link_can_be_used(write, tmp_path_factory):
    folder = write(main='import "other"', other="a -> bf16")
    link = tmp_path_factory.mktemp("links") / "link"
    link.symlink_to(folder)
    assert heads(load(link / "main.policy")) == ["a"]


def test_a_policy_may_have_another_ending(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text("mlp.* -> fp8\n")
    assert heads(load(path)) == ["mlp.*"]
    path.write_text("mlp.* -> fp9\n")
    assert load_errors(path) == [("unknown-format", "rules.txt", 1)]


def test_a_cycle_through_a_symbolic_link_is_reported(write):
    folder = write(a='import "link"')
    (folder / "link.policy").symlink_to("a.policy")
    assert load_errors(folder / "a.policy") == [("import-cycle", "a.policy", 1)]


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


# ---- errors in other files
