"""`policyc completion`: prints the script that lets a shell complete policyc."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

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
    from policyc.cli import shells  # registers bash

    del shells
    group = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(group, {}, "policyc", COMPLETE_VARIABLE).source())
