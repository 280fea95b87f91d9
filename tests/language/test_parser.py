"""The parser: all spellings, the spans of nodes, and the diagnostics of invalid texts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from policyc import parse
from policyc.language.bounds import Bound
from policyc.language.diagnostics import PolicyError, SourceText
from policyc.language.loader import parse_with_diagnostics
from policyc.language.parser import BlockStatement, comment_ranges, find_pieces, read_piece, read_statements
from policyc.language.policy import Policy, RecipeCall, RecipeDef, Rule, Seed, Setting, SplitRecipe
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


def test_a_policy_on_one_line():
    policy = parse("mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights); attention.* -> bf16")
    assert policy == Policy(rules=(rule(selector("mlp", "*"), to=NV), rule(selector("attention", "*"))))


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


NUMBER = Comparison(terms=(Term(value="k"), Term(value=1)), operators=("==",))
WEIGHT = Flag(name="weight")


def compare(*parts) -> Comparison:
    """A comparison from its terms and the operators between them."""
    return Comparison(terms=tuple(Term(value=part) for part in parts[::2]), operators=parts[1::2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("weight", WEIGHT),
        ("not weight", Not(operand=WEIGHT)),
        ("not not weight", Not(operand=Not(operand=WEIGHT))),
        ("weight and k == 1", AllOf(operands=(WEIGHT, NUMBER))),
        ("not weight and k == 1", AllOf(operands=(Not(operand=WEIGHT), NUMBER))),
        ("weight or weight and k == 1", AnyOf(operands=(WEIGHT, AllOf(operands=(WEIGHT, NUMBER))))),
        ("(weight or weight) and k == 1", AllOf(operands=(AnyOf(operands=(WEIGHT, WEIGHT)), NUMBER))),
        ("not mlp", Not(operand=Flag(name="mlp"))),
        ("experts or block", AnyOf(operands=(Flag(name="experts"), Flag(name="block")))),
        ("layer == 0", compare("layer", "==", 0)),
        ("layer >= -4", compare("layer", ">=", Bound(Fraction(-4)))),
        ("layer < 15%", compare("layer", "<", Bound(Fraction(15), True))),
        ("layer>=-12.5 %", compare("layer", ">=", Bound(Fraction(-25, 2), True))),
        ("2 <= layer < -8", compare(2, "<=", "layer", "<", Bound(Fraction(-8)))),
        ("-15%<=layer", compare(Bound(Fraction(-15), True), "<=", "layer")),
        ("layer >= -0", compare("layer", ">=", 0)),
        ("15%k == 0", Comparison(terms=(Term(value=15, modulus="k"), Term(value=0)), operators=("==",))),
        ("not (weight or k == 1)", Not(operand=AnyOf(operands=(WEIGHT, NUMBER)))),
        ("((k == 1))", NUMBER),
        ("not k == 1", Not(operand=NUMBER)),
    ],
)
def test_the_precedence_of_or_and_and_not(text, expected):
    assert only(f"* where {text} -> bf16").where == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1_000", 1000), ("1e9", 10**9), ("2.5e3", 2500), ("007", 7), ("1E2", 100), ("4_096", 4096)],
)
def test_numbers_have_underscores_and_exponents(text, value):
    where = only(f"* where k == {text} -> bf16").where
    assert where == Comparison(terms=(Term(value="k"), Term(value=value)), operators=("==",))


@pytest.mark.parametrize(
    ("text", "products"),
    [
        ("a @ fprop", {FPROP}),
        ("a @ bwd", {DGRAD, WGRAD}),
        ("a @ fprop, wgrad", {FPROP, WGRAD}),
        ("a @ fprop,wgrad", {FPROP, WGRAD}),
        ("a @ {fprop,wgrad}", {FPROP, WGRAD}),
        ("a @ {fprop}, wgrad", {FPROP, WGRAD}),
        ("a @ fprop,\n  wgrad", {FPROP, WGRAD}),
        ("a @ fprop,  # forward\n  # and\n  wgrad", {FPROP, WGRAD}),
        ("a @ bwd, fprop", {FPROP, DGRAD, WGRAD}),
    ],
)
@pytest.mark.parametrize("arrow", [" -> ", "->"])
def test_the_list_of_products_continues_after_a_comma(text, products, arrow):
    assert only(f"{text}{arrow}bf16").selectors == (selector("a", products=frozenset(products)),)


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


@pytest.mark.parametrize(
    "text",
    [
        "a,\nb -> bf16",
        "a.\nb -> bf16",
        "a ->\nbf16",
        "a @\nfprop -> bf16",
        "a where\nweight -> bf16",
        "a where k ==\n1 -> bf16",
        "a where k %\n2 == 0 -> bf16",
        "a where not\nweight -> bf16",
        "a where weight and\nweight -> bf16",
        "a where weight or\nweight -> bf16",
        "a where (\nweight\n) -> bf16",
        "a[\n0\n:\n] -> bf16",
        "a -> nvfp4(\nsr\n=\ngrad\n,\n)",
        "recipe x =\nbf16",
        "a -> bf16\n\f\nb -> bf16",
        "a -> bf16 ;;; \n;b -> bf16;",
        "\n\n;\n",
        "# only a comment",
        "",
        " \t\r\f",
    ],
)
def test_line_breaks_that_do_not_end_a_statement(text):
    policy = parse(text)
    assert policy == parse(text.replace("\n", "\r\n"))
    assert policy == parse(text.replace("\n", "  # and so on ->\n"))
    assert policy == parse(str(policy))


@pytest.mark.parametrize(
    "text", ["a\n-> bf16", "a -> bf16\nexpect 1", "a\nwhere weight -> bf16", "a -> nvfp4\n(sr=grad)"]
)
def test_line_breaks_that_end_a_statement(text):
    with pytest.raises(PolicyError):
        parse(text)


def test_a_hash_in_a_string_is_no_comment_and_a_quote_in_a_comment_no_string():
    text = """import "it's#1" # don't "quote" me\nimport 'say "#"' # '\n#"x"#\n"""
    assert [text[a:b] for a, b in comment_ranges(text)] == ['# don\'t "quote" me', "# '", '#"x"#']


