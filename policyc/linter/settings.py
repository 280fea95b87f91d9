"""Reads the table `[tool.policyc]` of pyproject.toml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_MAX_BYTES = 2**20  # of a pyproject.toml; a thousand times a usual one


class BadSettings(ValueError):
    """The table cannot be read, or has a fault. The message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A project's settings for `policyc lint` and for editors. Command-line options replace them.

    No setting names a program: the file may be someone else's. In an editor, `sites` is relative to `folder`, the
    folder of pyproject.toml.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    target: str | None = None
    sites: str | None = None
    folder: Path = Path()


def read_settings(folder: Path | None = None) -> Settings:
    """Reads the nearest pyproject.toml in a folder (default: the current one) or above it. Raises BadSettings."""
    folder = Path.cwd() if folder is None else folder
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return _parse(path)
    return Settings()


def _parse(path: Path) -> Settings:
    import tomllib  # imported here: most folders have no such file, and it takes a thirtieth of lint's start-up

    from policyc.base.files import read_file
    from policyc.base.text import did_you_mean

    try:
        content = tomllib.loads(read_file(path, _MAX_BYTES).decode("utf-8"))
        table = dict(content.get("tool", {}).get("policyc", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadSettings(f"'{path}' cannot be read: {error}") from None
    known = [field.name for field in fields(Settings) if field.name != "folder"]
    for name in table:
        if name not in known:
            help = did_you_mean(name, known) or f"known settings: {', '.join(known)}"
            if name == "program":
                help = "a file starts no program; name it after the policy: policyc lint POLICY train.py"
            raise BadSettings(f"{path}: [tool.policyc] has no setting '{name}': {help}")
    values: dict[str, Any] = {
        name: _codes(path, name, table[name]) for name in ("select", "ignore") if name in table
    }
    for name in ("target", "sites"):
        if name in table and not isinstance(table[name], str):
            raise BadSettings(f"{path}: [tool.policyc] {name} is not a string")
    return Settings(target=table.get("target"), sites=table.get("sites"), folder=path.parent, **values)


def _codes(path: Path, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(code, str) for code in value):
        raise BadSettings(f"{path}: [tool.policyc] {name} is not a list of codes, such as ['padded-gemm']")
    return tuple(value)
