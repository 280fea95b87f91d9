"""One limit on the size of a file, one on depth; and how long policies as long as a search writes them take."""

from __future__ import annotations

import os
from functools import partial

import pytest
from hypothesis import given, settings

from policyc import PolicyError, load, parse
from policyc.base import files
from policyc.language.diagnostics import SourceText
from policyc.language.formatter import format_text
from policyc.language.loader import parse_with_diagnostics
from policyc.language.parser import MAX_DEPTH, read_statements
from policyc.language.selectors import glob_matches
from policyc.linter.api import lint_loaded
from tests.support.processor_time import at_most
from tests.support.strategies import damaged_texts

pytestmark = pytest.mark.any_jax

slow = partial(pytest.param, marks=pytest.mark.slow)
SECONDS = 60  # of processor time: what is meant is a few, and hours where time grows with the square


def codes(text: str) -> list[str]:
    return [d.code for d in parse_with_diagnostics(text).diagnostics]


# ---- files


def load_error(path) -> str:
    """The message of the error for a file that cannot be read."""
    with pytest.raises(PolicyError) as caught:
        load(path)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "unreadable-file"
    return diagnostic.message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fifo", "not a regular file"),
        ("device", "not a regular file"),
        ("huge", "larger than 16 MiB"),
        (".", "this is a directory, not a policy"),
        ("latin", "line 2 is not UTF-8 (byte 0xef at offset 14)"),
        ("a\0b.policy", "no such file, and no bundled policy of that name"),
    ],
)
def test_only_a_regular_file_of_a_sensible_size_is_read(name, expected, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "latin").write_bytes(b"a -> bf16\n# na\xefve\n")
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(2**40)
    assert expected in load_error(tmp_path / name)


@pytest.mark.parametrize("name", ["\0", "x" * 5000, "\udcff", "", " ", ".", ".."])
def test_an_invalid_file_name_is_reported(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_error(name)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError(13, "Permission denied"), "no permission to read this file"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_an_error_of_the_operating_system_is_reported(tmp_path, monkeypatch, error, expected):
    path = tmp_path / "x.policy"
    path.write_text("a -> bf16\n")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(files, "open_file", refuse)
    assert load_error(path) == expected


def test_a_byte_order_mark_is_accepted_at_the_start_only(tmp_path):
    path = tmp_path / "x.policy"
    path.write_bytes(b"\xef\xbb\xbfa -> bf16\r\n")
    (rule,) = load(path).rules
    assert (rule.span.line, rule.span.column) == (1, 1)
    assert codes("a -> bf16\n\ufeffb -> bf16") == ["syntax-error"]


# ---- depth


def nest(depth: int) -> dict[str, str]:
    """Policies nested to a depth."""
    return {
        "parentheses": "a where " + "(" * depth + "weight" + ")" * depth + " -> bf16",
        "splits": "a -> " + "split(fprop=" * depth + "bf16" + ")" * depth,
        "schedules": "after 1 {" * depth + "a -> bf16" + "}" * depth,
        "schedules on lines": "after 1 {\n" * depth + "a -> bf16\n" + "}\n" * depth,
        "not": "a where " + "not " * depth + "weight -> bf16",
        "chain": "".join(f"recipe r{i} = r{i + 1}\n" for i in range(1, depth)) + f"recipe r{depth} = bf16\n",
    }


@pytest.mark.parametrize("kind", nest(1))
def test_everything_nests_to_one_depth(kind):
    with at_most(SECONDS):
        assert codes(nest(MAX_DEPTH)[kind]) == []
        policy = parse(nest(MAX_DEPTH)[kind])
        assert parse(str(policy)) == policy
        assert codes(nest(MAX_DEPTH + 1)[kind]) == ["nested-too-deep"]
        assert codes(nest(3000)[kind]) == ["nested-too-deep"]


def test_imports_nest_to_the_same_depth(write):
    folder = write(
        **{f"n{i}": f'import "n{i + 1}"' for i in range(MAX_DEPTH + 1)}, **{f"n{MAX_DEPTH + 1}": "a -> bf16"}
    )
    assert len(load(folder / "n1.policy").rules) == 1
    with pytest.raises(PolicyError, match="nested-too-deep"):
        load(folder / "n0.policy")


def test_brackets_that_are_never_closed_are_errors():
    for text in ("a where " + "(" * 300, "a" + "[" * 300, "{" * 300, "after 1 {\n" * 300):
        assert set(codes(text)) <= {"syntax-error", "nested-too-deep"}


# ---- time


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"layers[{i}].mlp.up{i}x where k % 16 == 0 and n > {i} -> fp8\n" for i in range(5000)),
        slow("".join(f"layers[{i}].mlp.* => bf16\n" for i in range(5000))),
        slow("".join(f"recipe r{i} = fp8\na{i}x -> r{i}\n" for i in range(2500))),
        slow("a -> nvfp4(sr=grad\n" * 5000),
        f"group g = {', '.join(f'a{i}' for i in range(5000))}\ng -> fp8\n",
    ],
    ids=["rules", "errors", "recipes", "open brackets", "a group"],
)
def test_five_thousand_statements_take_seconds(text):
    with at_most(SECONDS):
        loaded = parse_with_diagnostics(text)
        assert format_text(text) is None or not loaded.diagnostics
        str(PolicyError(loaded.diagnostics))


