"""Imports, names across files, variants of imported policies, and what may be read at all."""

from __future__ import annotations

import time

import pytest

from policyc import PolicyError, load, parse
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.loader import locate, parse_with_diagnostics
from tests.support.audit import recording


def faults(path) -> list[tuple[str, str, int]]:
    """Code, file and line of each fault."""
    with pytest.raises(PolicyError) as caught:
        load(path)
    return [(d.code, d.span.source.path.rpartition("/")[2], d.span.line) for d in caught.value.diagnostics]


def heads(policy) -> list[str]:
    return [rule.head for rule in policy.rules]


# ---- order and search


def test_the_statements_of_an_import_stand_in_its_place(write):
    home = write(
        main='a -> bf16\nimport "other"\nc -> bf16\nimport "third.policy"\nd -> bf16',
        other="b1 -> bf16\nb2 -> bf16",
        third="t -> bf16",
    )
    assert heads(load(home / "main.policy")) == ["a", "b1", "b2", "c", "t", "d"]


def test_an_import_is_looked_for_beside_the_importing_file(write):
    home = write(
        main='import "sub/one"', sub__one='import "two"', sub__two="right -> bf16", two="wrong -> bf16"
    )
    assert heads(load(home / "main.policy")) == ["right"]


def test_the_folder_above(write):
    home = write(sub__main='import "../one"', one="right -> bf16")
    assert heads(load(home / "sub" / "main.policy")) == ["right"]


def test_a_file_of_one_s_own_hides_a_bundled_one(write):
    home = write(main='import "bf16"', bf16="mine -> bf16")
    assert heads(load(home / "main.policy")) == ["mine"]
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


def test_there_are_the_bundled_policies_that_were_promised():
    promised = (
        "te_nvfp4 te_nvfp4_no_rht llama_nvfp4 llama3_8b_nvfp4 nvfp4_paper_12b nvfp4_late_switch quartet2 fp8"
    )
    assert {*promised.split(), "mxfp8", "mxfp4", "bf16"} <= set(bundled_policies())


def test_a_folder_does_not_hide_a_bundled_policy(tmp_path, monkeypatch):
    (tmp_path / "bf16").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("bf16") == load(bundled_policies()["bf16"])
    assert locate("bf16") == bundled_policies()["bf16"]


@pytest.mark.parametrize(
    ("name", "help"), [("te_nvfp", "did you mean 'te_nvfp4'?"), ("zzz", "bundled policies: bf16")]
)
def test_a_policy_that_is_not_there(name, help):
    with pytest.raises(PolicyError) as caught:
        load(name)
    (fault,) = caught.value.diagnostics
    assert fault.code == "unreadable-file"
    assert help in fault.help


def test_a_diamond_is_no_circle(write):
    home = write(
        top='import "a"; import "b"', a='import "c"; a -> bf16', b='import "c"; b -> bf16', c="c -> bf16"
    )
    assert heads(load(home / "top.policy")) == ["c", "a", "c", "b"]


# ---- names


def test_an_imported_recipe_can_be_redefined(write):
    home = write(
        main='import "base"; recipe nv = fp8',
        base="recipe nv = nvfp4; recipe other = nv; a -> nv; b -> other",
    )
    policy = load(home / "main.policy")
    formats = [policy.resolver()(rule.recipe).treatments[0].format for rule in policy.rules]
    assert formats == ["fp8", "fp8"]


def test_an_imported_file_may_use_a_recipe_of_the_importing_one(write):
    home = write(main='recipe mine = bf16; import "base"', base="a -> mine")
    assert heads(load(home / "main.policy")) == ["a"]


def test_an_import_after_the_redefinition_is_a_fault_told_once(write):
    home = write(
        main='recipe nv = fp8\nimport "base"\nimport "more"\n', base="recipe nv = nvfp4", more="a -> nv"
    )
    assert faults(home / "main.policy") == [("duplicate-recipe", "main.policy", 2)]


def test_variants_come_along_and_ours_replace_them(write):
    home = write(
        main='import "base"; variant x { mine -> bf16 }',
        base="variant x { theirs -> bf16 }; variant y { also -> bf16 }",
    )
    found = {v.name: [r.head for r in v.rules] for v in load(home / "main.policy").variants}
    assert found == {"x": ["mine"], "y": ["also"]}


