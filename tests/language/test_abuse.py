"""Hostile input: unreadable files, deep nesting, exponential growth, megabytes, and a fuzzer.

Every input must be answered with a policy or with diagnostics, in a short time.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from policyc import PolicyError, load, parse
from policyc.base import files
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.loader import parse_with_diagnostics
from tests.support import fuzz
from tests.support.audit import recording
from tests.support.processor_time import at_most

pytestmark = pytest.mark.any_jax


def codes(text: str) -> list[str]:
    return [d.code for d in parse_with_diagnostics(text).diagnostics]


def load_error(path) -> str:
    """The message of the error for a file that cannot be read."""
    with pytest.raises(PolicyError) as caught:
        load(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "unreadable-file"
    assert str(caught.value)
    return diagnostic.message


# ---- files


def test_a_file_that_is_not_utf_8_is_reported_with_line_and_byte(tmp_path):
    path = tmp_path / "x.policy"
    path.write_bytes(b"a -> bf16\n# na\xefve\n")
    assert load_error(path) == "line 2 is not UTF-8 (byte 0xef at offset 14)"


def test_a_directory_is_reported(tmp_path):
    assert "directory" in load_error(tmp_path)
    (tmp_path / "x.policy").mkdir()
    assert "directory" in load_error(tmp_path / "x.policy")


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")]
)
def test_an_error_of_the_operating_system_is_reported(tmp_path, monkeypatch, error):
    path = tmp_path / "x.policy"
    path.write_text("a -> bf16\n")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(files, "open_file", refuse)
    assert load_error(path) in ("no permission to read this file", "Input/output error")


@pytest.mark.parametrize("name", ["\0", "a\0b.policy", "x" * 5000, "\udcff", "", " ", ".", ".."])
def test_an_invalid_file_name_is_reported(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_error(name)


@pytest.mark.parametrize("name", ["fifo", "device", "huge"])
def test_only_a_regular_file_of_a_sensible_size_is_read(name, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(2**40)
    expected = "larger than 16 MiB" if name == "huge" else "not a regular file"
    assert load_error(tmp_path / name) == expected


def test_a_byte_order_mark_is_accepted_at_the_start_only(tmp_path):
    path = tmp_path / "x.policy"
    path.write_bytes(b"\xef\xbb\xbfa -> bf16\r\n")
    (rule,) = load(path).rules
    assert (rule.span.line, rule.span.column) == (1, 1)
    assert codes("a -> bf16\n\ufeffb -> bf16") == ["syntax-error"]


@pytest.mark.parametrize("text", ["\0", "a\0 -> bf16", "a -> bf16\0", "a -> bf\x0016", "# \0\0 in a comment"])
def test_a_nul_character_is_accepted_in_comments_only(text):
    assert codes(text) == ([] if text.startswith("#") else ["syntax-error"])


# ---- deep nesting


DEEP = 300
NESTED = {
    "parentheses": "a where " + "(" * DEEP + "weight" + ")" * DEEP + " -> bf16",
    "parentheses left open": "a where " + "(" * DEEP,
    "square brackets": "a" + "[" * DEEP,
    "braces": "{" * DEEP + "a" + "}" * DEEP + " -> bf16",
    "options": "a -> " + "nvfp4(sr=" * DEEP + "grad" + ")" * DEEP,
    "splits": "a -> " + "split(fprop=" * DEEP + "bf16" + ")" * DEEP,
    "splits of two": "a -> " + "split(bwd=" * DEEP + "bf16" + ")" * DEEP,
    "schedules": "after 1 {" * DEEP + "a -> bf16" + "}" * DEEP,
    "schedules on lines": "after 1 {\n" * DEEP + "a -> bf16\n" + "}\n" * DEEP,
    "schedules left open": "after 1 {\n" * DEEP,
    "variants": "variant x {" * DEEP + "}" * DEEP,
    "not": "a where " + "not " * DEEP + "weight -> bf16",
    "not and parentheses": "a where " + "not (" * DEEP + "weight" + ")" * DEEP + " -> bf16",
    "with another error": "x x\na where " + "(" * DEEP + "weight" + ")" * DEEP + " -> bf16",
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_deep_nesting_is_an_error_and_not_a_crash(text):
    reported = codes(text)
    assert "nested-too-deep" in reported
    assert len(reported) <= 2


@pytest.mark.parametrize("deep", [1, 4])
def test_nesting_up_to_the_limit_is_accepted(deep):
    nested = "a -> " + "split(bwd=" * deep + "bf16" + ")" * deep
    assert parse(str(parse(nested))) == parse(nested)
    predicate = "a where " + "(" * 8 * deep + "weight" + ")" * 8 * deep + " -> bf16"
    assert codes(predicate) == []
    blocks = "after 1 {" * 8 * deep + "a -> bf16" + "}" * 8 * deep
    assert len(parse(blocks).rules[0].when) == 8 * deep
    chain = (
        "".join(f"recipe r{i} = r{i + 1}\n" for i in range(7 * deep)) + f"recipe r{7 * deep} = bf16\na -> r0"
    )
    assert parse(str(parse(chain))) == parse(chain)


# ---- exponential growth. The limit is generous: an input that is not cut short takes hours or longer.

MAX_SECONDS = 5.0


def timed_codes(text: str) -> list[str]:
    """The codes of the diagnostics, which must be there within the limit."""
    with at_most(MAX_SECONDS):
        return codes(text)


def test_recipes_that_triple_at_every_level_are_resolved_quickly():
    """Expanded, the last recipe has 3**31 parts."""
    steps = "".join(
        f"recipe a{i} = split(fprop=a{i - 1}, dgrad=a{i - 1}, wgrad=a{i - 1})\n" for i in range(1, 32)
    )
    text = f"recipe a0 = nvfp4(sr=grad)\n{steps}mlp -> a31\nvariant v {{ recipe a0 = fp8 }}\n"
    assert timed_codes(text) == []
    policy = parse(text)
    for edited, rounding in ((policy, "sr"), (policy.variant("v"), "rne")):
        with at_most(MAX_SECONDS):
            assert edited.resolver()(edited.rules[0].recipe).treatments[2].rounding == rounding
    assert parse(str(policy)) == policy


LARGE = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [
        *(f"* where k == {n} -> bf16" for n in (LARGE, "1e999999999", "9" * 18 + "e18", "1_" * 5000 + "1")),
        f"a -> bf16 expect {LARGE}",
        f"a[:{LARGE}%] -> bf16",
        f"after 0.{'0' * 5000}1% {{ a -> bf16 }}",
    ],
)
def test_numbers_that_are_too_large_are_rejected(text):
    assert timed_codes(text) == ["number-out-of-range"]


def test_a_cycle_of_many_recipes_gives_a_short_message():
    text = "".join(f"recipe r{i} = r{(i + 1) % 3000}\n" for i in range(3000))
    assert timed_codes(text) == ["recipe-cycle"]
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert len(str(caught.value)) < 2000


HALF = 50_000
LONG_TEXTS = {
    "a name": "a" * 2 * HALF,
    "spaces": " " * 2 * HALF,
    "stars": "*" * 2 * HALF,
    "mixed quotes": "'\"" * HALF,
    "a string left open": 'import "' + "x" * 2 * HALF,
    "brackets": "(" * 2 * HALF,
    "braces": "{" * 2 * HALF,
    "closing braces": "}" * (HALF // 10),
    "arrows": "->" * HALF,
    "spaces and line ends": "   \t \n" * (HALF // 3),
    "not UTF-8 in spirit": "\ud800" * HALF,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_long_text_of_one_token_takes_little_time_and_a_short_message(text):
    with at_most(60):
        diagnostics = parse_with_diagnostics(text).diagnostics
        if diagnostics:
            assert len(str(PolicyError(diagnostics))) < 100_000


# ---- the fuzzer


def only_policies_opened(opened: list[str], folder: Path) -> bool:
    """Were only policies opened, bundled or beside the input, and the grammar?"""
    folders = tuple(map(str, (data_folder("policies"), data_folder("grammars"), folder)))
    return all(p.endswith((".policy", "policy.lark")) and p.startswith(folders) for p in opened)


@pytest.mark.slow
def test_the_properties_hold_for_a_thousand_mutated_policies(tmp_path):
    for name in bundled_policies():
        load(name)  # so that imports and compilation on first use are not recorded
    (tmp_path / "fuzz_self.policy").write_text("a -> bf16\n")
    fuzz.run(0, 50, tmp_path)
    with recording() as audit:
        valid = fuzz.run(0, 1_000, tmp_path)
    assert audit.ran == []
    assert only_policies_opened(audit.opened, tmp_path)
    assert 50 < valid < 800  # otherwise the mutations change too much, or too little


def test_the_record_contains_files_and_executed_code(tmp_path):
    """Opened files and executed code must appear in the record that the tests above rely on."""
    with recording() as audit:
        (tmp_path / "x").write_text("")
        compile("1", "<test>", "eval")
    assert audit.opened == [str(tmp_path / "x")]
    assert [event.split()[0] for event in audit.ran] == ["compile"]
    assert not only_policies_opened(audit.opened, tmp_path)