def test_a_pattern_of_a_kilobyte_is_matched_in_seconds():
    with at_most(SECONDS):
        assert not glob_matches("a*" * 500 + "b", "a" * 5000)
        for selector in (f"*{'a*' * 500}", ".".join(["*", "a"] * 250), "a?" * 500, "{a,b}" * 10 + "c" * 900):
            lint_loaded(parse_with_diagnostics(f"{selector} -> fp8\nmlp.{selector} -> bf16\n"))


def test_a_split_of_both_backward_products_doubles_at_every_level():
    policy = parse("a -> " + "split(bwd=" * MAX_DEPTH + "fp8" + ")" * MAX_DEPTH)
    with at_most(SECONDS):
        assert policy.resolver()(policy.rules[0].recipe).treatments[0].format == "keep"


def test_recipes_that_triple_at_every_level_are_resolved_once():
    """Expanded, the last recipe has 3**15 parts."""
    steps = "".join(
        f"recipe a{i} = split(fprop=a{i - 1}, dgrad=a{i - 1}, wgrad=a{i - 1})\n" for i in range(1, MAX_DEPTH)
    )
    policy = parse(f"recipe a0 = nvfp4(sr=grad)\n{steps}mlp -> a{MAX_DEPTH - 1}\n")
    with at_most(SECONDS):
        assert policy.resolver()(policy.rules[0].recipe).treatments[2].rounding == "sr"


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
def test_a_number_that_is_too_large_is_rejected(text):
    assert codes(text) == ["number-out-of-range"]


HALF = 50_000


@pytest.mark.parametrize(
    "text",
    [
        "a" * 2 * HALF,
        " " * 2 * HALF,
        "*" * 2 * HALF,
        "'\"" * HALF,
        'import "' + "x" * 2 * HALF,
        "(" * 2 * HALF,
        "{" * 2 * HALF,
        "}" * (HALF // 10),
        "->" * HALF,
        "   \t \n" * (HALF // 3),
    ],
    ids=lambda text: text[:12],
)
def test_a_text_of_one_long_token_takes_seconds_and_a_short_message(text):
    with at_most(SECONDS):
        diagnostics = parse_with_diagnostics(text).diagnostics
        assert len(str(PolicyError(diagnostics))) < 100_000


# ---- any text


@given(damaged_texts())
@settings(max_examples=60)
def test_any_text_is_a_policy_or_has_diagnostics(text):
    loaded = parse_with_diagnostics(text)
    for diagnostic in loaded.diagnostics:
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(diagnostic.span.source.text)
        assert diagnostic.message
    assert all(line.isprintable() for line in str(PolicyError(loaded.diagnostics)).split("\n"))
    if not loaded.diagnostics:
        assert parse(str(loaded.policy)) == loaded.policy
    file, errors = read_statements(SourceText(text))
    formatted = format_text(text)
    assert (formatted is None) == bool(errors)
    if formatted is not None:
        again, errors = read_statements(SourceText(formatted))
        assert not errors
        assert again.statements == file.statements
        assert format_text(formatted) == formatted