def test_globs_have_a_canonical_spelling():
    assert only("a**b.{ x , y* } -> bf16").selectors[0] == selector("a*b", "{x,y*}")


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


# ---- invalid texts


def test_a_format_that_does_not_exist_here_gets_no_fix():
    """bf16 has the size of fp16, but neither its precision nor its range."""
    (diagnostic,) = parse_with_diagnostics("a -> fp16").diagnostics
    assert diagnostic.fix is None


@pytest.mark.parametrize("name", ["é", "名前", "слой", "слой_mlp", "λάμδα.mlp", "naïve"])
def test_names_in_other_scripts_are_valid(name):
    assert parse(f"{name} -> bf16").rules[0].selectors[0].segments[0].glob == name.split(".")[0]


@pytest.mark.parametrize("text", ["# р -> bf16", 'import "fp8"  # ｆ'])
def test_comments_may_have_any_letters(text):
    assert parse_with_diagnostics(text).diagnostics == ()


def test_a_confusable_letter_is_reported_next_to_a_syntax_error():
    codes = [d.code for d in parse_with_diagnostics("ml\u0440 -> bf16\na => bf16").diagnostics]
    assert codes == ["confusable-letter", "syntax-error"]


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x1d"])
def test_an_unexpected_character_that_ends_lines_elsewhere_is_quoted(character):
    (diagnostic,) = parse_with_diagnostics(f"a -> bf16{character}").diagnostics
    assert diagnostic.message == f"unexpected '{character}'"


