"""Hypothesis strategies: policies as data, and policies as text in every spelling that the language accepts.

`policies()` draws `Policy` objects. `spelled(policy)` draws a text for one, with spaces, line breaks, comments and
synonyms wherever the language allows them, and returns the comments it inserted. Neither uses the printers of policyc.
The word lists below are copied by hand from docs/.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any

from hypothesis import strategies as st

from policyc.language.bounds import Bound
from policyc.language.bundled import bundled_policies
from policyc.language.policy import (
    MAX_SEED,
    Policy,
    RecipeCall,
    RecipeDef,
    Rule,
    Seed,
    Setting,
    SplitRecipe,
    Variant,
)
from policyc.language.predicates import AllOf, AnyOf, Comparison, Flag, Not, Term
from policyc.language.recipes import Gemm
from policyc.language.schedule import StepCondition
from policyc.language.selectors import Indices, Selector, SelectorSegment

KEYWORDS = ("import", "recipe", "after", "until", "variant")
PRODUCTS = ("fprop", "dgrad", "wgrad", "bwd")
ALL = frozenset(Gemm)
RESERVED = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp4", "bf16", "f32", "keep", "split")
OPERAND_WORDS = (
    "all", "fprop", "dgrad", "wgrad", "bwd", "weights", "activations", "grad", "fprop.weights", "dgrad.weights",
    "fprop.activations", "wgrad.activations", "dgrad.grad", "wgrad.grad",
)  # fmt: skip
FLAGS = (
    "weight", "attention", "scores", "mlp", "experts", "router", "embedding", "head", "conv", "block",
)  # fmt: skip
SYNONYMS = {
    "weights": ("weights", "weight"),
    "activations": ("activations", "activation"),
    "grad": ("grad", "grads", "gradient", "gradients"),
}

CHARACTERS = st.characters(exclude_categories=["Cs"])
"""All characters that UTF-8 can encode. Without this, Hypothesis takes seconds to find them by encoding every one."""

# ---- names and selectors

_letters = st.sampled_from("abxyzABé名_")
words = st.one_of(
    st.builds(str.__add__, _letters, st.text("ab1_é", max_size=5)),
    st.sampled_from(
        [*KEYWORDS, *PRODUCTS, "where", "expect", "and", "or", "not", "weight", "k", "no_rht", "nv"]
    ),
)
names = words.filter(lambda w: w not in RESERVED)
_plain = st.text("ab10_-~?*é", min_size=1, max_size=5)
_braces = st.lists(st.text("ab1_-?*~", max_size=3), min_size=1, max_size=3).map(
    lambda w: "{" + ",".join(w) + "}"
)
globs = st.one_of(
    words,
    st.just("*"),
    st.just("layers"),
    st.lists(st.one_of(_plain, _braces), min_size=1, max_size=2).map("".join),
).filter(lambda g: "**" not in g and not re.fullmatch(r"-\d+", g))  # -1 would be an index without brackets

_percent = st.integers(0, 10_000).map(lambda n: Bound(Fraction(n, 100), True))
_signed_percent = st.integers(-10_000, 10_000).map(lambda n: Bound(Fraction(n, 100), True))
_bounds = st.one_of(st.integers(-99, 99).map(lambda n: Bound(Fraction(n))), _signed_percent)
indices = st.one_of(
    st.integers(-(10**6), 10**6).map(lambda n: Indices(index=n)),
    st.builds(
        Indices,
        start=st.none() | _bounds,
        stop=st.none() | _bounds,
        step=st.none() | st.integers(1, 9),
    ),
)
segments = st.builds(SelectorSegment, glob=globs, indices=st.none() | indices)
products = st.sets(st.sampled_from(list(Gemm)), min_size=1).map(frozenset)
selectors = st.builds(
    Selector,
    segments=st.lists(segments, min_size=1, max_size=3).map(tuple),
    anchored=st.booleans(),
    products=st.just(ALL) | products,
)


def _single_word(selector: Selector) -> str | None:
    """The word of a selector that consists of a single word, or None."""
    first, *rest = selector.segments
    return None if selector.anchored or rest or first.indices is not None else first.glob


def _can_be_written(drawn: tuple[Selector, ...]) -> bool:
    """Whether selectors have a spelling: no lone keyword at the start, and no lone product name after products."""
    if _single_word(drawn[0]) in KEYWORDS:
        return False
    return not any(a.products != ALL and _single_word(b) in PRODUCTS for a, b in pairwise(drawn))


selector_lists = st.lists(selectors, min_size=1, max_size=3).map(tuple).filter(_can_be_written)

# ---- predicates

_numbers = st.one_of(st.integers(0, 4096), st.integers(0, 10**18 - 1))
_sizes = st.sampled_from(["m", "n", "k", "batch", "flops"])
terms = st.builds(
    Term, value=_sizes | _numbers, modulus=st.none() | _sizes | _numbers.filter(lambda n: n > 0)
)
_operators = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])


@st.composite
def comparisons(draw: Callable[..., Any]) -> Comparison:
    count = draw(st.integers(2, 4))
    chain = tuple(draw(terms) for _ in range(count))
    return Comparison(terms=chain, operators=tuple(draw(_operators) for _ in range(count - 1)))


_layers = st.builds(Term, value=st.just("layer"))
_layer_terms = st.one_of(
    _numbers.map(lambda n: Term(value=n)),
    st.integers(-(10**6), -1).map(lambda n: Term(value=Bound(Fraction(n)))),
)
_remainders = st.builds(Term, value=st.just("layer"), modulus=st.integers(1, 9))


@st.composite
def layer_comparisons(draw: Callable[..., Any]) -> Comparison:
    """`layer` on one side or in the middle of a chain, with numbers of either sign, percentages or a remainder."""
    if draw(st.booleans()):
        terms = (draw(_remainders), Term(value=draw(st.integers(0, 9))))
        return Comparison(terms=terms, operators=(draw(_operators),))
    below = draw(st.sampled_from(["number", "percentage", "nothing"]))
    above = draw(st.sampled_from(["number", "percentage", "nothing"] if below != "nothing" else ["number"]))
    percentages = _signed_percent.map(lambda bound: Term(value=bound))
    terms, operators = [draw(_layers)], []
    if below != "nothing":
        terms.insert(0, draw(percentages if below == "percentage" else _layer_terms))
        operators.append(draw(st.sampled_from(["<=", ">"]) if below == "percentage" else _operators))
    if above != "nothing":
        terms.append(draw(percentages if above == "percentage" else _layer_terms))
        operators.append(draw(st.sampled_from(["<", ">="]) if above == "percentage" else _operators))
    return Comparison(terms=tuple(terms), operators=tuple(operators))


def _tuples_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, min_size=2, max_size=3).map(tuple)


predicates = st.recursive(
    comparisons() | layer_comparisons() | st.builds(Flag, name=st.sampled_from(FLAGS)),
    lambda inner: st.one_of(
        st.builds(Not, operand=inner),
        st.builds(AllOf, operands=_tuples_of(inner)),
        st.builds(AnyOf, operands=_tuples_of(inner)),
    ),
    max_leaves=6,
)

# ---- recipes


def _choice(name: str, *values: str) -> st.SearchStrategy[Setting]:
    return st.sampled_from(values).map(lambda v: Setting(name=name, values=(v,)))


def _operands(name: str, words: tuple[str, ...] = OPERAND_WORDS) -> st.SearchStrategy[Setting]:
    several = st.lists(st.sampled_from(words), min_size=1, max_size=3).map(tuple)
    return st.one_of(st.just(("none",)), several).map(lambda w: Setting(name=name, values=w))


_size = _choice("rht_size", "16", "32", "64", "128")
_mean = st.sampled_from([(), ("on",), ("off",)]).map(lambda w: Setting(name="mean_split", values=w))
_FORMATS: dict[str, list[list[st.SearchStrategy[Setting]]]] = {
    # for each format, lists of options that do not exclude each other
    "nvfp4": [
        [_operands("rht"), _size, _operands("sr"), _choice("scale2d", "weights", "none"), _mean],
        [
            _operands("rht"),
            _operands("sr"),
            _choice("outer", "tensor", "row"),
            _choice("rounding", "rne"),
        ],
        [_operands("rht"), _operands("sr", ("grad", "dgrad")), _choice("scale", "amax", "four_over_six")],
        [_choice("rounding", "ms_eden"), _size, _mean, _choice("outer", "tensor", "row")],
    ],
    "mxfp4": [
        [_operands("rht"), _size, _operands("sr"), _choice("scale_rounding", "floor", "rceil", "even")]
    ],
    "fp4": [[_operands("rht"), _size, _operands("sr")]],
    "fp8": [[_choice("grad", "e5m2", "e4m3"), _choice("sums", "fp32", "fast")]],
    "mxfp8": [[]],
    "bf16": [[]],
    "f32": [[]],
    "keep": [[]],
}


@st.composite
def formats(draw: Callable[..., Any]) -> RecipeCall:
    name = draw(st.sampled_from(list(_FORMATS)))
    options = draw(st.permutations(draw(st.sampled_from(_FORMATS[name]))))
    used = options[: draw(st.integers(0, len(options)))]
    return RecipeCall(name=name, settings=tuple(draw(option) for option in used))


def recipes(known: list[str], depth: int = 2) -> st.SearchStrategy[Any]:
    """Draws recipes: formats, known names, and splits of these."""
    leaf = (
        st.one_of(formats(), st.sampled_from(known).map(lambda n: RecipeCall(name=n))) if known else formats()
    )
    if depth == 0:
        return leaf
    inner = recipes(known, depth - 1)
    parts = st.dictionaries(st.sampled_from(list(Gemm)), inner, min_size=1).map(
        lambda d: tuple((gemm, d[gemm]) for gemm in Gemm if gemm in d)
    )
    return st.one_of(leaf, leaf, st.builds(SplitRecipe, parts=parts))


# ---- policies

_points = st.one_of(st.integers(0, 10**6).map(lambda n: Bound(Fraction(n))), _percent)
schedules = st.one_of(
    st.just(()),
    st.lists(
        st.builds(StepCondition, kind=st.sampled_from(["after", "until"]), bound=_points), max_size=3
    ).map(tuple),
)


seeds = st.none() | st.builds(Seed, value=st.integers(0, MAX_SEED))


def rules(known: list[str]) -> st.SearchStrategy[Rule]:
    return st.builds(
        Rule,
        selectors=selector_lists,
        recipe=recipes(known),
        where=st.none() | predicates,
        expect=st.none() | st.integers(0, 10**18 - 1),
        when=schedules,
    )


@st.composite
def policies(draw: Callable[..., Any]) -> Policy:
    """A policy without errors. To avoid cycles, a recipe refers only to earlier ones in `base`, in variants too."""
    base = draw(st.lists(names, max_size=3, unique=True))
    defined = [RecipeDef(name=n, recipe=draw(recipes(base[:i]))) for i, n in enumerate(base)]
    variants = []
    for name in draw(st.lists(words, max_size=2, unique=True)):
        redefined = [n for n in base if draw(st.booleans())]
        own = draw(st.lists(names.filter(lambda n: n not in base), max_size=1))
        variants.append(
            Variant(
                name=name,
                recipes=tuple(
                    RecipeDef(name=n, recipe=draw(recipes(base[: base.index(n)] if n in base else base)))
                    for n in draw(st.permutations(redefined + own))
                ),
                rules=tuple(draw(st.lists(rules(base + own), max_size=2))),
                seed_statement=draw(seeds),
            )
        )
    return Policy(
        recipes=tuple(draw(st.permutations(defined))),
        rules=tuple(draw(st.lists(rules(base), max_size=3))),
        variants=tuple(variants),
        seed_statement=draw(seeds),
    )


# ---- texts

_COMMENT_PIECES = (
    "a", " ", "# ", "'", '"', "(", ")", "{", "}", "[", ";", ",", "->", "fprop", "é名", "\t", "\r", "\f", "\u2028",
)  # fmt: skip


class _Writer:
    """Writes a policy in one of its many spellings, and collects the comments in order."""

    def __init__(self, choices: bytes, commented: bool) -> None:
        self.choices = iter(choices)  # one byte per choice; when they run out, the first choice is taken
        self.commented = commented
        self.out: list[str] = []
        self.comments: list[str] = []

    def put(self, *texts: str) -> None:
        self.out += texts

    def one_of(self, *choices: Any) -> Any:
        return choices[next(self.choices, 0) % len(choices)]

    def shuffled(self, items: Any) -> list[Any]:
        rest, shuffled = list(items), []
        while rest:
            shuffled.append(rest.pop(next(self.choices, 0) % len(rest)))
        return shuffled

    def optional_space(self) -> None:
        self.put(self.one_of("", "", " ", " ", "  ", "\t", " \f"))

    def space(self) -> None:
        self.put(self.one_of(" ", " ", "   ", "\t"))

    def comment(self) -> None:
        if self.commented:
            text = (
                "#" + "".join(self.one_of(*_COMMENT_PIECES) for _ in range(self.one_of(0, 1, 4, 9))).rstrip()
            )
            self.comments.append(text)
            self.put(text)

    def line_continuation(self) -> None:
        """Spaces, line breaks and comments, in a place where a line break does not end the statement."""
        self.optional_space()
        for _ in range(self.one_of(0, 0, 0, 0, 0, 1, 2)):
            if self.one_of(True, False):
                self.comment()
            self.put("\n")
            self.optional_space()

    def statement_end(self) -> None:
        """The end of a statement: `;`, or line breaks and comments."""
        self.optional_space()
        if self.one_of(True, False, False):
            self.put(";")
            self.optional_space()
            if self.one_of(True, False):
                return
        for _ in range(self.one_of(1, 1, 2, 3)):
            if self.one_of(True, False, False):
                self.comment()
            self.put("\n")
            self.optional_space()

    def optional_statement_end(self) -> None:
        """Optional separators at the start or the end of a file or a block."""
        if self.one_of(True, False):
            self.statement_end()

    def separated(self, items: Any, write: Callable[[Any], None], trailing: bool = False) -> None:
        for i, item in enumerate(items):
            if i:
                self.put(",")
                self.line_continuation()
            write(item)
        if trailing and items and self.one_of(True, False, False):
            self.line_continuation()
            self.put(",")

    # ---- numbers

    def integer(self, value: int) -> None:
        text = str(value)
        if len(text) > 3 and self.one_of(True, False):
            text = f"{value:_}"
        self.put(text)

    def number(self, value: int) -> None:
        """A number in a predicate, possibly with an exponent."""
        zeros = len(str(value)) - len(str(value).rstrip("0"))
        if value and zeros and self.one_of(True, False):
            self.put(f"{value // 10**zeros}{self.one_of('e', 'E')}{zeros}")
        else:
            self.integer(value)

    def bound(self, bound: Bound) -> None:
        if not bound.percent:
            self.put(str(int(bound.value)))
            return
        hundredths = abs(int(bound.value * 100))
        sign = "-" if bound.value < 0 else ""
        whole, part = divmod(hundredths, 100)
        self.put(f"{sign}{whole}%" if part == 0 and self.one_of(True, False) else f"{sign}{whole}.{part:02}%")

    # ---- selectors

    def selector(self, selector: Selector) -> None:
        if selector.anchored:
            self.put("^")
            self.optional_space()
        for i, segment in enumerate(selector.segments):
            if i:
                self.put(".")
                self.line_continuation()
            self.segment(segment)
        if selector.products != ALL:
            self.optional_space()
            self.put("@")
            self.line_continuation()
            self.products(selector.products)

    def segment(self, segment: SelectorSegment) -> None:
        glob = segment.glob.replace("*", self.one_of("*", "*", "**"))
        if "{" in glob:
            glob = glob.replace(",", self.one_of(",", " , ", ", "))
        self.put(glob)
        if segment.indices is None:
            return
        indices = segment.indices
        self.put("[")
        self.line_continuation()
        if indices.index is not None:
            self.put(str(indices.index))
        else:
            if indices.start is not None:
                self.bound(indices.start)
                self.line_continuation()
            self.put(":")
            if indices.stop is not None:
                self.line_continuation()
                self.bound(indices.stop)
            if indices.step is not None:
                self.put(":", str(indices.step))
            elif self.one_of(True, False, False):
                self.put(":")
        self.line_continuation()
        self.put("]")

    def products(self, gemms: frozenset[Gemm]) -> None:
        listed = [str(g) for g in self.shuffled(sorted(gemms))]
        if Gemm.DGRAD in gemms and Gemm.WGRAD in gemms and self.one_of(True, False):
            listed = [w for w in listed if w == "fprop"] + ["bwd"]
        if self.one_of(True, False):
            self.put("{", ", ".join(listed), "}")
        else:
            self.separated(listed, self.put)

    # ---- predicates

    def predicate(self, node: Any, outer_precedence: int = 0) -> None:
        """Writes a predicate, in parentheses if needed. Precedences: `or` 1, `and` 2, `not` 3."""
        precedence = 1 if isinstance(node, AnyOf) else 2 if isinstance(node, AllOf) else 4
        if precedence <= outer_precedence or self.one_of(True, False, False, False):
            self.put("(")
            self.line_continuation()
            self.bare_predicate(node)
            self.line_continuation()
            self.put(")")
        else:
            self.bare_predicate(node)

    def bare_predicate(self, node: Any) -> None:
        match node:
            case AnyOf() | AllOf():
                word, precedence = ("or", 1) if isinstance(node, AnyOf) else ("and", 2)
                for i, operand in enumerate(node.operands):
                    if i:
                        self.space()
                        self.put(word, " ")
                        self.line_continuation()
                    self.predicate(operand, precedence)
            case Not():
                self.put("not ")
                self.line_continuation()
                self.predicate(node.operand, 3)
            case Comparison():
                for i, term in enumerate(node.terms):
                    if i:
                        self.optional_space()
                        self.put(node.operators[i - 1])
                        self.line_continuation()
                    self.term(term)
            case Flag():
                self.put(node.name)

    def term(self, term: Term) -> None:
        self.operand(term.value)
        if term.modulus is not None:
            self.optional_space()
            self.put("%")
            self.line_continuation()
            self.operand(term.modulus)

    def operand(self, value: str | int | Bound) -> None:
        if isinstance(value, str):
            self.put(value)
        elif isinstance(value, Bound):
            self.bound(value)
        else:
            self.number(value)

    # ---- recipes

    def recipe(self, node: Any) -> None:
        if isinstance(node, RecipeCall):
            self.put(node.name)
            if node.settings or self.one_of(True, False, False, False):
                self.brackets(lambda: self.separated(node.settings, self.setting, trailing=True))
            return
        parts = [(str(gemm), part) for gemm, part in self.shuffled(node.parts)]
        by_name = dict(parts)
        is_same = by_name.get("dgrad") is not None and by_name.get("dgrad") == by_name.get("wgrad")
        if is_same and self.one_of(True, False):
            parts = [(n, p) for n, p in parts if n == "fprop"] + [("bwd", by_name["dgrad"])]
        self.put("split")
        self.brackets(lambda: self.separated(parts, self.part, trailing=True))

    def brackets(self, write: Callable[[], None]) -> None:
        self.optional_space()
        self.put("(")
        self.line_continuation()
        write()
        self.line_continuation()
        self.put(")")

    def part(self, part: tuple[str, Any]) -> None:
        self.put(part[0])
        self.line_continuation()
        self.put("=")
        self.line_continuation()
        self.recipe(part[1])

    def setting(self, setting: Setting) -> None:
        self.put(setting.name)
        if not setting.values:
            return
        self.line_continuation()
        self.put("=")
        self.line_continuation()
        spelled = [self.synonym(w) for w in setting.values]
        if len(spelled) > 1 or self.one_of(True, False, False):
            self.put("{", self.one_of(",", ", ", " ,").join(spelled), self.one_of("", ","), "}")
        else:
            self.put(spelled[0])

    def synonym(self, word: str) -> str:
        gemm, dot, role = word.rpartition(".")
        return gemm + dot + self.one_of(*SYNONYMS[role]) if role in SYNONYMS else word

    # ---- statements

    def definition(self, node: RecipeDef) -> None:
        self.put("recipe ", node.name)
        self.optional_space()
        self.put("=")
        self.line_continuation()
        self.recipe(node.recipe)

    def rule(self, rule: Rule) -> None:
        self.separated(rule.selectors, self.selector)
        if rule.selectors[-1].products == ALL:
            self.put(self.one_of("", "", "", "@{dgrad, wgrad,fprop}", " @ bwd, fprop"))
        if rule.where is not None:
            self.put(" where ")
            self.line_continuation()
            self.predicate(rule.where)
        self.put(" ")
        self.put("->")
        self.line_continuation()
        self.recipe(rule.recipe)
        if rule.expect is not None:
            self.put(" expect ")
            self.integer(rule.expect)

    def block(self, head: Callable[[], None], body: Callable[[], None]) -> None:
        head()
        self.put(" {")
        body()
        self.put("}")

    def scheduled_rules(self, conditions: tuple[StepCondition, ...], group: list[Rule]) -> None:
        if not conditions:
            self.body([lambda r=r: self.rule(r) for r in group])
            return

        def head() -> None:
            self.put(conditions[0].kind)
            self.space()
            self.bound(conditions[0].bound)

        def body() -> None:
            self.optional_statement_end()
            self.scheduled_rules(conditions[1:], group)
            self.optional_statement_end()

        self.block(head, body)

    def variant(self, variant: Variant) -> None:
        self.block(
            lambda: self.put("variant ", variant.name),
            lambda: self.statements(variant.seed_statement, variant.recipes, variant.rules, ()),
        )

    def body(self, statements: list[Callable[[], None]]) -> None:
        for i, statement in enumerate(statements):
            if i:
                self.statement_end()
            statement()

    def seed(self, node: Seed) -> None:
        self.put("seed")
        self.optional_space()
        self.put("=")
        self.line_continuation()
        self.integer(node.value)

    def statements(self, seed: Any, recipes: Any, rules: Any, variants: Any) -> None:
        """Seed, recipes, rules and variants, interleaved. Statements of one kind keep their order."""
        queues: list[list[Callable[[], None]]] = [
            [] if seed is None else [lambda: self.seed(seed)],
            [lambda d=d: self.definition(d) for d in recipes],
            [
                lambda c=conditions, g=tuple(group): self.scheduled_rules(c, list(g))
                for conditions, group in groupby(rules, key=lambda r: r.when)
            ],
            [lambda v=v: self.variant(v) for v in variants],
        ]
        mixed: list[Callable[[], None]] = []
        while any(queues):
            nonempty = [queue for queue in queues if queue]
            mixed.append(self.one_of(*nonempty).pop(0))
        self.optional_statement_end()
        self.body(mixed)
        self.optional_statement_end()


@st.composite
def spelled(draw: Callable[..., Any], policy: Policy, commented: bool = True) -> tuple[str, list[str]]:
    """A text of a policy, and the comments in it."""
    writer = _Writer(draw(st.binary(max_size=300)), commented)
    writer.statements(policy.seed_statement, policy.recipes, policy.rules, policy.variants)
    text = "".join(writer.out)
    if writer.one_of(True, False):
        text = text.removesuffix("\n")
    return (text.replace("\n", "\r\n") if writer.one_of(True, False, False) else text), writer.comments


@st.composite
def texts(draw: Callable[..., Any], commented: bool = True) -> tuple[Policy, str, list[str]]:
    """A policy, a text of it, and the comments in the text."""
    policy = draw(policies())
    text, comments = draw(spelled(policy, commented))
    return policy, text, comments


# ---- texts with errors

_INSERTED = (
    *"{}()[]->=@#;,.*\n\"'%^\\:?~_!$/\x00\r\u2028é", "->", "=>", "recipe ", "after 5% {", "variant v {", "where ",
    "expect ", "and ", "not ", "split(", "nvfp4(sr=", "-15%", "1e9", "1.5", "fprop", "{a,b}", "[0]", "a -> bf16\n",
    "# c\n", "seed = 1", "import ",
)  # fmt: skip


@st.composite
def damaged_texts(draw: Callable[..., Any]) -> str:
    """A text of a policy, or a bundled one, after a few edits: a piece is deleted, repeated or inserted."""
    bundled = [path.read_text(encoding="utf-8") for path in bundled_policies().values()]
    text = draw(st.one_of(texts().map(lambda drawn: drawn[1]), st.sampled_from(bundled)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from([0, 0, 1, 1, 3, 9, 40])))
        inserted = draw(st.sampled_from(["", text[start:end] * 2, *_INSERTED]))
        text = text[:start] + inserted + text[end:]
    return text