def test_an_import_in_a_variant(write):
    home = write(
        main='recipe r = bf16; a -> r; variant x { import "edit" }',
        edit="recipe r = fp8; b -> r; variant lost { c -> bf16 }",
    )
    policy = load(home / "main.policy")
    assert heads(policy) == ["a"]
    assert [v.name for v in policy.variants] == ["x"]
    edited = policy.variant("x")
    assert heads(edited) == ["a", "b"]
    assert str(edited.named_recipes["r"]) == "fp8"
    assert parse(str(policy)) == policy


def test_a_recipe_of_a_variant_is_known_only_there():
    found = parse_with_diagnostics("variant x { recipe r = bf16; a -> r }; b -> r").diagnostics
    assert [(d.code, d.span.column) for d in found] == [("unknown-recipe", 45)]


def test_a_variant_can_close_a_circle():
    found = parse_with_diagnostics(
        "recipe a = b; recipe b = bf16; x -> a; variant v { recipe b = a }"
    ).diagnostics
    assert [d.code for d in found] == ["recipe-cycle"]


# ---- circles


@pytest.mark.parametrize(
    ("files", "chain"),
    [
        ({"a": 'import "a"'}, "a.policy -> a.policy"),
        ({"a": 'import "b"', "b": 'import "a"'}, "a.policy -> b.policy -> a.policy"),
        (
            {"a": 'import "b"', "b": 'import "c"', "c": 'import "a"'},
            "a.policy -> b.policy -> c.policy -> a.policy",
        ),
        ({"a": 'import "b"', "b": 'import "c"', "c": 'import "b"'}, "b.policy -> c.policy -> b.policy"),
        ({"a": 'variant x { import "a" }'}, "a.policy -> a.policy"),
        ({"a": 'import "x/../a"', "x/b": ""}, "a.policy -> a.policy"),
    ],
)
def test_a_circle_of_imports(write, files, chain):
    home = write(**{name.replace("/", "__"): text for name, text in files.items()})
    with pytest.raises(PolicyError) as caught:
        load(home / "a.policy")
    (fault,) = caught.value.diagnostics
    assert fault.code == "import-cycle"
    assert fault.message.endswith(chain)


def test_a_circle_through_a_symbolic_link(write):
    home = write(a='import "link"')
    (home / "link.policy").symlink_to("a.policy")
    assert faults(home / "a.policy") == [("import-cycle", "a.policy", 1)]


def test_links_in_a_circle(write):
    home = write(a='import "x"')
    (home / "x.policy").symlink_to("y.policy")
    (home / "y.policy").symlink_to("x.policy")
    assert faults(home / "a.policy") == [("import-not-found", "a.policy", 1)]
    with pytest.raises(PolicyError):
        load(home / "x.policy")
    for path in (
        home / "x.policy",
        "\0",
        home / ("x" * 5000),
    ):  # the text is there: its path is of no account
        assert heads(parse("a -> bf16", path=path)) == ["a"]


def test_a_tree_of_imports_that_doubles_at_every_level_ends(write):
    """2**20 files in all, if each import counted were read."""
    files = {f"n{i}": f'import "n{i + 1}"\nimport "n{i + 1}"' for i in range(20)}
    home = write(**files, n20="a -> bf16")
    start = time.perf_counter()
    found = faults(home / "n0.policy")
    assert [code for code, _, _ in found] == ["too-many-imports"]
    assert time.perf_counter() - start < 60  # milliseconds; hours if it were not cut short


# ---- paths

BAD = [
    "/etc/passwd", "/tmp/x.policy", "~/x", "~root/x.policy", "C:/x.policy", "C:\\x.policy", "..\\x.policy",
    "https://example.com/x.policy", "file:///x.policy", "x.policy\0", "\0", "", "   ", "x.txt", "x.policy.txt",
    "../secrets.env", "x.policy ", "id_rsa.pub", ".policy.bak",
]  # fmt: skip