def test_a_digit_of_another_script_is_no_layer_index():
    assert not is_index("\u0661")
    assert parse("layers_\u0661 -> bf16") != parse("layers[1] -> bf16")


INVALID = [
    # text, code, line, column, part of the help. Those of recipes and their options: test_checks.py
    ("mlp.* => bf16", "syntax-error", 1, 7, "an arrow is written '->'"),
    ("mlp.* → bf16", "syntax-error", 1, 7, "an arrow is written '->'"),
    ("mlp.* bf16", "syntax-error", 1, 7, "expected '->'"),
    ("mlp.*\n    -> bf16", "syntax-error", 1, 6, "at the end of this line"),
    ("mlp - bf16", "syntax-error", 1, 5, "an arrow is written '->'"),
    ("mlp: bf16", "syntax-error", 1, 4, "an arrow is written '->'"),
    ("- mlp -> bf16", "syntax-error", 1, 3, "does not start with '-'"),
    ("nv = nvfp4", "syntax-error", 1, 4, "'recipe nv = ...'"),
    ("!mlp -> bf16", "syntax-error", 1, 1, "a rule for '*', then a later rule"),
    ("not mlp -> bf16", "syntax-error", 1, 5, "a rule for '*', then a later rule"),
    ("/* all */ a -> bf16", "syntax-error", 1, 1, "a comment starts with '#'"),
    ("a -> bf16 /* all */", "syntax-error", 1, 11, "a comment starts with '#'"),
    ("a -> bf16 // all", "syntax-error", 1, 11, "a comment starts with '#'"),
    ("mlp/* -> bf16", "syntax-error", 1, 4, "separated by dots: mlp.*"),
    ("decoder/layers/mlp -> bf16", "syntax-error", 1, 8, "separated by dots: decoder.layers.mlp"),
    ('"mlp.*" -> bf16', "syntax-error", 1, 1, "a selector is written without quotes: mlp.*"),
    ('mlp -> "bf16"', "syntax-error", 1, 8, "a name is written without quotes: bf16"),
    (".*mlp -> bf16", "syntax-error", 1, 1, "not a regular expression: write *mlp"),
    ("(q|k)_proj -> bf16", "syntax-error", 1, 1, "not a regular expression: write {q,k}_proj"),
    ("q_proj|k_proj -> bf16", "syntax-error", 1, 7, "not a regular expression: write {q_proj,k_proj}"),
    ("[qk]_proj -> bf16", "syntax-error", 1, 1, "not a regular expression: write {q,k}_proj"),
    ("mlp\\.up -> bf16", "syntax-error", 1, 4, "not a regular expression: write mlp.up"),
    ("mlp$ -> bf16", "syntax-error", 1, 4, "everything under it, so '$' is not needed"),
    ("layers[0,1,2] -> bf16", "syntax-error", 1, 9, "layers[0], layers[1], layers[2]"),
    ("layers[0..4] -> bf16", "syntax-error", 1, 9, "[0:4]"),
    ("layers[0-4] -> bf16", "syntax-error", 1, 9, "[0:4]"),
    ("mlp -> bf16 where k > 1", "syntax-error", 1, 13, "'where' goes before the arrow"),
    ("mlp -> bf16 @ fprop", "syntax-error", 1, 13, "'@' goes before the arrow"),
    ("before 82% { a -> bf16 }", "syntax-error", 1, 8, "'until'"),
    ('include "x"', "syntax-error", 1, 9, "'import'"),
    ("after 1e3 { a -> bf16 }", "syntax-error", 1, 8, "without an exponent: 1000"),
    ("after 82 % { a -> bf16 }", "syntax-error", 1, 10, "82%, without a space"),
    ("after 100 steps { a -> bf16 }", "syntax-error", 1, 11, "write 100 alone"),
    ("after step 100 { a -> bf16 }", "syntax-error", 1, 7, "a number is a step: write after 100"),
    ("after 1k { a -> bf16 }", "syntax-error", 1, 8, "in full: 1000"),
    ("after 0.0001k { a -> bf16 }", "syntax-error", 1, 13, "expected '{'"),
    ("mlp.* expect 96 -> fp8", "syntax-error", 1, 7, "'expect' comes last: SELECTOR -> RECIPE expect 96"),
    ("mlp where k > 5 expect -> fp8", "syntax-error", 1, 17, "comes last: SELECTOR -> RECIPE expect N"),
    ("[policy]", "syntax-error", 1, 1, "a policy has no sections"),
    ("[[rules]]\na -> bf16", "syntax-error", 1, 1, "a policy has no sections"),
    ("default = bf16", "syntax-error", 1, 9, "the rule for every site is written * -> bf16"),
    ("default = nvfp4(sr=grad); a -> bf16", "syntax-error", 1, 9, "written * -> nvfp4(sr=grad)"),
    ("after 0.82 { a -> bf16 }", "number-out-of-range", 1, 7, "a percentage: 82%"),
    ("a[-0.125:] -> bf16", "number-out-of-range", 1, 3, "a percentage: -12.5%"),
    ("a\u00a0-> bf16", "syntax-error", 1, 2, "U+00A0 (no-break space): write a normal space"),
    ("a\u200b -> bf16", "syntax-error", 1, 2, "U+200B (zero width space): remove it"),
    ("a[\u0661:] -> bf16", "syntax-error", 1, 3, "U+0661 (arabic-indic digit one): write '1'"),
    ("seed = \u0661", "syntax-error", 1, 8, "U+0661 (arabic-indic digit one): write '1'"),
    ("/* one\n two, three\n */ a -> bf16", "syntax-error", 1, 1, "write '#' before each line of it"),
    ("/*\n * 'tis (one\n * two -> three;\n */\na -> bf16", "syntax-error", 1, 1, "a comment starts with '#'"),
    ("a -> bf16 /* one\n two */\nb -> fp8", "syntax-error", 1, 11, "a comment starts with '#'"),
    ("-- a -> bf16", "syntax-error", 1, 4, "a comment starts with '#'"),
    ("a and b -> bf16", "syntax-error", 1, 3, "selectors are separated by commas"),
    ("a.[0] -> bf16", "syntax-error", 1, 3, "follows its name directly: a[0]"),
    ("a[*] -> bf16", "syntax-error", 1, 3, "leave the brackets out"),
    ("a[] -> bf16", "syntax-error", 1, 3, "leave the brackets out"),
    ("a['b'][0] -> bf16", "syntax-error", 1, 3, "names are separated by dots"),
    ("a.-1.b -> bf16", "bad-slice", 1, 3, "in brackets: [-1]"),
    ("a -> nvfp4[sr=grad]", "syntax-error", 1, 11, "options go in parentheses: nvfp4("),
    ("a -> nvfp4 sr=grad", "syntax-error", 1, 12, "options go in parentheses: nvfp4("),
    ("a -> bf16,", "syntax-error", 1, 10, "remove the comma"),
    ("a -> fp8 + bf16", "syntax-error", 1, 10, "split(fprop="),
    ("a -> {fprop: fp8}", "syntax-error", 1, 6, "split(fprop="),
    ("a -> fprop=fp8", "syntax-error", 1, 11, "split(fprop="),
    ("a -> (fp8)", "syntax-error", 1, 6, "without parentheses"),
    ("a -> split(fp8)", "unknown-product", 1, 12, "fprop=fp8"),
    ("a @ fprop dgrad -> bf16", "syntax-error", 1, 11, "products are separated by commas"),
    ("a @ fprop+dgrad -> bf16", "syntax-error", 1, 10, "products are separated by commas"),
    ("a @ all -> bf16", "unknown-product", 1, 5, "leave it out"),
    ("@ wgrad -> bf16", "syntax-error", 1, 1, "'*' selects every site"),
    ("a if k > 3 -> bf16", "syntax-error", 1, 3, "starts with 'where'"),
    ("a where k > 1K -> bf16", "syntax-error", 1, 14, "the number in full"),
    ("a where k > 2**10 -> bf16", "syntax-error", 1, 14, "the number in full"),
    ("a where k * n > 10 -> bf16", "syntax-error", 1, 11, "the only arithmetic operator is '%'"),
    ("a where k in (1, 2) -> bf16", "syntax-error", 1, 11, "joined by 'or'"),
    ("a where weight == true -> bf16", "bad-predicate", 1, 9, "'not weight'"),
    ("a where true -> bf16", "bad-predicate", 1, 9, "leave 'where' out"),
    ("a where k % 16 -> bf16", "bad-predicate", 1, 9, "k % 16 == 0"),
    ('a where name == "x" -> bf16', "syntax-error", 1, 17, "the selector does that"),
    ("recipe my-nv = fp8", "syntax-error", 1, 10, "my_nv"),
    ("* -> bf-16", "syntax-error", 1, 8, "did you mean 'bf16'?"),
    ("* -> nvfp-4(sr=grad)", "syntax-error", 1, 10, "did you mean 'nvfp4'?"),
    ("recipe 4bit = fp8", "syntax-error", 1, 8, "starts with a letter"),
    ('import "fp8", "bf16"', "syntax-error", 1, 13, "one import for each file"),
    ("between 1% and 5% { a -> bf16 }", "syntax-error", 1, 9, "after 10% { until 50%"),
    ("{a,b -> bf16", "syntax-error", 1, 1, "close the brace"),
    ('{"a": "bf16"}', "syntax-error", 1, 1, "SELECTOR -> RECIPE"),
    (
        '{\n  "a": "bf16",\n  "b": {\n    "c": "fp8"\n  }\n}\na -> bf16',
        "syntax-error",
        1,
        1,
        "a policy is not JSON",
    ),
    ("after 1 {\n{a,b -> bf16\n}", "syntax-error", 2, 1, "close the brace"),
    (".a -> bf16", "syntax-error", 1, 1, "one dot: a"),
    ("a..b -> bf16", "syntax-error", 1, 3, "one dot: a.b"),
    ("a \\\n -> bf16", "syntax-error", 1, 3, "without '\\'"),
    ("a -> nvfp4\uff08sr=grad\uff09", "syntax-error", 1, 11, "write '('"),
    ("a -> te_nvfp4", "unknown-recipe", 1, 6, 'import "te_nvfp4"'),
    ("a -> skip", "unknown-format", 1, 6, "'keep'"),
    ("a -> nvfp4(stochastic_rounding=grad)", "unknown-option", 1, 12, "'sr'"),
    ("a -> nvfp4(rht=true)", "unknown-value", 1, 12, "rht=wgrad"),
    ("a -> nvfp4(sr=True)", "unknown-value", 1, 12, "sr=grad"),
    ("a -> fp8(e4m3)", "unknown-option", 1, 10, "grad=e4m3"),
    ("\u043clp -> bf16", "confusable-letter", 1, 1, "in ASCII letters only"),
    ("ml\u0440 -> bf16", "confusable-letter", 1, 3, "in ASCII letters only"),
    ("\uff4dlp -> bf16", "confusable-letter", 1, 1, "in ASCII letters only"),
    ("a @ fwd -> bf16", "unknown-product", 1, 5, "did you mean 'fprop'?"),
    ("a @ weight_grad -> bf16", "unknown-product", 1, 5, "did you mean 'wgrad'?"),
    ("a -> fp16", "unknown-format", 1, 6, "there is no fp16"),
    ("a -> float8_e4m3", "unknown-format", 1, 6, "did you mean 'fp8'?"),
    ("mlp.* ->", "syntax-error", 1, 9, "expected a name"),
    ("mlp.* -> bf16 bf16", "syntax-error", 1, 15, ""),
    ("* where weight && weight -> bf16", "syntax-error", 1, 16, "write 'and'"),
    ("* where weight || weight -> bf16", "syntax-error", 1, 16, "write 'or'"),
    ("* where !weight -> bf16", "syntax-error", 1, 9, "write 'not'"),
    ("* where k = 1 -> bf16", "syntax-error", 1, 11, "'=='"),
    ("a -> nvfp4(sr=grad; rht=wgrad)", "syntax-error", 1, 19, "separated by commas"),
    ("a -> nvfp4(sr=grad", "syntax-error", 1, 19, "')'"),
    ("{a.b,c} -> bf16", "syntax-error", 1, 1, "several selectors"),
    ("import te_nvfp4", "syntax-error", 1, 8, "a file name in quotes"),
    ("recipe nv nvfp4", "syntax-error", 1, 11, "'='"),
    ("recipe = nvfp4", "syntax-error", 1, 8, "expected a name"),
    ("after { a -> bf16 }", "syntax-error", 1, 7, "a step or a percentage"),
    ("variant { a -> bf16 }", "syntax-error", 1, 9, "a name"),
    ("variant x { a -> bf16", "syntax-error", 1, 1, "add '}'"),
    ("a -> bf16 }", "syntax-error", 1, 11, "no block is open here"),
    ("a -> split()", "syntax-error", 1, 6, "split(fprop=..., dgrad=..., wgrad=...)"),
    ("a -> bf16 expect many", "syntax-error", 1, 18, "a number"),
    ("a -> bf16 $", "syntax-error", 1, 11, ""),
    ("a -> zzzzzz", "unknown-recipe", 1, 6, "a format: nvfp4"),
    ("a -> nvfp4(sr={gr-ad})", "unknown-value", 1, 15, "words"),
    ("a -> nvfp4(sr={})", "unknown-value", 1, 15, ""),
    ("a -> nvfp4(sr=nvfp4(rht=wgrad))", "unknown-value", 1, 15, "split()"),
    ("a -> nvfp4(sr=fprop.grad)", "unknown-value", 1, 12, ""),
    ("a -> split(bwd=bf16, wgrad=bf16)", "duplicate-option", 1, 22, "remove one"),
    ("a @ wgard -> bf16", "unknown-product", 1, 5, "did you mean 'wgrad'?"),
    ("a @ {fprop, back} -> bf16", "unknown-product", 1, 5, ""),
    ("a @ {} -> bf16", "unknown-product", 1, 5, "fprop"),
    ("a -> split(forward=bf16)", "unknown-product", 1, 12, "fprop"),
    ("a -> split(fprop)", "unknown-recipe", 1, 12, "fprop=bf16"),
    ("* where kk == 1 -> bf16", "unknown-variable", 1, 9, "did you mean 'k'?"),
    ("* where wieght -> bf16", "unknown-variable", 1, 9, "did you mean 'weight'?"),
    ("* where k -> bf16", "bad-predicate", 1, 9, "compare it"),
    ("* where weight == 1 -> bf16", "bad-predicate", 1, 9, "not weight"),
    ("* where k % 0 == 0 -> bf16", "bad-predicate", 1, 13, ""),
    ("* where mlp == 1 -> bf16", "bad-predicate", 1, 9, "write 'mlp' or 'not mlp'"),
    ("* where mlp = 1 -> bf16", "syntax-error", 1, 13, "write 'mlp' or 'not mlp'"),
    ("* where mlp % 2 -> bf16", "bad-predicate", 1, 9, "write 'mlp' or 'not mlp'"),
    ("* where mpl -> bf16", "unknown-variable", 1, 9, "did you mean 'mlp'?"),
    ("* where attn -> bf16", "unknown-variable", 1, 9, "did you mean 'attention'?"),
    ("* where layers < 4 -> bf16", "unknown-variable", 1, 9, "did you mean 'layer'?"),
    ("* where kind -> bf16", "unknown-variable", 1, 9, "write the kind itself: attention, "),
    ("* where kind == mlp -> bf16", "bad-predicate", 1, 9, "write 'where mlp'"),
    ("* where kind != mlp -> bf16", "bad-predicate", 1, 9, "write 'where not mlp'"),
    ("* where kind = mlp -> bf16", "syntax-error", 1, 14, "where mlp"),
    ('* where kind == "mlp" -> bf16', "syntax-error", 1, 17, "where mlp"),
    ("* where layer -> bf16", "bad-predicate", 1, 9, "layer >= -4"),
    ("* where layer % 0 == 0 -> bf16", "bad-predicate", 1, 17, "1 or more"),
    ("* where layer % -2 == 0 -> bf16", "bad-predicate", 1, 17, "1 or more"),
    ("* where layer % -> bf16", "bad-predicate", 1, 15, "layer % 16"),
    ("* where -4 <= m -> bf16", "bad-predicate", 1, 9, "layer >= -4"),
    ("* where m < 15% -> bf16", "bad-predicate", 1, 13, "layer >= -4"),
    ("* where layer % 2 == -1 -> bf16", "bad-predicate", 1, 22, "layer >= -4"),
    ("* where layer < k -> bf16", "bad-predicate", 1, 17, "layer >= -4, layer < 15%"),
    ("* where k % layer == 0 -> bf16", "bad-predicate", 1, 9, "layer >= -4, layer < 15%"),
    ("* where layer == 15% -> bf16", "bad-predicate", 1, 18, "layer < 15% selects"),
    ("* where 15% < layer -> bf16", "bad-predicate", 1, 9, "layer < 15% selects"),
    ("* where layer < 1e1% -> bf16", "number-out-of-range", 1, 17, "in full"),
    ("* where layer < 101% -> bf16", "number-out-of-range", 1, 17, "up to 100%"),
    ("* where layer >= -1.5 -> bf16", "number-out-of-range", 1, 18, "-1.5%"),
    ("a[5%] -> bf16", "bad-slice", 1, 3, "[:5%] takes the first 5% of the layers, [-5%:] the last"),
    ("a[::0] -> bf16", "bad-slice", 1, 5, "[::2]"),
    ("a[::-1] -> bf16", "bad-slice", 1, 5, "[::2]"),
    ("a[101%:] -> bf16", "number-out-of-range", 1, 3, "100%"),
    ("a[:1.5] -> bf16", "number-out-of-range", 1, 4, "1.5%"),
    ("after 1.5 { a -> bf16 }", "number-out-of-range", 1, 7, "1.5%"),
    ("after 101% { a -> bf16 }", "number-out-of-range", 1, 7, "100%"),
    ("* where k == 1.5 -> bf16", "number-out-of-range", 1, 14, "whole"),
    ("* where k == 1e18 -> bf16", "number-out-of-range", 1, 14, "18 digits"),
    ("a -> bf16 expect 1234567890123456789", "number-out-of-range", 1, 18, "18 digits"),
    ("recipe a = bf16\nrecipe a = fp8", "duplicate-recipe", 2, 1, ""),
    ("variant a {}\nvariant a {}", "duplicate-variant", 2, 1, ""),
    ("recipe bf16 = fp8", "reserved-name", 1, 1, "my_bf16"),
    ("after 1 { recipe a = bf16 }", "misplaced-statement", 1, 11, "out of the braces"),
    ("after 1 { variant a {} }", "misplaced-statement", 1, 11, "out of the braces"),
    ("variant a { variant b {} }", "misplaced-statement", 1, 13, "out of the braces"),
    ("variant a { after 1 { recipe b = bf16 } }", "misplaced-statement", 1, 23, "out of the braces"),
    ('import "nope"', "import-not-found", 1, 1, ""),
    ('import "te_nvpf4"', "import-not-found", 1, 1, "did you mean 'te_nvfp4'?"),
    ('import "/etc/passwd"', "bad-import-path", 1, 1, "relative"),
    ('import "notes.txt"', "bad-import-path", 1, 1, "'.policy'"),
]


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "help"), INVALID, ids=[t[0][:40] for t in INVALID]
)
def test_a_diagnostic_has_its_code_location_and_help(text, code, line, column, help):
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert [(d.code, d.span.line, d.span.column) for d in caught.value.diagnostics] == [(code, line, column)]
    (diagnostic,) = caught.value.diagnostics
    assert help in diagnostic.help
    assert diagnostic.message


