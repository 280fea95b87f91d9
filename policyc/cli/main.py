"""The `policyc` command and the table of its subcommands.

A command's module is imported when the command is looked up, and a command imports what it needs when it runs. So
`policyc --help` and `policyc lint` start without loading JAX.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from keyword import iskeyword
from typing import Any, cast

import click

from policyc import __version__
from policyc.cli.common import exit_with_message

COMMAND_GROUPS: dict[str, tuple[str, ...]] = {
    "Policies": ("show", "lint", "fmt", "explain", "import", "lsp"),
    "Programs": ("sites", "init", "diff", "apply", "estimate", "adopt", "compile"),
    "Experiments": ("train", "search", "bisect", "sweep", "report"),
    "Serving": ("export", "audit", "eval", "generate"),
    "Tools": ("quantize", "selftest", "targets", "data"),
}
"""The commands, in the order of the help. Command NAME is the function of that name in `policyc.cli.NAME`; a keyword
has a `_` appended."""

QUESTIONS = {
    "Which sites are there?": "policyc sites train.py",
    "What will a policy do?": "policyc diff llama_nvfp4 train.py",
    "Is that safe?": "policyc lint llama_nvfp4 train.py",
    "How much faster?": "policyc estimate llama_nvfp4 --vs bf16 train.py",
    "Does it cost loss?": "policyc sweep llama_nvfp4 train.py",
}

COMMANDS: tuple[str, ...] = tuple(name for names in COMMAND_GROUPS.values() for name in names)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are looked up. Errors are printed without control characters."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _escape_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _escape_errors():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from policyc.base.text import did_you_mean

        name = args[0]
        if ctx.resilient_parsing and name not in COMMANDS:  # a shell completes, and must see no error
            return None, None, args
        if name not in COMMANDS and not name.startswith("-"):
            help = did_you_mean(name, COMMANDS) or "'policyc --help' lists them all"
            raise click.UsageError(f"no command is named '{name}': {help}", ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        return cast(click.Command, getattr(import_module(f"policyc.cli.{name}"), name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in COMMAND_GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, command.get_short_help_str(80)) for name, command in commands if command],
                    col_max=10,
                )

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Questions"):
            formatter.write_dl(list(QUESTIONS.items()))


@contextlib.contextmanager
def _escape_errors() -> Iterator[None]:
    """Escapes control characters in error messages, which may quote the command line."""
    try:
        yield
    except click.ClickException as error:
        from policyc.base.text import escape_lines

        vars(error)["message"] = escape_lines(error.message)  # click declares it final
        raise


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="policyc")
def cli() -> None:
    """Precision policies for JAX training: write them, check them, apply them.

    A policy says, for every GEMM of a model, in which precision its three products run. POLICY[:VARIANT] is a path, or
    the name of a bundled policy, and one of its variants; 'policyc show' lists the bundled ones.
    """


def main() -> None:
    """The entry point of the `policyc` command. If a program was stopped midway, ends the process at once."""
    try:
        run_command()
    except SystemExit as end:
        processes = sys.modules.get("policyc.experiments.processes")  # if a program ran
        if processes is not None and isinstance(end.code, int):
            processes.end_after_abandoned_work(end.code)
        raise


def run_command() -> None:
    """Runs the command that `sys.argv` names. Raises SystemExit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.path[0] in ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))):
        del sys.path[0]  # Python put it there for this command. A program brings its own folder.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # print '?' where the encoding lacks a character
    try:
        cli.main(prog_name="policyc")
    except ImportError as error:
        if error.name != "jax":
            raise
        exit_with_message(str(error))  # JAX is missing, or its version is not supported


if __name__ == "__main__":
    main()
