"""A mutator of policies, and what must hold of whatever it makes.

`inputs(seed)` yields texts without end: pieces of the bundled policies and of the examples in docs/, cut, joined,
repeated, with tokens and odd characters put in, and soups of tokens. `check(text)` says what must hold of any text.
The one trap: the texts are short, so that a hundred thousand take minutes; size has tests of its own in test_abuse.py.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import PolicyError
from policyc.language.formatter import format_file
from policyc.language.loader import parse, parse_with_diagnostics
from policyc.language.parser import read_statements

SLOWEST = 5.0  # seconds for one input. A few milliseconds are usual: this is a hang, or the machine is

TOKENS = (
    "->", "=>", "->", ";", "\n", "\n", " ", " ", "\t", "\r\n", "#", "# c\n", "# allow: x\n", ",", ",", ".", ".", "*",
    "**", "?", "^", "@", "=", "==", "!=", "<", "<=", ">", ">=", "%", ":", "-", "_", "~", "(", ")", "[", "]", "{", "}",
    "{", "}", '"', "'", "import ", "recipe ", "after ", "until ", "variant ", "where ", "expect ", "and ", "or ",
    "not ", "fprop", "dgrad", "wgrad", "bwd", "weight", "k", "m", "n", "batch", "flops", "0", "1", "16", "007", "82%",
    "-15%", "100%", "1e9", "1e18", "1_000", "17/16", "1.5", "nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "f32", "keep",
    "split", "rht=", "sr=", "grad", "weights", "scale2d=", "rounding=ms_eden", "mean_split", "mlp", "layers", "nv",
    "attention", "{a,b}", "[0]", "[-4:]", "[::2]", "a -> bf16", "mlp.* -> nv", '"te_nvfp4"', '"fuzz_self"', "\f", "\0",
    "\x1b[31m", "é", "名", "\u2028", "\u00a0", "\ufeff", "\ud800", "٣", "²", "\\", "$", "/", "//", "&&", "||", "!",
)  # fmt: skip

WRAPS = ("({})", "[{}]", "{{{}}}", "after 5% {{ {} }}", "variant v {{ {} }}", "split(bwd={})")


@cache
def corpus() -> list[str]:
    """Statements, and short runs of them, from the bundled policies and the examples of the documentation."""
    texts = [path.read_text(encoding="utf-8") for path in bundled_policies().values()]
    docs = Path(__file__).parents[2] / "docs"
    for page in sorted(docs.glob("*.md")):
        texts += re.findall(r"```policy\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    pieces = {piece.strip() for text in texts for piece in re.split(r"\n\n+", text)}
    lines = {line.strip() for text in texts for line in text.split("\n")}
    return sorted(p for p in pieces | lines if 0 < len(p) <= 400)


def inputs(seed: int) -> Iterator[str]:
    """Mutated policies, the same for the same seed."""
    chance = random.Random(seed)
    pieces = corpus()
    while True:
        if chance.random() < 0.15:
            yield "".join(chance.choice(TOKENS) for _ in range(chance.randint(1, 30)))
            continue
        joint = chance.choice(["\n", "\n\n", "; ", " ", ""])
        text = joint.join(chance.choice(pieces) for _ in range(chance.choice((1, 1, 1, 2, 3))))
        for _ in range(chance.choice((0, 1, 1, 1, 2, 2, 3, 5, 8))):
            text = _mutated(chance, text)
        yield text[:2000]


def _mutated(chance: random.Random, text: str) -> str:
    at = chance.randint(0, len(text))
    end = min(len(text), at + chance.choice((0, 1, 1, 2, 3, 5, 8, 13, 40)))
    match chance.randrange(9):
        case 0:
            return text[:at] + text[end:]
        case 1:
            return text[:end] + text[at:end] * chance.choice((1, 1, 2, 3, 40)) + text[end:]
        case 2:
            return text[:at]
        case 3:
            return text[:at] + text[at:end][::-1] + text[end:]
        case 4:
            return (
                text[:at]
                + chr(chance.choice((chance.randrange(128), chance.randrange(0x110000))))
                + text[end:]
            )
        case 5:
            around = chance.choice(WRAPS)
            if chance.random() < 0.5:
                return around.format(text)
            return text[:at] + around.format(text[at:end]) + text[end:]
        case _:
            return text[:at] + chance.choice(TOKENS) + text[end:]


class TooSlow(BaseException):
    """An input took longer than any may. No `except Exception` on the way can catch it."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raises TooSlow after so many seconds: a hang becomes a failure that names its input."""

    def ring(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(text: str, folder: Path) -> bool:
    """What holds of every text. Says whether it is a policy. `folder` is where its imports are looked for."""
    loaded = parse_with_diagnostics(
        text, path=folder / "fuzz_self.policy"
    )  # as `parse` does, which then raises what was found
    file, sound, found = loaded.file, not loaded.diagnostics, ()
    if sound:
        printed = str(loaded.policy)
        again = parse(printed)
        assert again == loaded.policy, "printing and parsing is not the identity"
        assert str(again) == printed
    else:
        _check_faults(PolicyError(loaded.diagnostics))
        if any(d.code == "syntax-error" and d.span.source is file.source for d in loaded.diagnostics):
            return False
        file, found = read_statements(file.source)
    if not found:
        formatted = format_file(file)
        again, found = read_statements(type(file.source)(formatted))
        assert not found
        assert format_file(again) == formatted, "formatting twice is not formatting once"
        assert again.statements == file.statements
    return sound


def _check_faults(error: PolicyError) -> None:
    assert error.diagnostics
    for fault in error.diagnostics:
        assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", fault.code)
        assert fault.message
        for span in (fault.span, *(note.span for note in fault.notes)):
            assert 0 <= span.start <= span.end <= len(span.source.text)
    assert all(line.isprintable() for line in str(error).split("\n"))


def run(seed: int, count: int, folder: Path) -> int:
    """Checks so many inputs; hands back how many of them were policies."""
    sound = 0
    for number, text in zip(range(count), inputs(seed), strict=False):
        start = time.perf_counter()
        try:
            with alarm(4 * SLOWEST):
                sound += check(text, folder)
        except (Exception, TooSlow) as error:
            raise AssertionError(
                f"seed {seed}, input {number}: {type(error).__name__} on {text!r}"
            ) from error
        taken = time.perf_counter() - start
        assert taken < SLOWEST, f"seed {seed}, input {number} took {taken:.1f} s: {text!r}"
    return sound
