"""Hooks of mkdocs: pages that are made from the program, and pages that load nothing from other servers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
from mkdocs.exceptions import PluginError

from policyc.cli.main import COMMANDS, cli
from policyc.linter.rules import ALL_RULES

ELSEWHERE = "https://unpkg.com/iframe-worker/shim"  # what the theme's plugin `offline` loads
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//[^ >]*|<link[^>]*rel="?stylesheet[^>]*//[^ >]*'
)


# ---- pages from the program


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adds the help of the commands, and the pages of the lint codes."""
    if page.file.src_uri == "reference/cli.md":
        return markdown + "\n".join(command_sections())
    if page.file.src_uri == "reference/lint.md":
        return markdown + "\n".join(code_pages())
    return markdown


def command_sections() -> Iterator[str]:
    """The help of every command, as sections with a table of options."""
    yield "\n## Options\n"
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        leaves = command.commands if isinstance(command, click.Group) else {"": command}
        for sub, leaf in leaves.items():
            yield (
                f"### policyc {name} {sub}\n\n"
                + inspect.cleandoc(leaf.help or "").partition("\n\n")[0]
                + "\n"
            )
            rows = [describe_option(p) for p in leaf.params if isinstance(p, click.Option) and not p.hidden]
            yield "\n".join(["| option | meaning |", "|---|---|", *rows, ""] if rows else [])


def describe_option(option: click.Option) -> str:
    """A row of a table, in the words of the help."""
    choices = getattr(option.type, "choices", ())
    value = (
        "" if option.is_flag else f" {option.metavar or ('NAME' if choices else option.type.name.upper())}"
    )
    text = re.sub(r"'([^' ][^']*)'", r"`\1`", option.help or "")
    text += f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    default = option.show_default if isinstance(option.show_default, str) else option.default
    if option.show_default and not option.is_flag and default is not None:
        text += f" Default: {default}." if isinstance(option.show_default, str) else f" Default: `{default}`."
    return f"| `{option.opts[0]}{value}` | {text} |".replace("|off", "\\|off").replace("|P", "\\|P")


def code_pages() -> Iterator[str]:
    """What `policyc explain` prints, as sections."""
    for rule in ALL_RULES.values():
        yield f"\n## {rule.code} ({rule.severity})\n\n{re.sub(r'^## ', '### ', rule.page, flags=re.MULTILINE)}\n"


# ---- nothing from other servers


def load_from_here(page: str, depth: int) -> str:
    """Takes our script instead of that of another host. `depth` is the number of folders that the page is in."""
    page = page.replace(ELSEWHERE, "../" * depth + "pictures/iframe_worker.js")
    if outside := LOADED.search(page):
        raise PluginError(f"a page loads something from another server: {outside[0]}")
    return page


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return load_from_here(output, page.url.count("/"))


def on_post_template(output_content: str, **_: Any) -> str:
    return load_from_here(output_content, 0)
