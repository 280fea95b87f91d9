"""A fuzzer of policies: mutated texts, and the properties that every text must have.

`inputs(seed)` yields texts without end: pieces of the bundled policies and of the examples in docs/, cut, joined and
repeated, with tokens and unusual characters inserted; and random sequences of tokens. `check(text)` asserts the
properties. The texts are short, so that a hundred thousand take minutes. test_abuse.py tests large ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import PolicyError, SourceText
from policyc.language.formatter import format_text
from policyc.language.loader import parse, parse_with_diagnostics
from policyc.language.parser import PolicyFile, read_statements
from tests.support.processor_time import TooSlow, at_most

MAX_SECONDS = 5.0  # of processor time for one input. A few milliseconds are usual, so this means a hang

TOKENS = (
    "->", "=>", "->", ";", "\n", "\n", " ", " ", "\t", "\r\n", "#", "# c\n", "# allow: x\n", ",", ",", ".", ".", "*",
    "**", "?", "^", "@", "=", "==", "!=", "<", "<=", ">", ">=", "%", ":", "-", "_", "~", "(", ")", "[", "]", "{", "}",
    "{", "}", '"', "'", "import ", "recipe ", "after ", "until ", "variant ", "where ", "expect ", "and ", "or ",
    "not ", "fprop", "dgrad", "wgrad", "bwd", "weight", "k", "m", "n", "batch", "flops", "0", "1", "16", "007", "82%",
    "-15%", "100%", "1e9", "1e18", "1_000", "17/16", "1.5", "nvfp4", "mxfp4", "mxfp8", "fp8", "fp4", "bf16", "f32",
    "keep", "split", "rht=", "sr=", "grad", "weights", "scale2d=", "rounding=ms_eden", "mean_split", "mlp", "layers",
    "layer", "-4", "15%",
    "nv", "attention", "{a,b}", "[0]", "[-4:]", "[::2]", "a -> bf16", "mlp.* -> nv", '"te_nvfp4"', '"fuzz_self"', "\f",
    "\0", "\x1b[31m", "é", "名", "\u2028", "\u00a0", "\ufeff", "\ud800", "٣", "²", "\\", "$", "/", "//", "&&", "||",
    "!",
)  # fmt: skip

WRAPS = ("({})", "[{}]", "{{{}}}", "after 5% {{ {} }}", "variant v {{ {} }}", "split(bwd={})")


@cache
def corpus() -> list[str]:
    """Lines and paragraphs of the bundled policies and of the examples in the documentation."""
    texts = [path.read_text(encoding="utf-8") for path in bundled_policies().values()]
    docs = Path(__file__).parents[2] / "docs"
    for page in sorted(docs.rglob("*.md")):
        texts += re.findall(r"```policy\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    pieces = {piece.strip() for text in texts for piece in re.split(r"\n\n+", text)}
    lines = {line.strip() for text in texts for line in text.split("\n")}
    return sorted(p for p in pieces | lines if 0 < len(p) <= 400)


def inputs(seed: int) -> Iterator[str]:
    """Yields mutated policies, the same for the same seed."""
    rng = random.Random(seed)
    pieces = corpus()
    while True:
        if rng.random() < 0.15:
            yield "".join(rng.choice(TOKENS) for _ in range(rng.randint(1, 30)))
            continue
        separator = rng.choice(["\n", "\n\n", "; ", " ", ""])
        text = separator.join(rng.choice(pieces) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
            text = _mutate(rng, text)
        yield text[:2000]


def _mutate(rng: random.Random, text: str) -> str:
    """Deletes, repeats, reverses, replaces or wraps a part of the text, or truncates it."""
    start = rng.randint(0, len(text))
    end = min(len(text), start + rng.choice((0, 1, 1, 2, 3, 5, 8, 13, 40)))
    match rng.randrange(9):
        case 0:
            return text[:start] + text[end:]
        case 1:
            return text[:end] + text[start:end] * rng.choice((1, 1, 2, 3, 40)) + text[end:]
        case 2:
            return text[:start]
        case 3:
            return text[:start] + text[start:end][::-1] + text[end:]
        case 4:
            return text[:start] + chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) + text[end:]
        case 5:
            wrap = rng.choice(WRAPS)
            if rng.random() < 0.5:
                return wrap.format(text)
            return text[:start] + wrap.format(text[start:end]) + text[end:]
        case _:
            return text[:start] + rng.choice(TOKENS) + text[end:]


def check(text: str, folder: Path) -> bool:
    """Asserts what must hold for every text. Returns whether it is a valid policy.

    Its imports are resolved in `folder`.
    """
    loaded = parse_with_diagnostics(text, path=folder / "fuzz_self.policy")
    file, is_valid = loaded.file, not loaded.diagnostics
    if is_valid:
        printed = str(loaded.policy)
        reparsed = parse(printed)
        assert reparsed == loaded.policy, "printing and parsing is not the identity"
        assert str(reparsed) == printed
        _check_formatting(file)
        return True
    _check_diagnostics(PolicyError(loaded.diagnostics))
    if any(d.code == "syntax-error" and d.span.source is file.source for d in loaded.diagnostics):
        assert format_text(file.source.text) is None
        return False
    file, diagnostics = read_statements(file.source)
    if not diagnostics:  # it can be parsed, and so formatted, although names or imports in it are wrong
        _check_formatting(file)
    return False


def _check_formatting(file: PolicyFile) -> None:
    formatted = format_text(file.source.text)
    reread, diagnostics = read_statements(SourceText(formatted))
    assert not diagnostics
    assert format_text(reread.source.text) == formatted, "formatting twice is not formatting once"
    assert reread.statements == file.statements


def _check_diagnostics(error: PolicyError) -> None:
    assert error.diagnostics
    for diagnostic in error.diagnostics:
        assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", diagnostic.code)
        assert diagnostic.message
        for span in (diagnostic.span, *(note.span for note in diagnostic.notes)):
            assert 0 <= span.start <= span.end <= len(span.source.text)
    assert all(line.isprintable() for line in str(error).split("\n"))


def run(seed: int, count: int, folder: Path) -> int:
    """Checks `count` inputs. Returns how many of them are valid policies."""
    valid = 0
    for number, text in zip(range(count), inputs(seed), strict=False):
        try:
            with at_most(MAX_SECONDS):
                valid += check(text, folder)
        except (Exception, TooSlow) as error:
            raise AssertionError(
                f"seed {seed}, input {number}: {type(error).__name__} on {text!r}"
            ) from error
    return valid
