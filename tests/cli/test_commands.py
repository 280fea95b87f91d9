"""The commands that need no program: exit codes, output formats, files they write, colors and encodings."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from policyc import load, parse
from policyc.language import bundled
from policyc.linter.rules import ALL_RULES
from tests.support.command import ROOT, load_commands, policyc, run_main, spawn

pytestmark = pytest.mark.any_jax

CLEAN = "mlp.* -> fp8\n"
SHADOWED = "mlp.up -> fp8\nmlp.* -> fp8\n"
FAULTY = "mlp.* -> fp9\n"
UNTIDY = "a->fp8 # one\nlonger.name   ->   bf16\n"
TIDY = "a           -> fp8  # one\nlonger.name -> bf16\n"
COMMANDS = load_commands()
FORMATS = ("full", "concise", "json", "github", "sarif")

skip_as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder with some policies, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("clean", CLEAN), ("shadowed", SHADOWED), ("faulty", FAULTY), ("untidy", UNTIDY)):
        (tmp_path / f"{name}.policy").write_text(text, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    return tmp_path


# ---- lint


@skip_as_root
@pytest.mark.ordinary_user
def test_a_file_without_read_permission_does_not_stop_the_others(folder: Path) -> None:
    (folder / "clean.policy").chmod(0)
    result = policyc("lint", "clean.policy", "shadowed.policy", "--format", "concise")
    assert result.code == 2
    assert "no permission to read" in result.out
    assert "shadowed-rule" in result.out


def test_unreadable_files_do_not_stop_the_others(folder: Path) -> None:
    result = policyc(
        "lint", "missing.policy", "shadowed.policy", "folder", "faulty.policy", "--format", "concise"
    )
    codes = re.findall(r"\[([\w-]+)\]", result.out)
    assert codes == ["unreadable-file", "shadowed-rule", "unreadable-file", "unknown-format"]
    assert (
        result.err
        == "4 policies: 3 errors and 1 warning; 1 fixable with --fix; 1 more fixable with --fix --unsafe-fixes\n"
    )


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_clean_policy_has_no_findings_in_any_format(folder: Path, output_format: str) -> None:
    result = policyc("lint", "clean.policy", "--format", output_format)
    assert result.code == 0
    if output_format == "sarif":
        assert json.loads(result.out)["runs"][0]["results"] == []
    else:
        assert result.out == ("[]\n" if output_format == "json" else "")


def test_standard_input(folder: Path) -> None:
    result = policyc("lint", "-", "--format", "concise", stdin=SHADOWED)
    assert result.out.startswith("<stdin>:1:1: warning[shadowed-rule]")
    assert policyc("lint", "-", stdin=CLEAN).code == 0
    assert policyc("lint", "-", stdin=CLEAN.replace("\n", "\r\n")).code == 0
    assert policyc("lint", "-", stdin=b"\xff\xfe").code == 2
    assert policyc("lint", "-", stdin='import "fp8"\n').code == 0
    # Standard input has no folder to import from.
    assert policyc("lint", "-", stdin='import "clean"\n').code == 1


def test_a_file_comes_before_a_bundled_policy_of_that_file_name(folder: Path) -> None:
    assert policyc("lint", "bf16").code == 0
    (folder / "bf16.policy").write_text(FAULTY)
    assert policyc("lint", "bf16.policy").code == 1
    assert policyc("lint", "bf16").code == 0
    assert "did you mean 'llama_nvfp4'?" in policyc("lint", "lama_nvfp4").out


# ---- files that are written


def test_fix_writes_the_file_and_counts_the_fixes(folder: Path) -> None:
    result = policyc("lint", "--fix", "shadowed.policy", "clean.policy")
    assert (folder / "shadowed.policy").read_text() == CLEAN
    assert result.err == "1 fixed\n2 policies: no findings\n"


def test_without_fix_nothing_is_written(folder: Path) -> None:
    for arguments in (
        "lint shadowed.policy",
        "fmt --check untidy.policy",
        "fmt --diff untidy.policy",
        "show untidy.policy",
    ):
        policyc(*arguments.split())
    assert (folder / "shadowed.policy").read_text() == SHADOWED
    assert (folder / "untidy.policy").read_text() == UNTIDY


@pytest.mark.ordinary_user
@pytest.mark.parametrize("command", [["lint", "--fix"], ["fmt"]])
class TestWriting:
    """Commands that write a file change its text and nothing else: tests/base/test_files.py has the rest."""

    TEXT = "mlp.up   -> fp8\nmlp.* -> fp8 # keep\n"

    def test_line_endings_are_kept(self, folder: Path, command: list[str]) -> None:
        path = folder / "windows.policy"
        path.write_bytes(self.TEXT.replace("\n", "\r\n").encode())
        policyc(*command, path)
        data = path.read_bytes()
        assert data != self.TEXT.encode()
        assert data.count(b"\n") == data.count(b"\r\n") > 0

    def test_a_failed_write_keeps_the_old_text(
        self, folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder / "some.policy"
        path.write_text(self.TEXT)
        before = sorted(p.name for p in folder.iterdir())

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        result = policyc(*command, "some.policy")
        assert result.code == 2
        assert "cannot be written: No space left on device" in result.out + result.err
        assert path.read_text() == self.TEXT
        assert sorted(p.name for p in folder.iterdir()) == before

    @skip_as_root
    def test_a_read_only_folder_is_an_error(self, folder: Path, command: list[str]) -> None:
        path = folder / "folder" / "some.policy"
        path.write_text(self.TEXT)
        path.parent.chmod(0o500)
        result = policyc(*command, path)
        path.parent.chmod(0o700)
        assert result.code == 2
        assert "cannot be written" in result.out + result.err
        assert path.read_text() == self.TEXT

    def test_a_bundled_policy_is_not_written_and_does_not_stop_the_others(
        self, folder: Path, command: list[str]
    ) -> None:
        (folder / "some.policy").write_text(self.TEXT)
        before = {name: path.read_bytes() for name, path in bundled.bundled_policies().items()}
        result = policyc(*command, "fp8", "some.policy")
        assert result.code == 2
        assert "a bundled policy" in result.out + result.err
        assert "policyc show fp8 --out my_fp8.policy" in result.out + result.err
        assert (folder / "some.policy").read_text() != self.TEXT
        assert {name: path.read_bytes() for name, path in bundled.bundled_policies().items()} == before


def test_fix_keeps_a_byte_order_mark_and_fmt_removes_it(folder: Path) -> None:
    path = folder / "marked.policy"
    path.write_text("\ufeff" + SHADOWED, encoding="utf-8")
    policyc("lint", "--fix", path)
    assert path.read_text(encoding="utf-8") == "\ufeff" + CLEAN
    policyc("fmt", path)
    assert path.read_text(encoding="utf-8") == CLEAN


def test_a_file_that_needs_no_change_is_not_written(folder: Path) -> None:
    before = (folder / "clean.policy").stat()
    policyc("lint", "--fix", "clean.policy")
    policyc("fmt", "clean.policy")
    after = (folder / "clean.policy").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


# ---- fmt


@pytest.fixture
def tree(folder: Path) -> Path:
    """A folder with policies in it and below it, hidden ones and other files."""
    top = folder / "tree"
    for name, text in (
        ("b.policy", SHADOWED),
        ("a/c.policy", UNTIDY),
        ("a/notes.txt", "not a policy"),
        (".hidden/d.policy", FAULTY),
    ):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def test_a_folder_stands_for_the_policies_in_and_below_it(tree: Path) -> None:
    result = policyc("lint", "tree", "clean.policy", "--format", "concise")
    assert result.code == 1
    assert [line.split(":")[0] for line in result.out.splitlines()] == ["tree/b.policy"]
    assert result.err.startswith("3 policies: 1 warning")
    assert (
        policyc("fmt", "--check", "tree").err
        == "tree/a/c.policy: would be changed\ntree/b.policy: would be changed\n"
    )


def test_lint_diff_prints_the_fixes_and_writes_nothing(folder: Path) -> None:
    result = policyc("lint", "--diff", "shadowed.policy", "clean.policy", "faulty.policy")
    assert result.code == 1
    assert result.out.splitlines()[:2] == ["--- shadowed.policy", "+++ shadowed.policy"]
    assert result.out.splitlines()[-2:] == ["-mlp.up -> fp8", " mlp.* -> fp8"]
    assert (folder / "shadowed.policy").read_text() == SHADOWED
    assert policyc("lint", "--diff", "clean.policy").code == 0
    assert "+mlp.* -> fp8" in policyc("lint", "--diff", "--unsafe-fixes", "faulty.policy").out
    assert policyc("lint", "--diff", "-", stdin=SHADOWED).out.startswith("--- <stdin>\n")
    assert policyc("lint", "--diff", "--fix", "clean.policy").code == 2
    assert policyc("lint", "--diff", "--statistics", "clean.policy").code == 2
    assert result.err == "1 would be fixed\n"
    assert policyc("lint", "--diff", "shadowed.policy", "missing.policy").code == 2


def test_lint_statistics_count_the_findings_of_each_code(folder: Path) -> None:
    (folder / "more.policy").write_text(SHADOWED + "default -> bf16\n")
    arguments = ("lint", "shadowed.policy", "more.policy", "--statistics")
    result = policyc(*arguments)
    assert result.code == 1
    assert [line.split()[:3] for line in result.out.splitlines()] == [
        ["2", "shadowed-rule", "[*]"],
        ["1", "literal-default", "["],
    ]
    rows = json.loads(policyc(*arguments, "--format", "json").out)
    assert [(row["code"], row["count"], row["fixable"]) for row in rows] == [
        ("shadowed-rule", 2, 2),
        ("literal-default", 1, 0),
    ]
    assert policyc(*arguments, "--format", "sarif").code == 2
    assert policyc(*arguments, "--format", "concise").out == result.out


def test_fix_of_standard_input_writes_standard_output(folder: Path) -> None:
    result = policyc("lint", "--fix", "-", stdin=SHADOWED + "default -> bf16\n")
    assert (result.code, result.out) == (1, "mlp.* -> fp8\ndefault -> bf16\n")
    assert "warning[literal-default]" in result.err
    assert policyc("lint", "--fix", "-", stdin=CLEAN).out == CLEAN
    assert policyc("lint", "--fix", "-", "clean.policy", stdin=CLEAN).code == 2


def test_a_file_that_is_named_twice_is_linted_once(folder: Path) -> None:
    assert policyc("lint", "shadowed.policy", "shadowed.policy").err.startswith("1 policy: 1 warning")


def test_codes_are_selected_as_in_other_linters(folder: Path) -> None:
    assert policyc("lint", "shadowed.policy", "--select", "ALL").code == 1
    assert policyc("lint", "shadowed.policy", "--ignore", "ALL").code == 0
    assert "did you mean 'shadowed-rule'?" in policyc("lint", "clean.policy", "--select", "shadowed").err


def test_stdin_filename_is_printed_and_imports_are_relative_to_it(folder: Path) -> None:
    (folder / "folder" / "base.policy").write_text("recipe mine = nvfp4\n")
    text = 'import "base"\nmlp.* -> mime\n'
    result = policyc("lint", "-", "--stdin-filename", "folder/new.policy", stdin=text)
    assert result.out.startswith("folder/new.policy:2:10: error[unknown-recipe]")
    assert "did you mean 'mine'?" in result.out
    assert "import-not-found" in policyc("lint", "-", stdin=text).out
    assert policyc("lint", "clean.policy", "--stdin-filename", "x.policy").code == 2


def test_tables_are_also_printed_as_json(folder: Path) -> None:
    bundled_names = [row["name"] for row in json.loads(policyc("show", "--format", "json").out)]
    assert bundled_names == list(bundled.bundled_policies())
    (page,) = json.loads(policyc("explain", "shadowed-rule", "--format", "json").out)
    assert (page["code"], page["severity"]) == ("shadowed-rule", "warning")


def test_fmt_in_place(folder: Path) -> None:
    result = policyc("fmt", "untidy.policy", "clean.policy")
    assert (folder / "untidy.policy").read_text() == TIDY
    assert (result.out, result.err) == ("", "untidy.policy: changed\n")
    assert policyc("fmt", "--check", "untidy.policy").code == 0


def test_fmt_diff(folder: Path) -> None:
    result = policyc("fmt", "--diff", "untidy.policy")
    assert "--- untidy.policy\n+++ untidy.policy\n" in result.out
    assert "-a->fp8 # one\n" in result.out
    assert "+a           -> fp8  # one\n" in result.out


def test_fmt_of_standard_input(folder: Path) -> None:
    assert policyc("fmt", "-", stdin=UNTIDY).out == TIDY
    assert policyc("fmt", "--check", "-", stdin=UNTIDY).code == 1
    assert policyc("fmt", "--check", "-", stdin=TIDY).code == 0
    result = policyc("fmt", "-", stdin="mlp => fp8")
    assert (result.code, result.out) == (2, "")
    assert "<stdin>:1:5: error[syntax-error]" in result.err


def test_fmt_skips_a_file_with_a_syntax_error(folder: Path) -> None:
    (folder / "broken.policy").write_text("mlp   => fp8\n")
    result = policyc("fmt", "broken.policy", "untidy.policy")
    assert result.code == 2
    assert (folder / "broken.policy").read_text() == "mlp   => fp8\n"
    assert (folder / "untidy.policy").read_text() == TIDY


def test_fmt_needs_correct_syntax_only(folder: Path) -> None:
    """A policy that names an unknown format can be formatted."""
    assert policyc("fmt", "faulty.policy").code == 0


# ---- explain


def test_explain_lists_every_code(folder: Path) -> None:
    lines = policyc("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == list(ALL_RULES)
    assert all(line.endswith(ALL_RULES[line.split()[0]].title) for line in lines)


@pytest.mark.parametrize("code", ["shadowed-rule", "syntax-error"])
def test_explain_prints_the_page(code: str) -> None:
    result = policyc("explain", code)
    assert result.out.startswith(f"# {code} ({ALL_RULES[code].severity})\n")
    assert ALL_RULES[code].page in result.out


def test_an_unknown_command_names_the_closest() -> None:
    result = policyc("lnt", "my.policy")
    assert result.code == 2
    assert "no command is named 'lnt': did you mean 'lint'?" in result.err
    assert "no command is named 'xyz': 'policyc --help' lists them all" in policyc("xyz").err


def test_explain_an_unknown_code() -> None:
    result = policyc("explain", "shadowed-rul")
    assert "no rule has the code 'shadowed-rul': did you mean 'shadowed-rule'?" in result.err
    assert "'policyc explain' lists them all" in policyc("explain", "nope").err


# ---- show


def test_show_lists_the_bundled_policies() -> None:
    out = policyc("show").out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in bundled.bundled_policies())
    assert "variants: no_rht" in out


def test_show_a_table() -> None:
    out = policyc("show", "llama_nvfp4", env={"COLUMNS": "200"}).out
    assert all(
        word in out for word in ("fprop", "dgrad", "wgrad", "activation x weight", "nvfp4 1x16 rht16 sr")
    )
    assert "llama_nvfp4:no_rht" in policyc("show", "llama_nvfp4:no_rht").out
    without = policyc("show", "llama_nvfp4:no_rht", env={"COLUMNS": "200"}).out
    assert "rht16" not in without


def test_show_prints_schedules_expects_and_products(folder: Path) -> None:
    (folder / "some.policy").write_text("a -> fp8 expect 3\nafter 50% { b @ fprop, c -> bf16 }\n")
    out = policyc("show", "some.policy").out
    assert all(word in out for word in ("expect 3", "after 50%", "of c"))


@pytest.mark.parametrize("name", bundled.bundled_policies())
def test_show_as_text_parses_to_the_same_policy(name: str) -> None:
    assert parse(policyc("show", name, "--format", "policy").out) == load(name)
    for variant in load(name).variants:
        text = policyc("show", f"{name}:{variant.name}", "--format", "policy").out
        assert parse(text) == load(name).variant(variant.name)


def test_show_as_json() -> None:
    shown = json.loads(policyc("show", "nvfp4_late_switch", "--format", "json").out)
    assert shown["variants"] == ["fp8", "bf16", "switch_all"]
    last = shown["rules"][-1]
    assert last == {
        "selectors": ["* @ fprop"], "where": None, "when": ["after 82%"], "expect": None, "recipe": "bf16",
        "operands": {"fprop.activation": "bf16", "fprop.weight": "bf16"},
    }  # fmt: skip


# ---- help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_of_the_command(name: str) -> None:
    out = policyc(*name.split(), "--help").out
    examples = out.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.strip().startswith(f"policyc {name}") for line in examples)
    assert policyc(*name.split(), "-h").out == out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_is_shown(name: str) -> None:
    for parameter in COMMANDS[name].params:
        has_value = isinstance(parameter, click.Option) and not parameter.is_flag
        if has_value and isinstance(parameter.default, str | int):
            assert parameter.show_default, parameter.name


# ---- terminals


ESCAPE = "\x1b["


@pytest.mark.parametrize(
    ("arguments", "env", "colored"),
    [
        *(
            (words, {"FORCE_COLOR": "1"}, True)
            for words in ("lint shadowed.policy", "fmt --diff untidy.policy")
        ),
        *((words, {"FORCE_COLOR": "1"}, True) for words in ("explain", "show", "show fp8")),
        *(("lint shadowed.policy", {"NO_COLOR": "1"} | more, False) for more in ({}, {"FORCE_COLOR": "1"})),
        ("lint shadowed.policy", {}, False),
    ],
    ids=str,
)
def test_colors(folder: Path, arguments: str, env: dict[str, str], colored: bool) -> None:
    assert (ESCAPE in policyc(*arguments.split(), env=env).out) is colored


@pytest.mark.parametrize("output_format", ["json", "github", "sarif"])
def test_machine_readable_formats_have_no_colors(folder: Path, output_format: str) -> None:
    assert (
        ESCAPE
        not in policyc("lint", "shadowed.policy", "--format", output_format, env={"FORCE_COLOR": "1"}).out
    )


@pytest.mark.parametrize("output_format", ["full", "json", "sarif"])
def test_an_output_that_is_not_utf_8(folder: Path, output_format: str) -> None:
    (folder / "caf\u00e9.policy").write_text("\u6df1\u5c64 -> fp9  # " + "\u00e9" * 200, encoding="utf-8")
    result = run_main("lint", "caf\u00e9.policy", "--format", output_format, encoding="ascii")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert result.out
    if output_format in ("json", "sarif"):
        json.loads(result.out)


@pytest.mark.parametrize("arguments", ["show fp8", "explain shadowed-rule"])
def test_other_commands_with_an_output_that_is_not_utf_8(arguments: str) -> None:
    result = run_main(*arguments.split(), encoding="ascii")
    assert (result.code, "Traceback" in result.err) == (0, False)


def test_a_character_that_the_output_lacks_is_a_question_mark(folder: Path) -> None:
    (folder / "deep.policy").write_text("\u6df1\u5c64 -> fp9\n", encoding="utf-8")
    assert "?? -> fp9" in run_main("lint", "deep.policy", encoding="latin-1").out


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
@pytest.mark.parametrize("output_format", FORMATS)
def test_a_file_name_that_is_not_utf_8(folder: Path, output_format: str) -> None:
    name = os.fsdecode(b"caf\xe9.policy")
    (folder / name).write_text(FAULTY)
    result = run_main("lint", name, "--format", output_format, encoding="utf-8")
    assert result.code == 1
    if output_format in ("json", "sarif"):
        json.loads(result.out)


def test_terminal_escapes_in_a_policy_are_printed_escaped(folder: Path) -> None:
    (folder / "evil.policy").write_text("mlp -> fp9  # \x1b[2J\x1b]0;owned\x07\n")
    result = policyc("lint", "evil.policy")
    assert "\x1b" not in result.out
    assert "\\x1b[2J" in result.out


EVIL = "[bold]\x1b[31mx[/nonsense]"
"""A name with markup of rich, an escape sequence, and a closing tag that rich would refuse."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", f"{EVIL}.policy"),
        ("show", f"fp8:{EVIL}"),
        ("show", EVIL),
        ("lint", f"{EVIL}.policy", "--diff"),
        ("lint", "fp8", "--select", EVIL),
        ("lint", "fp8", f"{EVIL}.py"),
        ("lint", f"--{EVIL}"),
        ("fmt", f"{EVIL}.policy", "--diff"),
        ("explain", EVIL),
        ("targets", EVIL),
        ("sites", f"{EVIL}.py"),
        ("apply", "fp8", "-m", EVIL),
        ("quantize", EVIL, "--recipe", EVIL, "--role", "weight", "--gemm", "fprop", "--out", EVIL),
        ("report", EVIL),
        ("estimate", f"{EVIL}.policy", "--config", "tiny", "--target", "b200"),
        (EVIL,),
    ],
    ids=lambda words: " ".join(words).replace(EVIL, "EVIL"),
)
def test_names_are_printed_as_they_are_and_escaped(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "[bold]\x1b[31mx[").mkdir()
    (folder / f"{EVIL}.policy").write_text(SHADOWED.replace("->", "  ->"))
    ran = policyc(*arguments, env={"COLUMNS": "400"})
    assert "\x1b[31m" not in ran.out + ran.err
    assert "[bold]\\x1b[31mx[/nonsense]" in ran.out + ran.err


