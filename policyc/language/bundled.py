"""Where the data that ships with policyc lies: grammars, policies, models.

In: a folder's name. Out: its path. The one trap: a wheel holds these folders inside the package, a checkout
beside it.
"""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".policy"

_PACKAGE = Path(__file__).parent.parent


def folder(name: str) -> Path:
    """A data folder, in an installed wheel or in a checkout."""
    shipped = _PACKAGE / name
    return shipped if shipped.is_dir() else _PACKAGE.parent / name


def bundled() -> dict[str, Path]:
    """The bundled policies by name."""
    return {path.stem: path for path in sorted(folder("policies").glob(f"*{SUFFIX}"))}
