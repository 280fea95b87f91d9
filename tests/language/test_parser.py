"""The parser: all spellings, the spans of nodes, and the diagnostics of invalid texts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from policyc import parse
from policyc.language.bounds import Bound
from policyc.language.diagnostics import PolicyError, SourceText
from policyc.language.loader import parse_with_diagnostics
from policyc.language.parser import BlockStatement, read_statements
from policyc.language.policy import RecipeCall, RecipeDef, Rule, Seed, Setting, SplitRecipe
from policyc.language.predicates import AllOf, AnyOf, Comparison, Flag, Not, Term
from policyc.language.recipes import Gemm
from policyc.language.schedule import StepCondition
from policyc.language.selectors import Indices, Selector, SelectorSegment, is_index
from tests.support.strategies import texts

pytestmark = pytest.mark.any_jax

FPROP, DGRAD, WGRAD = Gemm
NV = RecipeCall(
    name="nvfp4",
    settings=(
        Setting(name="rht", values=("wgrad",)),
        Setting(name="sr", values=("grad",)),
        Setting(name="scale2d", values=("weights",)),
    ),
)


def selector(*globs: str, **more) -> Selector:
    return Selector(segments=tuple(SelectorSegment(glob=g) for g in globs), **more)


def rule(*selectors: Selector, to: str | RecipeCall | SplitRecipe = "bf16", **more) -> Rule:
    return Rule(selectors=selectors, recipe=RecipeCall(name=to) if isinstance(to, str) else to, **more)


def only(text: str) -> Rule:
    (parsed,) = parse(text).rules
    return parsed


# ---- valid texts


EVERY_STATEMENT = """\
# llama.policy: NVIDIA's NVFP4 pretraining recipe
mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights); attention.* -> bf16

import "te_nvfp4.policy"                       # its rules first, then ours
recipe nv = nvfp4(rht=wgrad, sr=grad, scale2d=weights)

*                          -> bf16             # everything...
mlp.*                      -> nv   expect 96   # ...but the MLPs: and there must be 96 of them
layers[-4:].mlp.*          -> bf16             # the last four blocks, even inside a scan
{q,k,v}_proj @ wgrad       -> fp8              # one product of the three
* where k % 16 != 0        -> bf16
after 82% { mlp.* @ fprop  -> bf16 }           # the paper's late switch

