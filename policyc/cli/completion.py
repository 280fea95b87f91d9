"""`policyc completion`: shell completion of commands and options, and of the names of policies, GPUs, codes, ..."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import ClassVar

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from policyc.cli.common import COMPLETE_VARIABLE, ExampleCommand


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc completion bash     write into ~/.bashrc: eval "$(policyc completion bash)"
    policyc completion zsh      write into ~/.zshrc, after compinit: eval "$(policyc completion zsh)"
    policyc completion fish     write into ~/.config/fish/config.fish: policyc completion fish | source
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete policyc.

    It completes commands, options, bundled policies and their variants, GPUs, configurations and lint codes.
    """
    group = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(group, {}, "policyc", COMPLETE_VARIABLE).source())


# ---- names

_FindNames = Callable[[click.Context, str], Iterable[str]]
"""Lists possible names from the context of a command and the text typed so far."""


def _policy_names(_ctx: click.Context, incomplete: str) -> Iterable[str]:
    """Bundled policies; after a colon, the variants of a policy."""
    from policyc.language.bundled import bundled_policies

    policy, colon, _ = incomplete.rpartition(":")
    return [f"{policy}:{name}" for name in _variants(policy)] if colon else bundled_policies()


def _variants(policy: str) -> list[str]:
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import load

    try:
        return [variant.name for variant in load(policy).variants]
    except PolicyError:
        return []


def _training_values(ctx: click.Context, _incomplete: str) -> Iterable[str]:
    """Values for `--config` of the training program, whose options click does not parse."""
    words = ctx.params.get("arguments") or ("",)
    return _import("models.llama.configs", "CONFIGS") if words[-1] == "--config" else ()


def _import(module: str, name: str) -> Iterable[str]:
    names: Iterable[str] = getattr(import_module(f"policyc.{module}"), name)
    return names


_FINDERS: dict[str, _FindNames] = {
    "policy policies vs like words": _policy_names,
    "variants": lambda ctx, _: ("all", *_variants(ctx.params.get("policies") or "")),
    "target gpu": lambda *_: _import("numerics.targets", "TARGETS"),
    "config": lambda *_: _import("models.llama.configs", "CONFIGS"),
    "backend": lambda *_: _import("numerics.backends", "NAMES"),
    "select ignore codes": lambda *_: _import("linter.rules", "ALL_CODES"),
    "recipe": lambda *_: _import("language.formats", "FORMATS"),
    "arguments": _training_values,
    "program files folders array corpora": lambda *_: (),
}
"""The finders of names, by parameter. A parameter means the same in all commands. The shell itself adds paths."""


class CompletedText(click.types.StringParamType):
    """A text completed with known names, or else with paths. In a comma-separated list, the last item is completed."""

    def __init__(self, find_names: _FindNames) -> None:
        self._find_names = find_names

    def shell_complete(
        self, ctx: click.Context, _param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        names = [name for name in self._find_names(ctx, last) if name.startswith(last)]
        if not names:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(f"{before}{comma}{name}") for name in names]


def complete_texts(parameters: Iterable[click.Parameter]) -> None:
    """Lets a shell complete the text parameters of a command."""
    finders = {name: find for names, find in _FINDERS.items() for name in names.split()}
    for parameter in parameters:
        if parameter.name in finders and parameter.type in (click.STRING, click.UNPROCESSED):
            parameter.type = CompletedText(finders[parameter.name])


# ---- shells


@add_completion_class
class ColonComplete(BashComplete):
    """Completion for bash, which splits `llama_nvfp4:no_rht` into three words.

    It reads the command line unsplit, and returns only what follows the colon.
    """

    source_template: ClassVar[str] = BashComplete.source_template.replace(
        'COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD',
        'COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS"',
    )

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)
        incomplete = "" if line[-1:].isspace() else words.pop()
        return words[1:], incomplete

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        before, colon, _ = incomplete.rpartition(":")
        if colon in os.environ.get("COMP_WORDBREAKS", ""):
            for item in items:
                item.value = item.value.removeprefix(before + colon)
        return items


@add_completion_class
class CommaComplete(FishComplete):
    """Completion for fish. Unlike click's own, it does not cut a value at its first comma."""

    source_template: ClassVar[str] = FishComplete.source_template.replace(
        "string split", "string split --max 1"
    )