@pytest.mark.skipif(os.name == "nt", reason="needs a shell with pipes")
@pytest.mark.parametrize(
    "arguments", ["lint many.policy", "explain --format json", "show many.policy --format policy"]
)
def test_a_closed_pipe_is_not_an_error(folder: Path, arguments: str) -> None:
    """The output is longer than the buffer of a pipe, so the command writes after its reader is gone."""
    recipe = "fp9" if arguments.startswith("lint") else "fp8"
    (folder / "many.policy").write_text("".join(f"a{i}{'x' * 200} -> {recipe}\n" for i in range(600)))
    command = f"{shlex.quote(sys.executable)} -m policyc.cli.main {arguments} | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, shell=True, capture_output=True, env=env, check=False)
    assert result.stdout.count(b"\n") == 1
    assert b"Traceback" not in result.stderr
    assert b"BrokenPipe" not in result.stderr


def test_from_another_folder_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "my.policy").write_text('import "te_nvfp4"\nlayers[-4:].* -> bf16\n')
    result = spawn("lint", "my.policy", "llama_nvfp4", cwd=tmp_path)
    assert (result.code, result.out, result.err) == (0, "", "2 policies: no findings\n")


# ---- exit codes


OPERAND = "--role weight --gemm fprop --out out.npz"
TINY_PROGRAM = """
import jax, jax.numpy as jnp
jax.grad(lambda p: (jnp.ones((2, 4)) @ p["w"]).sum())({"w": jnp.ones((4, 2))})
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        *((0, f"{name} --help") for name in load_commands()),
        *((2, f"{name} --no-such-option") for name in load_commands() if name != "train"),
        (0, "--version"),
        (0, "lint good.policy"),
        (1, "lint good.policy shadowed.policy"),
        (0, "lint shadowed.policy --ignore shadowed-rule"),
        (0, "lint shadowed.policy --select redundant-rule"),
        (1, "lint shadowed.policy --select redundant-rule,shadowed-rule"),
        (1, "lint shadowed.policy --select redundant-rule --select shadowed-rule"),
        (0, "lint shadowed.policy --select shadowed-rule --ignore shadowed-rule"),
        (1, "lint faulty.policy --ignore syntax-error"),  # a policy that does not load is always an error
        (2, "lint shadowed.policy absent.policy"),
        (2, "lint latin.policy"),
        (2, "lint importer.policy"),
        (2, "lint --format xml good.policy"),
        (2, "lint --select no-such-code good.policy"),
        (2, "lint --unsafe-fixes shadowed.policy"),
        (1, "lint --fix unknown.policy"),
        (0, "lint --fix --unsafe-fixes unknown.policy"),
        (0, "fmt --check good.policy"),
        (2, "fmt --check good.policy untidy.policy absent.policy"),
        (2, "fmt run"),
        (2, "show llama_nvfp4:no_such"),
        (2, "show fp8 --format yaml"),
        *((2, f"{words} absent.policy") for words in ("lint", "fmt", "show")),
        (2, "apply absent.policy program.py"),
        (2, "sites --policy absent.policy program.py"),
        (2, "estimate absent.policy --target b200 program.py"),
        (2, "compile absent.policy --target b200 program.py"),
        (2, "train --policy absent.policy"),
        (2, "report absent"),
        *((1, f"{words} faulty.policy") for words in ("lint", "show")),
        (2, "fmt faulty.policy"),
        (1, "sites --policy faulty.policy program.py"),
        (1, "estimate faulty.policy --target b200 program.py"),
        (1, "compile faulty.policy --target b200 program.py"),
        (1, "train --policy faulty.policy"),
        (2, "apply program.py good.policy"),
        (2, "sites absent.py"),
        (2, "compile good.policy --target abacus program.py"),
        (2, "estimate good.policy --target abacus program.py"),
        (2, "targets abacus"),
        (2, "explain no-such-rule"),
        (1, "sites program.py"),
        (7, "apply good.policy seven.py"),
        (0, "show good.policy"),
        (0, "explain shadowed-rule"),
        (0, "targets b200"),
        (0, "fmt untidy.policy"),
        (1, "fmt --check untidy.policy"),
        (1, "fmt --diff untidy.policy"),
        (1, "lint shadowed.policy"),
        (0, "lint shadowed.policy --exit-zero"),
        (2, "lint absent.policy --exit-zero"),
        (1, "lint shadowed.policy --diff"),
        (0, "lint shadowed.policy --diff --exit-zero"),
        (0, "lint shadowed.policy --fix"),
        (0, "report run"),
        *(
            (2, f"{words} {'x' * 300}")
            for words in ("report", "report run --out", "apply fp8", "selftest --out")
        ),
        (2, f"init --out {'x' * 300} train.py"),
        (2, f"sweep --out {'x' * 300} fp8 train.py"),
        (2, f"quantize absent.npy --recipe fp8 {OPERAND}"),
        (1, f"quantize absent.npy --recipe fp9 {OPERAND}"),
        (2, "lint good.policy absent.py"),
        (1, "lint good.policy program.py"),
        (0, "lint kept.policy train.py"),
        (1, "lint misspelt.policy train.py"),
        (0, "apply kept.policy train.py"),
        (0, "sites train.py"),
        (0, "estimate kept.policy --target b200 train.py"),
        (1, "estimate kept.policy --target b200 --batch 4 train.py"),
    ],
)
def test_exit_codes_mean_the_same_in_every_command(tmp_path: Path, code: int, words: str) -> None:
    """One meaning per code, in every command: the table of docs/reference/cli.md."""
    (tmp_path / "good.policy").write_text("mlp -> fp8\n")
    (tmp_path / "faulty.policy").write_text("mlp => fp8\n")
    (tmp_path / "unknown.policy").write_text(FAULTY)
    (tmp_path / "latin.policy").write_bytes(b"# caf\xe9\n")
    (tmp_path / "importer.policy").write_text('import "latin"\n')
    (tmp_path / "program.py").write_text("print('nothing')\n")
    (tmp_path / "seven.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "untidy.policy").write_text(UNTIDY)
    (tmp_path / "shadowed.policy").write_text(SHADOWED)
    (tmp_path / "kept.policy").write_text("w -> keep\n")
    (tmp_path / "misspelt.policy").write_text("ww -> fp8\n")
    (tmp_path / "train.py").write_text(TINY_PROGRAM)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    result = policyc(*words.split(), cwd=tmp_path)
    assert result.code == code, result.err
