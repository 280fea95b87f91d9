"""Groups of selectors: what they stand for, and where they cannot stand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policyc import parse
from policyc.language.formatter import format_text
from policyc.language.loader import parse_with_diagnostics
from policyc.language.recipes import GEMM_GROUPS
from tests.support.strategies import ALL, products, selector_lists

pytestmark = pytest.mark.any_jax


@given(selector_lists, products, st.booleans())
@settings(max_examples=100)
def test_a_group_stands_for_its_selectors(selectors, taken, defined_first):
    """The policy with the group is that with its selectors, each with the products of the group's use."""
    members = tuple(replace(s, products=ALL) for s in selectors)
    assume(not {str(member) for member in members} & GEMM_GROUPS.keys())
    use = "zz_group" if taken == ALL else f"zz_group @ {','.join(sorted(taken))}"
    definition = f"group zz_group = {', '.join(map(str, members))}"
    rule = f"xx, {use} where mlp -> fp8"
    policy = parse(f"{definition}\n{rule}" if defined_first else f"{rule}\n{definition}")
    (first, *rest) = policy.rules[0].selectors
    assert str(first) == "xx"
    assert rest == [replace(s, products=taken) for s in members]
    assert parse(str(policy)) == policy


@pytest.mark.parametrize("word", sorted(GEMM_GROUPS))
def test_a_group_has_no_selector_that_reads_as_a_product(word):
    """`a @ fprop, wgrad` takes two products of one selector."""
    (diagnostic,) = parse_with_diagnostics(f"group g = a, {word}\ng @ fprop -> fp8").diagnostics
    assert (diagnostic.code, diagnostic.help) == ("reserved-name", f"write {word}.*")
    policy = parse(f"group g = a, {word}.*\ng @ fprop -> fp8")
    assert parse(str(policy)) == policy


@pytest.mark.parametrize("text", ["group -> bf16", "group.a, group -> bf16", "a.group @ wgrad -> bf16"])
def test_a_scope_may_be_named_group(text):
    assert str(parse(text)) == f"{text}\n"


def test_a_group_is_formatted_and_keeps_its_name():
    loaded = parse_with_diagnostics("group  g={q , k}_proj ,layers[ -4: ].mlp # c\n g@wgrad->fp8")
    assert (
        format_text(loaded.file.source.text)
        == "group g = {q,k}_proj, layers[-4:].mlp  # c\ng @ wgrad -> fp8\n"
    )
    loaded = parse_with_diagnostics("a->fp8\nvariant v {group  g=a,b;g->bf16}")
    assert format_text(loaded.file.source.text) == "a -> fp8\nvariant v { group g = a, b; g -> bf16 }\n"