variant no_rht { recipe nv = nvfp4(sr=grad, scale2d=weights) }
variant bf16   { * -> bf16 }
"""


def test_a_policy_with_every_kind_of_statement():
    policy = parse(EVERY_STATEMENT)
    first, last = policy.rules[:2], policy.rules[-6:]
    assert first == (rule(selector("mlp", "*"), to=NV), rule(selector("attention", "*")))
    layers = SelectorSegment(glob="layers", indices=Indices(start=Bound(Fraction(-4))))
    not_divisible = Comparison(terms=(Term(value="k", modulus=16), Term(value=0)), operators=("!=",))
    assert last == (
        rule(selector("*")),
        rule(selector("mlp", "*"), to="nv", expect=96),
        rule(Selector(segments=(layers, SelectorSegment(glob="mlp"), SelectorSegment(glob="*")))),
        rule(selector("{q,k,v}_proj", products=frozenset({WGRAD})), to="fp8"),
        rule(selector("*"), where=not_divisible),
        rule(
            selector("mlp", "*", products=frozenset({FPROP})),
            when=(StepCondition(kind="after", bound=Bound(Fraction(82), True)),),
        ),
    )
    imported = policy.rules[2:-6]
    assert imported == parse('import "te_nvfp4"').rules
    assert policy.recipes == (RecipeDef(name="nv", recipe=NV),)
    # te_nvfp4 has variants fp8 and bf16. The variant bf16 of this policy replaces the second.
    by_name = {v.name: v for v in policy.variants}
    assert set(by_name) == {"no_rht", "bf16", "fp8"}
    without = RecipeCall(name="nvfp4", settings=NV.settings[1:])
    assert by_name["no_rht"].recipes == (RecipeDef(name="nv", recipe=without),)
    assert by_name["bf16"].rules == (rule(selector("*")),)


@given(texts())
@settings(max_examples=30)
def test_every_spelling_of_a_policy_and_what_it_prints_parse_to_it(drawn):
    policy, text, _ = drawn
    assert parse(text) == policy
    again = parse(str(policy))
    assert again == policy
    assert hash(again) == hash(policy)


WEIGHT = Flag(name="weight")


@pytest.mark.parametrize(
    "second", ["wgrad.*", "^wgrad", "wgrad[0]", "wgrad_x", "wgrad-x", "{wgrad}", "wgrads"]
)
def test_a_name_that_only_starts_like_a_product_is_a_selector(second):
    first, other = only(f"a @ fprop, {second} -> bf16").selectors
    assert first == selector("a", products=frozenset({FPROP}))
    assert other.products == frozenset(Gemm)


@pytest.mark.parametrize("word", ["import", "recipe", "after", "until", "variant"])
@pytest.mark.parametrize("more", [".*", ".x", "[0]", "_x", "-x", "*", "{a,b}", "?", "~"])
def test_a_selector_may_start_with_a_keyword(word, more):
    assert str(only(f"{word}{more} -> bf16").selectors[0]) == f"{word}{more}"


@pytest.mark.parametrize("word", ["import", "recipe", "after", "until", "variant"])
def test_a_lone_keyword_is_a_selector_only_where_no_statement_starts(word):
    assert only(f"a, {word} -> bf16").selectors[1] == selector(word)
    assert only(f"^{word} -> bf16").selectors[0] == selector(word, anchored=True)
    for arrow in (" -> ", "->"):  # with and without spaces, because a printed policy must parse to the same
        with pytest.raises(PolicyError):
            parse(f"{word}{arrow}bf16")


@pytest.mark.parametrize("word", ["where", "expect", "and", "or", "not", "fprop", "weight", "k"])
def test_other_words_of_the_language_are_valid_names(word):
    text = f"recipe {word} = bf16; {word}, {word}.{word} where weight -> {word} expect 1"
    assert only(text) == rule(selector(word), selector(word, word), to=word, where=WEIGHT, expect=1)


@pytest.mark.parametrize("text", ["a -> bf16\nexpect 1", "a\nwhere weight -> bf16", "a -> nvfp4\n(sr=grad)"])
def test_line_breaks_that_end_a_statement(text):
    with pytest.raises(PolicyError):
        parse(text)


def test_a_hash_in_a_string_is_no_comment_and_a_quote_in_a_comment_no_string():
    text = """import "it's#1" # don't "quote" me\nimport 'say "#"' # '\n#"x"#\n"""
    file, _ = read_statements(SourceText(text))
    assert [comment.text for comment in file.comments] == ['# don\'t "quote" me', "# '", '#"x"#']


# ---- spans


def reparse(node, text: str):
    """Parses the text of a node inside the smallest policy that can contain it."""
    match node:
        case Rule():
            return parse_with_diagnostics(text).policy.rules[0]
        case Seed():
            return parse_with_diagnostics(text).policy.seed_statement
        case RecipeDef():
            return parse_with_diagnostics(text).policy.recipes[0]
        case Selector():
            return parse_with_diagnostics(f"zz, {text} -> keep").policy.rules[0].selectors[1]
        case SelectorSegment():
            return parse_with_diagnostics(f"zz.{text} -> keep").policy.rules[0].selectors[0].segments[1]
        case Indices():
            return (
                parse_with_diagnostics(f"zz{text} -> keep").policy.rules[0].selectors[0].segments[0].indices
            )
        case Bound():
            return (
                parse_with_diagnostics(f"zz[{text}:] -> keep")
                .policy.rules[0]
                .selectors[0]
                .segments[0]
                .indices.start
            )
        case StepCondition():
            return parse_with_diagnostics(f"{text} {{ zz -> keep }}").policy.rules[0].when[0]
        case Comparison() | Flag() | Not() | AllOf() | AnyOf():
            return parse_with_diagnostics(f"zz where ({text}) -> keep").policy.rules[0].where
        case Term():
            other = "layer >=" if isinstance(node.value, Bound) else "1 =="
            return parse_with_diagnostics(f"zz where {other} {text} -> keep").policy.rules[0].where.terms[1]
        case RecipeCall() | SplitRecipe():
            return parse_with_diagnostics(f"zz -> {text}").policy.rules[0].recipe
        case Setting():
            return parse_with_diagnostics(f"zz -> nvfp4({text})").policy.rules[0].recipe.settings[0]
        case _:
            return parse_with_diagnostics(text).policy.variants[0]


