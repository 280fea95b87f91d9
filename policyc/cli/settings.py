"""The table `[tool.policyc]` of pyproject.toml."""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a project sets for `policyc lint`. The options of the command line replace these."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target: str | None = None
    program: tuple[str, ...] = ()


def read_settings() -> Settings:
    """Reads the nearest pyproject.toml, in this folder or above it. Raises a usage error for a faulty table."""
    folder = Path.cwd()
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return _parse(path)
    return Settings()


def _parse(path: Path) -> Settings:
    from policyc.base.text import did_you_mean

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("policyc", {})
    except (OSError, ValueError) as error:
        raise click.UsageError(f"'{path}' cannot be read: {error}") from None
    known = [field.name for field in fields(Settings)]
    for name in table:
        if name not in known:
            help = did_you_mean(name, known) or f"known settings: {', '.join(known)}"
            raise click.UsageError(f"{path}: [tool.policyc] has no setting '{name}': {help}")
    values: dict[str, Any] = {
        name: _codes(path, name, table[name]) for name in ("select", "ignore") if name in table
    }
    for name in ("target", "program"):
        if name in table and not isinstance(table[name], str):
            raise click.UsageError(f"{path}: [tool.policyc] {name} is not a string")
    if "program" in table:
        values["program"] = tuple(shlex.split(table["program"]))
    return Settings(target=table.get("target"), **values)


def _codes(path: Path, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(code, str) for code in value):
        raise click.UsageError(
            f"{path}: [tool.policyc] {name} is not a list of codes, such as ['padded-gemm']"
        )
    return tuple(value)