def codes(text: str) -> list[tuple[str, int]]:
    return [(d.code, d.span.line) for d in parse_with_diagnostics(text).diagnostics]


def test_all_errors_of_a_file_are_reported_at_once():
    text = """\
mlp.* -> nvfp5(sr=grad)
mlp.* bf16
* where kk == 1 -> bf16
after 10% {
    a => bf16
    b -> nvfp4(sr=gard)
    after 200% { c -> bf16 }
}
variant x {
    import "nope"
    d @ wgard -> bf16
    -> bf16
}
recipe bf16 = fp8
e -> bf16 expect
"""
    assert codes(text) == [
        ("unknown-format", 1),
        ("syntax-error", 2),
        ("unknown-variable", 3),
        ("syntax-error", 5),
        ("unknown-value", 6),
        ("number-out-of-range", 7),
        ("import-not-found", 10),
        ("unknown-product", 11),
        ("syntax-error", 12),
        ("reserved-name", 14),
        ("syntax-error", 15),
    ]


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


def test_every_unclosed_bracket_is_reported():
    text = "a -> nvfp4(sr=grad\n" * 40
    assert codes(text) == [("syntax-error", line) for line in range(1, 41)]


def test_an_unclosed_block_does_not_hide_the_errors_in_it():
    assert codes("variant x {\n    a => bf16\n    b -> bf16\n") == [("syntax-error", 1), ("syntax-error", 2)]