def nodes(node):
    """Yields a node and all nodes in it."""
    if isinstance(node, tuple):
        for item in node:
            yield from nodes(item)
    elif hasattr(node, "span"):
        yield node
        for name in node.__dataclass_fields__:
            if name not in ("span", "source"):
                yield from nodes(getattr(node, name))


@given(texts())
@settings(max_examples=15)
def test_spans_are_in_order_and_their_text_parses_to_the_node(drawn):
    _, text, _ = drawn
    policy = parse(text)
    for node in nodes((policy.recipes, policy.rules, policy.variants)):
        assert node.span.source is policy.source
        assert 0 <= node.span.start < node.span.end <= len(text)
        assert node.span.text.strip() == node.span.text
        expected = node
        if isinstance(node, Rule):
            expected = Rule(
                selectors=node.selectors, recipe=node.recipe, where=node.where, expect=node.expect
            )
        assert reparse(node, node.span.text) == expected
    file, diagnostics = read_statements(SourceText(text))
    assert not diagnostics
    check_order_of_statements(file.statements, 0, len(text))


def check_order_of_statements(statements, start, end):
    """Each statement begins after the one before it, and those of a block are inside the block."""
    for statement in statements:
        assert start <= statement.span.start < statement.span.end <= end
        start = statement.span.end
        if isinstance(statement, BlockStatement):
            assert statement.span.text.endswith("}")
            check_order_of_statements(statement.body, statement.span.start, statement.span.end)


def test_spans_count_lines_and_columns_from_one():
    policy = parse("# one\n\n  mlp.* -> nvfp4(\n    sr=grad)\n")
    span = policy.rules[0].recipe.settings[0].span
    assert (span.line, span.column, span.last_line, span.end_column, span.text) == (4, 5, 4, 12, "sr=grad")
    assert (policy.rules[0].span.line, policy.rules[0].span.column) == (3, 3)
    assert (policy.rules[0].span.last_line, policy.rules[0].span.end_column) == (4, 13)


# ---- invalid texts: what is said about them is in tests/ui/policies/language


def test_a_digit_of_another_script_is_no_layer_index():
    assert not is_index("\u0661")
    assert parse("layers_\u0661 -> bf16") != parse("layers[1] -> bf16")


VALID = """\
seed = 3
recipe nv = nvfp4(
    rht=wgrad,   # both operands
    sr={grad},
)

{q,k,v,o}_proj,  # the projections ->
{gate,up,down}_proj ->
    nv
decoder.
    mlp @ fprop,
    wgrad -> nv
* where weight and  # only these
        (k % 16 != 0 or
         n % 16 != 0) -> bf16
after 10% {
    until 20% { mlp.* -> bf16; attention.* -> fp8 }
}

variant fp8 {
    recipe nv = fp8
    * where not (weight or
                 k < 16) -> nv
}
"""


@pytest.mark.parametrize(
    "invalid", ["a b", "a ->", "a -> (", "a -> nvfp4(sr=grad", "a where ( -> bf16", "a => b", "a[ -> b", "$"]
)
@pytest.mark.parametrize("first", [True, False])
def test_one_error_does_not_affect_other_statements(invalid, first):
    """All other statements are read as if the invalid one were not there, whatever line breaks they contain."""
    text = f"{invalid}\n{VALID}" if first else f"{VALID}{invalid}\n"
    loaded = parse_with_diagnostics(text)
    line = 1 if first else VALID.count("\n") + 1
    assert [(d.code, d.span.line) for d in loaded.diagnostics] == [("syntax-error", line)]
    assert loaded.policy == parse(VALID)


@given(texts(commented=False))
# The end of a broken statement is a guess, so always test the same texts.
@settings(max_examples=20, derandomize=True)
def test_one_error_is_reported_once_in_every_spelling(drawn):
    policy, text, _ = drawn
    loaded = parse_with_diagnostics(f"{text}\nwrong invalid\n")
    assert [d.code for d in loaded.diagnostics] == ["syntax-error"]
    assert loaded.policy == policy
