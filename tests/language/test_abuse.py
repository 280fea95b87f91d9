"""Hostile input: files that are none, nests, bombs, megabytes, and a fuzzer. Always an answer, and soon."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from policyc import PolicyError, load, parse
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.loader import parse_with_diagnostics
from tests.support import fuzz
from tests.support.audit import recording


def codes(text: str) -> list[str]:
    return [d.code for d in parse_with_diagnostics(text).diagnostics]


def fault(path) -> str:
    with pytest.raises(PolicyError) as caught:
        load(path)
    (found,) = caught.value.diagnostics
    assert found.code == "unreadable-file"
    assert str(caught.value)
    return found.message


# ---- files


def test_a_file_that_is_not_utf_8(tmp_path):
    path = tmp_path / "x.policy"
    path.write_bytes(b"a -> bf16\n# na\xefve\n")
    assert fault(path) == "line 2 is not UTF-8 (byte 0xef at offset 14)"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_in_another_unicode(tmp_path, encoding):
    path = tmp_path / "x.policy"
    path.write_text("a -> bf16\n", encoding=encoding)
    assert "not UTF-8" in fault(path)


def test_a_directory(tmp_path):
    assert "directory" in fault(tmp_path)
    (tmp_path / "x.policy").mkdir()
    assert "directory" in fault(tmp_path / "x.policy")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "x.policy"
    path.write_text("a -> bf16\n")
    path.chmod(0)
    assert "permission" in fault(path)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")]
)
def test_a_file_that_the_system_refuses(tmp_path, monkeypatch, error):
    path = tmp_path / "x.policy"
    path.write_text("a -> bf16\n")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    assert fault(path) in ("no permission to read this file", "Input/output error")


@pytest.mark.parametrize("name", ["\0", "a\0b.policy", "x" * 5000, "\udcff", "", " ", ".", ".."])
def test_a_name_that_no_file_has(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fault(name)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path):
    path = tmp_path / "x.policy"
    with path.open("wb") as stream:
        stream.truncate(2**34)  # 16 GiB on paper, nothing on the disk
    assert "larger than 16 MiB" in fault(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
def test_a_file_without_end():
    assert "larger than 16 MiB" in fault("/dev/zero")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "x.policy"
    path.write_bytes(b"\xef\xbb\xbfa -> bf16\r\n")
    (rule,) = load(path).rules
    assert (rule.span.line, rule.span.column) == (1, 1)
    assert codes("a -> bf16\n\ufeffb -> bf16") == ["syntax-error"]


@pytest.mark.parametrize("text", ["\0", "a\0 -> bf16", "a -> bf16\0", "a -> bf\x0016", "# \0\0 in a comment"])
def test_nul(text):
    assert codes(text) == ([] if text.startswith("#") else ["syntax-error"])


# ---- nests


DEEP = 300
NESTS = {
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
    "with a fault beside": "x x\na where " + "(" * DEEP + "weight" + ")" * DEEP + " -> bf16",
}


@pytest.mark.parametrize("text", NESTS.values(), ids=NESTS)
def test_a_deep_nest_is_a_fault_and_not_a_crash(text):
    found = codes(text)
    assert "nested-too-deep" in found
    assert len(found) <= 2


def test_a_long_chain_of_recipes_is_a_fault():
    chain = "".join(f"recipe r{i} = r{i + 1}\n" for i in range(DEEP)) + f"recipe r{DEEP} = bf16\n"
    assert set(codes(chain)) == {"nested-too-deep"}


@pytest.mark.parametrize("deep", [1, 4])
def test_what_is_not_too_deep(deep):
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


# ---- bombs. The bounds are generous: what they keep out takes hours, or the age of the universe.

SOON = 5.0


def timed(text: str) -> list[str]:
    with fuzz.alarm(20 * SOON):
        start = time.process_time()
        found = codes(text)
        assert time.process_time() - start < SOON
    return found


def test_recipes_that_triple_at_every_level():
    """Written out, the last one has 3**31 parts."""
    steps = "".join(
        f"recipe a{i} = split(fprop=a{i - 1}, dgrad=a{i - 1}, wgrad=a{i - 1})\n" for i in range(1, 32)
    )
    text = f"recipe a0 = nvfp4(sr=grad)\n{steps}mlp -> a31\nvariant v {{ recipe a0 = fp8 }}\n"
    assert timed(text) == []
    policy = parse(text)
    for edited, rounding in ((policy, "sr"), (policy.variant("v"), "rne")):
        start = time.perf_counter()
        assert edited.resolver()(edited.rules[0].recipe).treatments[2].rounding == rounding
        assert time.perf_counter() - start < SOON
    assert parse(str(policy)) == policy


def test_splits_that_double_at_every_level():
    assert timed("a -> " + "split(bwd=" * 31 + "bf16" + ")" * 31) == ["nested-too-deep"]


@pytest.mark.parametrize(
    "number",
    ["9" * 5000, "1e999999999", "1E99", "9" * 18 + "e18", "1_" * 5000 + "1", "0." + "0" * 5000 + "1"],
)
def test_numbers_that_are_too_large(number):
    assert timed(f"* where k == {number} -> bf16") == ["number-out-of-range"]


@pytest.mark.parametrize(
    "text",
    [
        f"a -> bf16 expect {'9' * 5000}",
        f"a[{'9' * 5000}] -> bf16",
        f"a[:{'9' * 5000}%] -> bf16",
        f"after {'9' * 5000} {{ a -> bf16 }}",
        f"after 0.{'0' * 5000}1% {{ a -> bf16 }}",
    ],
    ids=["expect", "index", "percent", "step", "decimals"],
)
def test_numbers_that_are_too_large_elsewhere(text):
    assert timed(text) == ["number-out-of-range"]


@pytest.mark.parametrize("ratio", ["9" * 5000, "1/0", "1/" + "9" * 5000, "1" + "/1" * 50, "1.5.5", "1e5"])
def test_ratios_that_are_none(ratio):
    assert timed(f"a -> nvfp4(sr_headroom={ratio})") == ["unknown-value"]


def test_braces_that_multiply():
    assert timed("{a,b,c,d}" * 50 + " -> bf16") == ["too-many-alternatives"]
    assert timed("{" + "a," * 5000 + "b} -> bf16") == ["too-many-alternatives"]
    assert timed("{a,b}" * 10 + " -> bf16") == []


def test_a_circle_of_many_recipes():
    text = "".join(f"recipe r{i} = r{(i + 1) % 3000}\n" for i in range(3000))
    assert timed(text) == ["recipe-cycle"]
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert len(str(caught.value)) < 2000


def test_many_variants_of_many_recipes():
    """Each variant goes through all the recipes: 1,000 times 2,000 of them, if nobody stops it."""
    leaf = "recipe r{0} = bf16\n"
    fork = "recipe r{0} = split(fprop=r{1}, dgrad=r{2}, wgrad=r{3})\n"
    tree = "".join(
        (fork if 3 * i + 3 < 2000 else leaf).format(i, *range(3 * i + 1, 3 * i + 4)) for i in range(2000)
    )
    few, many = ("".join(f"variant v{i} {{ recipe x = r0 }}\n" for i in range(n)) for n in (5, 1000))
    assert timed(tree + few) == []
    assert timed(tree + many) == ["nested-too-deep"]


def test_many_unknown_names_among_many_known_ones():
    known = "".join(f"recipe name{i:04} = bf16\n" for i in range(1000))
    wrong = "".join(f"a -> nbme{i:04}\n" for i in range(1000))
    assert set(timed(known + wrong)) == {"unknown-recipe"}


HALF = 500_000
MEGABYTES = {
    "a name": "a" * 2 * HALF,
    "spaces": " " * 2 * HALF,
    "empty lines": "\n" * 2 * HALF,
    "semicolons": ";" * 2 * HALF,
    "a comment": "#" * 2 * HALF,
    "stars": "*" * 2 * HALF,
    "dashes": "-" * 2 * HALF,
    "quotes": "'" * 2 * HALF,
    "mixed quotes": "'\"" * HALF,
    "a string left open": 'import "' + "x" * 2 * HALF,
    "brackets": "(" * 2 * HALF,
    "pairs of brackets": "()" * HALF,
    "braces": "{" * 2 * HALF,
    "closing braces": "}" * (HALF // 10),
    "arrows": "->" * HALF,
    "commas": "," * 2 * HALF,
    "one wrong recipe": "a -> " + "x" * 2 * HALF,
    "spaces and line ends": "   \t \n" * (HALF // 3),
    "not UTF-8 in spirit": "\ud800" * HALF,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", MEGABYTES.values(), ids=MEGABYTES)
def test_a_megabyte_of_one_thing(text):
    with fuzz.alarm(60):
        found = parse_with_diagnostics(text).diagnostics
        if found:
            assert len(str(PolicyError(found))) < 100_000


# ---- linear


SHAPES = (
    "decoder.layers[{few}:].mlp.{{gate,up,down}}_proj @ wgrad where k % 16 == 0 and m >= {i} -> nv\n",
    "layers[-{few}%:].scope_{i}.* -> split(fprop=nvfp4(scale=four_over_six), bwd=bf16) expect {i}\n",
    "after {few}% {{ block_{i}.attention.* @ fprop, dgrad -> fp8(grad=e4m3) }}  # number {i}\n",
    "^encoder.name_{i}.* where not (weight or n < {i}) -> nvfp4(rht=wgrad, sr=grad, mean_split)\n",
)


def rules(count: int) -> str:
    """Rules of many shapes, about ninety bytes each: twelve thousand are a megabyte."""
    chance = random.Random(count)
    chosen = (chance.choice(SHAPES).format(i=i, few=i % 50) for i in range(count))
    return "".join(["recipe nv = nvfp4(rht=wgrad, sr=grad, scale2d=weights)\n", *chosen])


def seconds(text: str) -> float:
    start = time.process_time()  # the time of this process alone: others may be at work
    parse_with_diagnostics(text)
    return time.process_time() - start


def wrong(count: int) -> str:
    return "".join(f"decoder.layers[{i}].mlp.* => bf16\n" for i in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("make", [rules, wrong], ids=["sound", "faulty"])
def test_ten_thousand_rules_take_four_times_as_long_as_a_quarter_of_them(make):
    """Linear is a ratio of 4, quadratic one of 16: 8 is halfway between them, on a scale of ratios.

    A hiccup does not count: where the large one takes too long, it is tried once more.
    """
    parse_with_diagnostics(make(100))
    small = min(seconds(make(2_500)) for _ in range(2))
    assert any(seconds(make(10_000)) / small < 8 for _ in range(2))


@pytest.mark.slow
def test_a_megabyte_of_rules_means_what_it_says():
    text = rules(12_000)
    assert len(text) > 2**20
    policy = parse(text)
    assert len(policy.rules) == 12_000
    assert parse(str(policy)) == policy


# ---- the fuzzer


def allowed(opened: list[str], home: Path) -> bool:
    """Only policies, and only bundled ones or those beside the input; and the grammar."""
    places = tuple(map(str, (data_folder("policies"), data_folder("grammars"), home)))
    return all(p.endswith((".policy", "policy.lark")) and p.startswith(places) for p in opened)


def fuzzed(seed: int, count: int, home: Path) -> None:
    for name in bundled_policies():
        load(name)  # what is imported or compiled on first use is no deed of the input's
    (home / "fuzz_self.policy").write_text("a -> bf16\n")
    fuzz.run(seed, 50, home)
    with recording() as audit:
        sound = fuzz.run(seed, count, home)
    assert audit.ran == []
    assert allowed(audit.opened, home)
    assert 0.05 < sound / count < 0.8  # else the mutations are too wild, or too tame, to find anything


def test_two_thousand_mutated_policies(tmp_path):
    fuzzed(0, 2_000, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_hundred_thousand_mutated_policies(seed, tmp_path):
    """Twenty shares of five thousand, so that they can run side by side."""
    fuzzed(seed, 5_000, tmp_path)


def test_the_fuzzer_sees_what_is_wrong(tmp_path, monkeypatch):
    """A checker that finds nothing might not be looking."""
    monkeypatch.setattr(fuzz, "format_file", lambda file: file.source.text + "\nx -> bf16\n")
    with pytest.raises(AssertionError, match=r"seed 0, input \d+"):
        fuzz.run(0, 200, tmp_path)


def test_the_fuzzer_sees_a_hang(tmp_path, monkeypatch):
    def hang(text, data_folder):
        while True:
            pass

    monkeypatch.setattr(fuzz, "SLOWEST", 0.02)
    monkeypatch.setattr(fuzz, "check", hang)
    with pytest.raises(AssertionError, match="TooSlow"):
        fuzz.run(0, 1, tmp_path)


def test_the_record_sees_files_and_processes(tmp_path):
    """As above, for the record of what is opened and run."""
    with recording() as audit:
        (tmp_path / "x").write_text("")
        compile("1", "<test>", "eval")
    assert audit.opened == [str(tmp_path / "x")]
    assert [event.split()[0] for event in audit.ran] == ["compile"]
    assert not allowed(audit.opened, tmp_path)
