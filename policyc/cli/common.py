"""What the verbs share: help with examples, colours, exit codes, and how an error ends a command.

In: words and errors. Out: text on the terminal, and exits. The one trap: nothing here may import what is slow, since
`--help` of every verb loads it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from policyc.language.files import atomic_write

if TYPE_CHECKING:
    from policyc.language.diagnostics import PolicyError
    from policyc.language.policy import Policy

CLEAN, FOUND, FAILED = 0, 1, 2  # exit codes

_STYLES = {
    "error": {"fg": "red", "bold": True}, "warning": {"fg": "yellow", "bold": True}, "path": {"bold": True},
    "gutter": {"fg": "blue"}, "caret": {"fg": "red"}, "help": {"fg": "cyan"}, "note": {"fg": "blue"},
}  # fmt: skip


def paint(kind: str, text: str) -> str:
    return click.style(text, **_STYLES.get(kind, {}))  # type: ignore[arg-type]  # the table above holds style names


def colour() -> bool | None:
    """None lets click look at the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


class Examples(click.Command):
    """A command whose help ends in examples, as they are written."""

    def __init__(self, *args: object, examples: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # handed through to click
        self.examples = examples

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


# ---- reading


def policy_of(name: str, variant: str | None) -> Policy:
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import load

    try:
        policy = load(name)
        return policy if variant is None else policy.variant(variant)
    except PolicyError as error:
        say(error)
        sys.exit(FAILED)
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None


def stdin() -> str:
    from policyc.language.loader import unreadable

    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise unreadable("<stdin>", f"byte {error.start} is not UTF-8") from None


def near(code: str, known: Iterable[str]) -> str:
    from policyc.language.diagnostics import did_you_mean

    return did_you_mean(code, known) or "'policyc explain' lists them all"


# ---- writing


def writable(name: str, path: Path) -> Path:
    """Bundled policies belong to the installation: a copy may be changed, not they."""
    from policyc.language.loader import unreadable

    if not path.exists() or Path(name).exists():
        return path
    help = f"copy it: policyc show {name} --format text > my_{name}.policy"
    raise unreadable(name, "this is a bundled policy, and not yours to change", help)


def replace(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it sees the old text or the new one. Links and line ends stay."""
    from policyc.language.loader import unreadable

    target = path.resolve()
    try:
        mode = target.stat().st_mode
        if b"\r\n" in target.read_bytes():
            text = text.replace("\n", "\r\n")
        with atomic_write(target, mode & 0o7777) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        raise unreadable(str(path), f"cannot be written: {error.strerror}") from None


def write_out(option: str, path: str, text: str) -> None:
    """Writes what an option asked for, in one go."""
    try:
        with atomic_write(Path(path)) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        stop(f"{option}: '{path}' cannot be written: {error.strerror}")


# ---- ending


def say(error: Exception) -> None:
    click.echo(str(error), err=True)


def stop(message: str) -> NoReturn:
    click.echo(f"policyc: error: {message}", err=True)
    sys.stdout.flush()
    sys.exit(FOUND)


def fail(error: PolicyError) -> NoReturn:
    from policyc.language.diagnostics import render

    click.echo("\n".join(render(d, paint) for d in error.diagnostics), err=True, color=colour())
    unread = any(d.code == "unreadable-file" for d in error.diagnostics)
    sys.exit(FAILED if unread else FOUND)
