"""The policy as data: variants, printing, hashing, and comparisons that ignore spans."""

from __future__ import annotations

import dataclasses

import pytest

from policyc import PolicyError, load, parse
from policyc.language.policy import Policy

pytestmark = pytest.mark.any_jax

# ---- variants


def test_the_name_of_a_policy_is_that_of_its_file_and_variant(tmp_path):
    path = tmp_path / "mine.policy"
    path.write_text("x -> fp8; variant v { y -> bf16 }")
    assert load(path).name == "mine"
    assert load(path).variant("v").name == "mine, variant v"
    assert load("llama_nvfp4").with_seed(1).name == "llama_nvfp4"
    assert parse("x -> fp8").name == "<policy>"
    assert load(path) == parse(path.read_text())  # a name does not identify it


@pytest.mark.parametrize(
    ("text", "known"), [("variant a {}; variant b {}", "variants: a, b"), ("", "variants: none")]
)
def test_an_unknown_variant_is_an_error_with_the_known_names(text, known):
    with pytest.raises(PolicyError, match=rf"no variant named 'c'(.|\n)*{known}"):
        parse(text).variant("c")


# ---- printing, hashing, imports


def test_policies_are_hashable_and_immutable():
    """The hashes of drawn policies are compared in test_parser.py, which prints and parses them anyway."""
    policy = parse("recipe a = fp8; ^x[-15%:] where k % 16 != 0 -> a; variant v { after 5 { y -> bf16 } }")
    assert len({policy, parse(str(policy))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules = ()


def test_spans_are_not_compared():
    assert parse("a -> bf16") == parse("\n\n   a   ->  bf16   # comment")
    assert parse("a -> bf16") != parse("a -> fp8")
    assert repr(parse("a -> bf16")) == repr(parse("\n a -> bf16"))
    assert Policy() == parse("")


def test_the_sha256_depends_on_the_meaning_and_not_on_the_text():
    policy = parse("recipe r = fp8; a -> r")
    assert policy.sha256 == parse("recipe r = fp8  # why\n\n  a  ->  r").sha256
    assert policy.sha256 != parse("recipe r = bf16; a -> r").sha256
    assert load("bf16").sha256 == parse('import "bf16"').sha256
    assert len(bytes.fromhex(policy.sha256)) == 32


# ---- seeds


@pytest.mark.parametrize("text", ["seed = 7", "seed=7", "seed =\n7", "seed = 0_7;", "seed = 7  # why"])
def test_the_seed_is_read_and_printed(text):
    policy = parse(f"{text}\n* -> nvfp4(sr=grad)")
    assert policy.seed == 7
    assert str(policy) == "seed = 7\n* -> nvfp4(sr=grad)\n"


@pytest.mark.parametrize("text", ["seed -> bf16", "seed.mlp -> bf16", "seed, x -> bf16", "*.seed[0] -> bf16"])
def test_a_scope_may_be_called_seed(text):
    policy = parse(text)
    assert (len(policy.rules), policy.seed) == (1, 0)


def test_a_variant_and_the_importing_file_override_the_seed(write):
    policy = parse("seed = 1\n* -> bf16\nvariant b { seed = 2 }\nvariant c { * -> fp8 }")
    assert (policy.variant("b").seed, policy.variant("c").seed) == (2, 1)
    folder = write(base="seed = 1\n* -> bf16", main='import "base"', other='import "base"; seed = 2')
    assert load(folder / "main.policy").seed == 1
    assert load(folder / "other.policy").seed == 2


def test_a_seed_has_32_bits_and_is_part_of_the_hash():
    assert parse("seed = 4294967295").seed == 2**32 - 1
    policy = parse("* -> bf16")
    assert policy.with_seed(3) == parse("seed = 3\n* -> bf16")
    assert policy.with_seed(3).sha256 != policy.sha256
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="not a number from 0 to 4294967295"):
            policy.with_seed(seed)
