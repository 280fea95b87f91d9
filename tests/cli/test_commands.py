"""The command line: exit codes, formats, files that are written, and terminals of all kinds."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from policyc import __version__, load, parse
from policyc.language import bundled
from policyc.lint.rules import LINT_RULES, load_program_rules
from tests.support.command import ROOT, load_commands, policyc, run_main, spawn

CLEAN = "mlp.* -> fp8\n"
SHADOWED = "mlp.up -> bf16\nmlp.* -> fp8\n"
FAULTY = "mlp.* -> fp9\n"
UNTIDY = "a->fp8 # one\nlonger.name   ->   bf16\n"
TIDY = "a           -> fp8  # one\nlonger.name -> bf16\n"
COMMANDS = load_commands()
FORMATS = ("full", "concise", "json", "github", "sarif")

needs_permissions = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of our own, and in it."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("clean", CLEAN), ("shadowed", SHADOWED), ("faulty", FAULTY), ("untidy", UNTIDY)):
        (tmp_path / f"{name}.policy").write_text(text, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.policy").write_bytes(b"# caf\xe9\n")
    (tmp_path / "importer.policy").write_text('import "latin"\n')
    return tmp_path


# ---- exit codes


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("lint clean.policy", 0),
        ("lint fp8", 0),
        ("lint fp8.policy", 0),
        ("lint clean.policy bf16 clean.policy", 0),
        ("lint shadowed.policy", 1),
        ("lint clean.policy shadowed.policy", 1),
        ("lint faulty.policy", 1),
        ("lint shadowed.policy --ignore shadowed-rule", 0),
        ("lint shadowed.policy --select redundant-rule", 0),
        ("lint shadowed.policy --select redundant-rule,shadowed-rule", 1),
        ("lint shadowed.policy --select redundant-rule --select shadowed-rule", 1),
        ("lint shadowed.policy --select shadowed-rule --ignore shadowed-rule", 0),
        ("lint faulty.policy --ignore unknown-format", 1),  # it cannot be read: nothing else can be said of it
        ("lint missing.policy", 2),
        ("lint clean.policy missing.policy", 2),
        ("lint shadowed.policy missing.policy", 2),
        ("lint folder", 2),
        ("lint latin.policy", 2),
        ("lint importer.policy", 2),
        ("lint", 2),
        ("lint --no-such-option clean.policy", 2),
        ("lint --format xml clean.policy", 2),
        ("lint --select no-such-code clean.policy", 2),
        ("lint --unsafe-fixes shadowed.policy", 2),
        ("lint --fix -", 2),
        ("lint --fix shadowed.policy", 0),
        ("lint --fix faulty.policy", 1),
        ("lint --fix --unsafe-fixes faulty.policy", 0),
        ("lint --fix fp8", 2),
        ("lint --fix folder", 2),
        ("fmt clean.policy", 0),
        ("fmt untidy.policy", 0),
        ("fmt --check clean.policy", 0),
        ("fmt --check untidy.policy", 1),
        ("fmt --diff untidy.policy", 1),
        ("fmt --check clean.policy untidy.policy missing.policy", 2),
        ("fmt missing.policy", 2),
        ("fmt folder", 2),
        ("fmt fp8", 2),
        ("fmt", 2),
        ("explain", 0),
        ("explain shadowed-rule", 0),
        ("explain shadowed-rule idle-option", 0),
        ("explain --markdown", 0),
        ("explain no-such-code", 2),
        ("show", 0),
        ("show fp8", 0),
        ("show clean.policy", 0),
        ("show shadowed.policy", 0),
        ("show llama_nvfp4 --variant no_rht", 0),
        ("show llama_nvfp4 --variant no_such", 2),
        ("show faulty.policy", 1),
        ("show missing", 2),
        ("show fp8 --format yaml", 2),
        ("--version", 0),
        ("--help", 0),
        ("no-such-command", 2),
    ],
)  # fmt: skip
def test_exit_codes(folder: Path, arguments: str, code: int) -> None:
    assert policyc(*arguments.split()).code == code


@needs_permissions
def test_a_file_without_read_permission_is_an_error_among_others(folder: Path) -> None:
    (folder / "clean.policy").chmod(0)
    ran = policyc("lint", "clean.policy", "shadowed.policy", "--format", "concise")
    assert ran.code == 2
    assert "no permission to read" in ran.out
    assert "shadowed-rule" in ran.out


def test_what_can_be_read_is_linted_beside_what_cannot(folder: Path) -> None:
    ran = policyc(
        "lint", "missing.policy", "shadowed.policy", "folder", "faulty.policy", "--format", "concise"
    )
    codes = re.findall(r"\[([\w-]+)\]", ran.out)
    assert codes == ["unreadable-file", "shadowed-rule", "unreadable-file", "unknown-format"]
    assert ran.err == "4 policies: 3 errors and 1 warning; 1 fixable with --fix\n"


# ---- lint


def test_findings_go_to_stdout_and_words_about_them_to_stderr(folder: Path) -> None:
    ran = policyc("lint", "shadowed.policy")
    assert ran.out.startswith("shadowed.policy:1:1: warning[shadowed-rule]: ")
    assert ran.err == "1 policy: 1 warning; 1 fixable with --fix\n"
    assert policyc("lint", "clean.policy").out == ""


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_clean_is_clean_in_every_format(folder: Path, form: str) -> None:
    ran = policyc("lint", "clean.policy", "--format", form)
    assert ran.code == 0
    if form == "sarif":
        assert json.loads(ran.out)["runs"][0]["results"] == []
    else:
        assert ran.out == ("[]\n" if form == "json" else "")


def test_standard_input(folder: Path) -> None:
    ran = policyc("lint", "-", "--format", "concise", stdin=SHADOWED)
    assert ran.out.startswith("<stdin>:1:1: warning[shadowed-rule]")
    assert policyc("lint", "-", stdin=CLEAN).code == 0
    assert policyc("lint", "-", stdin=CLEAN.replace("\n", "\r\n")).code == 0
    assert policyc("lint", "-", stdin=b"\xff\xfe").code == 2
    assert policyc("lint", "-", stdin='import "fp8"\n').code == 0
    assert policyc("lint", "-", stdin='import "clean"\n').code == 1  # it lies nowhere that `clean` is beside


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_code_names_the_closest(folder: Path, option: str) -> None:
    ran = policyc("lint", "clean.policy", option, "shadow-rule")
    assert "no rule has the code 'shadow-rule': did you mean 'shadowed-rule'?" in ran.err
    assert "'policyc explain' lists them all" in policyc("lint", "clean.policy", option, "xyz").err


def test_a_bundled_policy_is_found_by_name_and_hidden_by_a_file(folder: Path) -> None:
    assert policyc("lint", "bf16").code == 0
    (folder / "bf16.policy").write_text(FAULTY)
    assert policyc("lint", "bf16.policy").code == 1
    assert policyc("lint", "bf16").code == 0
    assert "did you mean 'llama_nvfp4'?" in policyc("lint", "lama_nvfp4").out


def test_what_was_too_hard_is_said(folder: Path) -> None:
    (folder / "hard.policy").write_text("a where k % 127 == 0 and k % 113 == 0 -> fp8\na -> bf16\n")
    ran = policyc("lint", "hard.policy")
    assert ran.code == 0
    assert "exceeded their limits: some findings may be missing" in ran.err


# ---- files that are written


def test_fix_writes_the_file_and_says_so(folder: Path) -> None:
    ran = policyc("lint", "--fix", "shadowed.policy", "clean.policy")
    assert (folder / "shadowed.policy").read_text() == CLEAN
    assert ran.err == "1 fixed\n2 policies: no findings\n"


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


@pytest.mark.parametrize("command", [["lint", "--fix"], ["fmt"]])
class TestWriting:
    """What writing must not change."""

    TEXT = "mlp.up   -> bf16\nmlp.* -> fp8 # keep\n"

    def test_mode_and_link_stay(self, folder: Path, command: list[str]) -> None:
        target, link = folder / "target.policy", folder / "link.policy"
        target.write_text(self.TEXT)
        target.chmod(0o640)
        link.symlink_to(target)
        policyc(*command, "link.policy")
        assert link.is_symlink()
        assert stat.S_IMODE(target.stat().st_mode) == 0o640
        assert target.read_text() != self.TEXT
        assert "# keep" in target.read_text()

    def test_line_ends_stay(self, folder: Path, command: list[str]) -> None:
        path = folder / "windows.policy"
        path.write_bytes(self.TEXT.replace("\n", "\r\n").encode())
        policyc(*command, path)
        data = path.read_bytes()
        assert data != self.TEXT.encode()
        assert data.count(b"\n") == data.count(b"\r\n") > 0

    def test_nothing_is_left_beside_the_file(self, folder: Path, command: list[str]) -> None:
        (folder / "some.policy").write_text(self.TEXT)
        before = sorted(p.name for p in folder.iterdir())
        policyc(*command, "some.policy")
        assert sorted(p.name for p in folder.iterdir()) == before

    def test_a_write_that_fails_leaves_the_old_text(
        self, folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder / "some.policy"
        path.write_text(self.TEXT)
        before = sorted(p.name for p in folder.iterdir())

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        ran = policyc(*command, "some.policy")
        assert ran.code == 2
        assert "cannot be written: No space left on device" in ran.out + ran.err
        assert path.read_text() == self.TEXT
        assert sorted(p.name for p in folder.iterdir()) == before

    @needs_permissions
    def test_a_folder_that_cannot_be_written(self, folder: Path, command: list[str]) -> None:
        path = folder / "folder" / "some.policy"
        path.write_text(self.TEXT)
        path.parent.chmod(0o500)
        ran = policyc(*command, path)
        path.parent.chmod(0o700)
        assert ran.code == 2
        assert "cannot be written" in ran.out + ran.err
        assert path.read_text() == self.TEXT

    def test_a_bundled_policy_is_refused_and_the_others_are_not(
        self, folder: Path, command: list[str]
    ) -> None:
        (folder / "some.policy").write_text(self.TEXT)
        before = {name: path.read_bytes() for name, path in bundled.bundled_policies().items()}
        ran = policyc(*command, "fp8", "some.policy")
        assert ran.code == 2
        assert "a bundled policy" in ran.out + ran.err
        assert "policyc show fp8 --format text" in ran.out + ran.err
        assert (folder / "some.policy").read_text() != self.TEXT
        assert {name: path.read_bytes() for name, path in bundled.bundled_policies().items()} == before


def test_a_byte_order_mark_survives_fixes_and_not_fmt(folder: Path) -> None:
    path = folder / "marked.policy"
    path.write_text("\ufeff" + SHADOWED, encoding="utf-8")
    policyc("lint", "--fix", path)
    assert path.read_text(encoding="utf-8") == "\ufeff" + CLEAN
    policyc("fmt", path)
    assert path.read_text(encoding="utf-8") == CLEAN


def test_two_files_that_need_no_fix_are_not_touched(folder: Path) -> None:
    before = (folder / "clean.policy").stat()
    policyc("lint", "--fix", "clean.policy")
    policyc("fmt", "clean.policy")
    after = (folder / "clean.policy").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


# ---- fmt


def test_fmt_in_place(folder: Path) -> None:
    ran = policyc("fmt", "untidy.policy", "clean.policy")
    assert (folder / "untidy.policy").read_text() == TIDY
    assert (ran.out, ran.err) == ("", "untidy.policy: changed\n")
    assert policyc("fmt", "--check", "untidy.policy").code == 0


def test_fmt_check_names_the_files(folder: Path) -> None:
    ran = policyc("fmt", "--check", "clean.policy", "untidy.policy")
    assert (ran.out, ran.err) == ("", "untidy.policy: would be changed\n")


def test_fmt_diff(folder: Path) -> None:
    ran = policyc("fmt", "--diff", "untidy.policy")
    assert "--- untidy.policy\n+++ untidy.policy\n" in ran.out
    assert "-a->fp8 # one\n" in ran.out
    assert "+a           -> fp8  # one\n" in ran.out


def test_fmt_of_standard_input(folder: Path) -> None:
    assert policyc("fmt", "-", stdin=UNTIDY).out == TIDY
    assert policyc("fmt", "--check", "-", stdin=UNTIDY).code == 1
    assert policyc("fmt", "--check", "-", stdin=TIDY).code == 0
    ran = policyc("fmt", "-", stdin="mlp => fp8")
    assert (ran.code, ran.out) == (2, "")
    assert "<stdin>:1:5: error[syntax-error]" in ran.err


def test_fmt_leaves_a_faulty_file_alone_and_goes_on(folder: Path) -> None:
    (folder / "broken.policy").write_text("mlp   => fp8\n")
    ran = policyc("fmt", "broken.policy", "untidy.policy")
    assert ran.code == 2
    assert (folder / "broken.policy").read_text() == "mlp   => fp8\n"
    assert (folder / "untidy.policy").read_text() == TIDY


def test_fmt_asks_for_syntax_only(folder: Path) -> None:
    """A policy that names an unknown format has a layout."""
    assert policyc("fmt", "faulty.policy").code == 0


# ---- explain


def test_explain_lists_every_code(folder: Path) -> None:
    lines = policyc("explain").out.splitlines()
    rules = LINT_RULES | load_program_rules()
    assert [line.split()[0] for line in lines] == list(rules)
    assert all(line.endswith(rules[line.split()[0]].title) for line in lines)


@pytest.mark.parametrize("code", ["shadowed-rule", "syntax-error"])
def test_explain_prints_the_page(code: str) -> None:
    ran = policyc("explain", code)
    assert ran.out.startswith(f"# {code} ({LINT_RULES[code].severity})\n")
    assert LINT_RULES[code].page in ran.out


def test_explain_an_unknown_code() -> None:
    ran = policyc("explain", "shadowed-rul")
    assert "no rule has the code 'shadowed-rul': did you mean 'shadowed-rule'?" in ran.err


def test_explain_everything_is_markdown_of_every_page() -> None:
    out = policyc("explain", "--markdown").out
    assert [line[2:].split()[0] for line in out.splitlines() if line.startswith("# ")][: len(LINT_RULES)]
    assert all(rule.page in out for rule in LINT_RULES.values())


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
    assert "variant no_rht" in policyc("show", "llama_nvfp4", "--variant", "no_rht").out
    without = policyc("show", "llama_nvfp4", "--variant", "no_rht", env={"COLUMNS": "200"}).out
    assert "rht16" not in without


def test_show_a_table_says_when_and_how_many(folder: Path) -> None:
    (folder / "some.policy").write_text("a -> fp8 expect 3\nafter 50% { b @ fprop, c -> bf16 }\n")
    out = policyc("show", "some.policy").out
    assert all(word in out for word in ("expect 3", "after 50%", "of c"))


@pytest.mark.parametrize("name", bundled.bundled_policies())
def test_show_as_text_is_the_policy(name: str) -> None:
    assert parse(policyc("show", name, "--format", "text").out) == load(name)
    for variant in load(name).variants:
        text = policyc("show", name, "--variant", variant.name, "--format", "text").out
        assert parse(text) == load(name).variant(variant.name)


def test_show_as_json() -> None:
    shown = json.loads(policyc("show", "nvfp4_late_switch", "--format", "json").out)
    assert shown["variants"] == ["fp8", "bf16", "switch_all"]
    last = shown["rules"][-1]
    assert last == {
        "selectors": ["* @ fprop"], "where": None, "when": ["after 82%"], "expect": None, "recipe": "bf16",
        "operands": {"fprop.activation": "bf16", "fprop.weight": "bf16"},
    }  # fmt: skip


def test_show_an_unknown_variant_names_the_known_ones() -> None:
    assert "variants: fp8, bf16" in policyc("show", "te_nvfp4", "--variant", "fp9").err


def test_show_a_faulty_policy_says_what_is_wrong(folder: Path) -> None:
    ran = policyc("show", "faulty.policy")
    assert (ran.code, ran.out) == (1, "")
    assert "did you mean 'fp8'?" in ran.err


# ---- help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_in_examples_that_run(name: str) -> None:
    out = policyc(name, "--help").out
    examples = out.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.strip().startswith(f"policyc {name}") for line in examples)
    assert policyc(name, "-h").out == out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_help_names_every_command_and_fits_a_terminal() -> None:
    out = policyc("--help").out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 110


def test_version() -> None:
    assert policyc("--version").out == f"policyc, version {__version__}\n"


# ---- terminals


ESCAPE = "\x1b["


@pytest.mark.parametrize(
    ("env", "coloured"),
    [
        ({}, False), ({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "arguments", ["lint shadowed.policy", "fmt --diff untidy.policy", "explain", "show", "show fp8"]
)
def test_colours(folder: Path, arguments: str, env: dict[str, str], coloured: bool) -> None:
    assert (ESCAPE in policyc(*arguments.split(), env=env).out) is coloured


@pytest.mark.parametrize("form", ["json", "github", "sarif"])
def test_programs_never_get_colours(folder: Path, form: str) -> None:
    assert ESCAPE not in policyc("lint", "shadowed.policy", "--format", form, env={"FORCE_COLOR": "1"}).out


@pytest.mark.parametrize("form", ["full", "json", "sarif"])
def test_an_output_that_is_not_utf_8(folder: Path, form: str) -> None:
    (folder / "caf\u00e9.policy").write_text("\u6df1\u5c64 -> fp9  # " + "\u00e9" * 200, encoding="utf-8")
    ran = run_main("lint", "caf\u00e9.policy", "--format", form, encoding="ascii")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert ran.out
    if form in ("json", "sarif"):
        json.loads(ran.out)


@pytest.mark.parametrize("arguments", ["show fp8", "explain shadowed-rule"])
def test_the_rest_in_an_output_that_is_not_utf_8(arguments: str) -> None:
    ran = run_main(*arguments.split(), encoding="ascii")
    assert (ran.code, "Traceback" in ran.err) == (0, False)


def test_a_process_whose_output_is_not_utf_8(folder: Path) -> None:
    (folder / "caf\u00e9.policy").write_text("\u6df1\u5c64 -> fp9  # " + "\u00e9" * 200, encoding="utf-8")
    ran = spawn("lint", "caf\u00e9.policy", env={"PYTHONIOENCODING": "ascii"})
    assert (ran.code, "Traceback" in ran.err) == (1, False)
    assert "-> fp9" in ran.out


def test_a_character_that_the_output_lacks_is_a_question_mark(folder: Path) -> None:
    (folder / "deep.policy").write_text("\u6df1\u5c64 -> fp9\n", encoding="utf-8")
    assert "?? -> fp9" in run_main("lint", "deep.policy", encoding="latin-1").out


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_name_that_is_not_utf_8(folder: Path, form: str) -> None:
    name = os.fsdecode(b"caf\xe9.policy")
    (folder / name).write_text(FAULTY)
    ran = run_main("lint", name, "--format", form, encoding="utf-8")
    assert ran.code == 1
    if form in ("json", "sarif"):
        json.loads(ran.out)


def test_what_is_hostile_to_a_terminal_is_shown_and_not_obeyed(folder: Path) -> None:
    (folder / "evil.policy").write_text("mlp -> fp9  # \x1b[2J\x1b]0;owned\x07\n")
    ran = policyc("lint", "evil.policy")
    assert "\x1b" not in ran.out
    assert "\\x1b[2J" in ran.out


@pytest.mark.skipif(os.name == "nt", reason="needs a shell with pipes")
@pytest.mark.parametrize(
    "arguments", ["lint many.policy", "explain --markdown", "show many.policy --format text"]
)
def test_a_reader_that_goes_away_is_not_an_error(folder: Path, arguments: str) -> None:
    """What is printed is longer than a pipe holds."""
    recipe = "fp9" if arguments.startswith("lint") else "fp8"
    (folder / "many.policy").write_text("".join(f"a{i}{'x' * 200} -> {recipe}\n" for i in range(600)))
    command = f"{sys.executable} -m policyc.cli.main {arguments} | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, shell=True, capture_output=True, env=env, timeout=120, check=False)
    assert ran.stdout.count(b"\n") == 1
    assert b"Traceback" not in ran.stderr
    assert b"BrokenPipe" not in ran.stderr


def test_from_another_folder_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "my.policy").write_text('import "te_nvfp4"\nlayers[-4:].* -> bf16\n')
    ran = spawn("lint", "my.policy", "llama_nvfp4", cwd=tmp_path)
    assert (ran.code, ran.out, ran.err) == (0, "", "2 policies: no findings\n")