def test_a_recipe_with_an_error_is_still_a_known_name():
    assert codes("recipe nv = nvfp4(sr=gard)\na -> nv\n") == [("unknown-value", 1)]


def test_messages_do_not_depend_on_the_order_of_sets():
    messages = [d.message for d in parse_with_diagnostics("a -> split(bwd=bf16, bwd=bf16)").diagnostics]
    assert messages == ["'dgrad' already has a recipe", "'wgrad' already has a recipe"]


@settings(max_examples=12)
@given(texts())
def test_the_pieces_of_a_valid_text_are_its_statements(drawn: tuple[Policy, str, list[str]]) -> None:
    """Also where a piece is read alone: the formatter and editors read nothing else."""
    text = drawn[1]
    file, diagnostics = read_statements(SourceText(text, "a.policy"))
    assert not diagnostics
    pieces = []
    for start, end, is_closed in find_pieces(text):
        statements = read_piece(text[start:end])
        assert is_closed
        assert statements is not None
        pieces += [(start, statement) for statement in statements]
    assert tuple(statement for _, statement in pieces) == file.statements
    assert [start + s.span.start for start, s in pieces] == [s.span.start for s in file.statements]


@pytest.mark.parametrize(
    "text", ["recipe b = where", "* -> not", "group g = a, or", "group g = a.and", "group g = ^where"]
)
def test_a_name_that_is_a_word_of_conditions_ends_a_line(text: str) -> None:
    file, diagnostics = read_statements(SourceText(f"{text}\nx -> fp8\n"))
    assert (len(file.statements), diagnostics) == (2, ())
    assert [end - start for start, end, _ in find_pieces(f"{text}\nx -> fp8\n")] == [len(text) + 1, 9]
    assert [is_closed for _, _, is_closed in find_pieces(f"{text} where\n")] == [False]