@pytest.mark.parametrize("written", BAD, ids=ascii)
def test_a_path_that_an_import_may_not_have(write, written):
    home = write(main=f"import '{written}'")
    with recording() as audit:
        found = faults(home / "main.policy")
    assert found == [("bad-import-path", "main.policy", 1)]
    assert [p for p in audit.opened if not p.endswith(("main.policy", "policy.lark"))] == []


@pytest.mark.parametrize("written", ["..", ".", "sub", "sub/", "nope/../../x", "x" * 5000, "\udcff", "a\nb"])
def test_a_path_that_leads_to_no_policy(write, tmp_path, written):
    (tmp_path / "sub").mkdir()
    found = parse_with_diagnostics(f"import '{written}'", path=tmp_path / "main.policy").diagnostics
    assert found
    assert {d.code for d in found} <= {"import-not-found", "syntax-error"}
    str(PolicyError(found))


def test_no_import_opens_anything_but_policies(write, tmp_path):
    """Files of every kind lie about, and each is asked for in every way: only `*.policy` is ever opened."""
    for name in ("secret", "secret.txt", "policy", ".policyx", "secret.policy.txt", "noext"):
        (tmp_path / name).write_text("a -> bf16")
    (tmp_path / "folder.policy").mkdir()
    asked = [
        "secret",
        "secret.txt",
        "policy",
        ".policyx",
        "secret.policy.txt",
        "noext",
        "./noext",
        "folder",
        "good",
    ]
    home = write(main="\n".join(f'import "{name}"' for name in asked), good="a -> bf16")
    parse_with_diagnostics("a -> bf16")
    with recording() as audit:
        found = parse_with_diagnostics(
            (home / "main.policy").read_text(), path=home / "main.policy"
        ).diagnostics
    assert len(found) == len(asked) - 1
    assert {p.rpartition("/")[2] for p in audit.opened} == {"main.policy", "good.policy"}
    assert audit.ran == []


def test_a_bundled_policy_opens_only_bundled_policies():
    load("bf16")
    with recording() as audit:
        for name in bundled_policies():
            load(name)
    assert audit.opened
    assert all(p.startswith(str(data_folder("policies"))) and p.endswith(".policy") for p in audit.opened)
    assert audit.ran == []


# ---- faults in other files


def test_a_fault_in_an_imported_file_says_who_imports_it(write):
    home = write(main='\nimport "broken"\na -> bf16\n', broken="\n\nb => bf16\n")
    with pytest.raises(PolicyError) as caught:
        load(home / "main.policy")
    (fault,) = caught.value.diagnostics
    assert (fault.code, fault.span.line) == ("syntax-error", 3)
    assert fault.span.source.path == str(home / "broken.policy")
    (note,) = fault.notes
    assert note.message == "imported from here"
    assert (note.span.source.path, note.span.line) == (str(home / "main.policy"), 2)
    assert "imported from here" in str(caught.value)


def test_a_file_imported_twice_is_faulty_once(write):
    home = write(main='import "broken"\nimport "broken"\n', broken="b => bf16\nc -> bf17\n")
    assert sorted(faults(home / "main.policy")) == [
        ("syntax-error", "broken.policy", 1),
        ("unknown-format", "broken.policy", 2),
    ]


def test_faults_of_all_files_come_together(write):
    home = write(main='import "one"\nimport "two"\nx => y\n', one="a => b", two="a -> nope(x=1)")
    assert [(code, file) for code, file, _ in faults(home / "main.policy")] == [
        ("syntax-error", "main.policy"),
        ("syntax-error", "one.policy"),
        ("unknown-format", "two.policy"),
    ]


def test_an_imported_file_that_cannot_be_read(write):
    home = write(main='import "latin"')
    (home / "latin.policy").write_bytes(b"# caf\xe9\na -> bf16\n")
    with pytest.raises(PolicyError, match="line 1 is not UTF-8") as caught:
        load(home / "main.policy")
    (fault,) = caught.value.diagnostics
    assert [n.message for n in fault.notes] == ["imported from here"]


def test_an_imported_file_may_begin_with_a_byte_order_mark(write):
    home = write(main='import "bom"', bom="\ufeffa -> bf16")
    assert heads(load(home / "main.policy")) == ["a"]
