"""Help with examples, colors, exit codes, and file input and output for the commands.

Import slow modules inside functions: every `--help` loads this module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from policyc.base.files import atomic_write, open_output
from policyc.base.progress import stage

if TYPE_CHECKING:
    from policyc.language.diagnostics import PolicyError
    from policyc.language.policy import Policy
    from policyc.serving.llama_source import LlamaSource

EXIT_OK = 0
EXIT_FAILURE = 1  # lint findings, a faulty policy, or a request that cannot be met
EXIT_USAGE = 2  # wrong usage, or a file that cannot be read or written


def load_jax() -> None:
    """Imports JAX, which takes seconds on a slow disk, so that the terminal says what it waits for."""
    with stage("loading JAX"):
        importlib.import_module("jax")


_STYLES: dict[str, dict[str, Any]] = {
    "error": {"fg": "red", "bold": True}, "warning": {"fg": "yellow", "bold": True}, "path": {"bold": True},
    "gutter": {"fg": "blue"}, "caret": {"fg": "red"}, "help": {"fg": "cyan"}, "note": {"fg": "blue"},
    "added": {"fg": "green"}, "removed": {"fg": "red"}, "header": {"bold": True}, "rule": {"fg": "cyan"},
    "dim": {"dim": True},
}  # fmt: skip


def paint(kind: str, text: str) -> str:
    """Colors text by its kind. A `Paint` for diagnostics and diffs."""
    return click.style(text, **_STYLES.get(kind, {}))


def use_color() -> bool | None:
    """Whether to print colors, from NO_COLOR and FORCE_COLOR. None: click decides by the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


class ExampleCommand(click.Command):
    """A command whose help ends with examples, printed exactly as written."""

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


# ---- input


def is_policy(word: str) -> bool:
    """Whether a word names a policy, or a variant of one."""
    from policyc.language.bundled import POLICY_SUFFIX, RECOMMENDED, bundled_policies
    from policyc.language.loader import split_variant

    name = str(split_variant(word)[0])
    return name.endswith(POLICY_SUFFIX) or name in bundled_policies() or name == RECOMMENDED


def load_unless_recommended(word: str) -> Policy | None:
    """Loads `POLICY[:VARIANT]`; None for `recommended`, which is chosen once the program is traced."""
    from policyc.language.bundled import RECOMMENDED

    return None if word == RECOMMENDED else load_policy(word)


def load_policy(word: str) -> Policy:
    """Loads `POLICY[:VARIANT]`: a path or a bundled name. Exits if that fails."""
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import load

    try:
        return load(word)
    except PolicyError as error:
        exit_with_diagnostics(error)


def choose_policy(source: LlamaSource, name: str | None) -> Policy:
    """The named policy, or that of the run. Prints a note if they differ. Raises ValueError if there is neither."""
    if name is None:
        return source.trained_policy
    policy = load_policy(name)
    if source.policy is not None and source.policy.sha256 != policy.sha256:
        print_note(f"the run was trained under another policy: 'policyc diff {name} --vs {source.folder} --config ...' "
                   "shows the difference", "warning")  # fmt: skip
    return policy


def read_stdin() -> str:
    """Reads a policy from standard input. Raises PolicyError if it is not UTF-8."""
    from policyc.language.bundled import unreadable_file_error

    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise unreadable_file_error("<stdin>", f"byte {error.start} is not UTF-8") from None


def expand_folders(names: Sequence[str]) -> tuple[str, ...]:
    """Replaces each folder by the policies in it and below it, in alphabetical order. Hidden folders are left out.

    A folder without policies stays, so that reading it is an error.
    """
    from policyc.language.bundled import POLICY_SUFFIX, bundled_policies

    expanded: list[str] = []
    for name in names:
        policies: list[str] = []
        if name not in bundled_policies() and os.path.isdir(name):
            for folder, folders, files in os.walk(name):
                folders[:] = [f for f in folders if not f.startswith(".")]
                policies += [os.path.join(folder, file) for file in files if file.endswith(POLICY_SUFFIX)]
        expanded += sorted(policies) or [name]
    return tuple(expanded)


# ---- output


def check_writable(name: str, path: Path) -> Path:
    """Returns `path`, or raises PolicyError if `name` is a bundled policy: those are part of the installation."""
    from policyc.language.bundled import unreadable_file_error

    if not path.exists() or Path(name).exists():
        return path
    help = f"copy it: policyc show {name} --out my_{name}.policy"
    raise unreadable_file_error(name, "this is a bundled policy, which cannot be changed", help)


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically. Keeps its mode, its line endings, and a symbolic link to it."""
    from policyc.language.bundled import unreadable_file_error

    try:
        if b"\r\n" in path.read_bytes():
            text = text.replace("\n", "\r\n")
        with atomic_write(path) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        raise unreadable_file_error(str(path), f"cannot be written: {error.strerror}") from None


def write_output(option: str, path: str, text: str) -> None:
    """Writes the file that an option names, atomically; `-` is standard output. Exits if it cannot be written."""
    try:
        with open_output(path) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        exit_with_message(f"{option}: '{path}' cannot be written: {error.strerror}", EXIT_USAGE)


def print_or_write(text: str, out: str | None) -> None:
    """Prints the output of a command, or writes it to the file of `--out`."""
    if out is None:
        click.echo(text, nl=False, color=use_color())
    else:
        write_output("--out", out, click.unstyle(text))


def unified_diff(name: str, before: str, after: str, context: int = 3, *, former_name: str = "") -> str:
    """Returns the changes of a file, colored, with lines of context around each."""
    import difflib

    from policyc.base.text import escape_controls

    colors = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), former_name or name, name, lineterm="", n=context
    )
    escaped = map(escape_controls, lines)
    return "".join(click.style(line, fg=colors.get(line[:1])) + "\n" for line in escaped)


# ---- errors


def print_diagnostics(error: PolicyError) -> None:
    from policyc.language.diagnostics import render

    click.echo("\n".join(render(d, paint) for d in error.diagnostics), err=True, color=use_color())


def print_note(text: str, label: str = "note") -> None:
    """Prints `policyc: label: text` to standard error, without control characters."""
    from policyc.base.text import escape_lines

    click.echo(f"policyc: {label}: {escape_lines(text)}", err=True)


def exit_with_message(message: str, code: int = EXIT_FAILURE) -> NoReturn:
    print_note(message, "error")
    sys.stdout.flush()
    sys.exit(code)


@contextlib.contextmanager
def usage_errors(kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turns exceptions of a kind, which the command line has caused, into usage errors."""
    try:
        yield
    except kind as error:
        raise click.UsageError(str(error.args[0] if isinstance(error, KeyError) else error)) from None


@contextlib.contextmanager
def explain_missing_package(extras: str) -> Iterator[None]:
    """If a package of some extras cannot be imported, says what to install, and exits."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("policyc"):
            raise
        exit_with_message(f"this needs the package '{error.name}': pip install 'policyc[{extras}]'")


def exit_with_diagnostics(error: PolicyError) -> NoReturn:
    print_diagnostics(error)
    names_nothing = any(d.code in ("unreadable-file", "unknown-variant") for d in error.diagnostics)
    sys.exit(EXIT_USAGE if names_nothing else EXIT_FAILURE)
