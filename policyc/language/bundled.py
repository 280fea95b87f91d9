"""Locates the data folders that ship with policyc: grammars, policies and models.

An installed wheel has these folders inside the package. In a checkout they lie beside it.
"""

from __future__ import annotations

from pathlib import Path

POLICY_SUFFIX = ".policy"

_PACKAGE = Path(__file__).parent.parent


def data_folder(name: str) -> Path:
    """Returns the path of a data folder."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def bundled_policies() -> dict[str, Path]:
    """Returns the paths of the bundled policies by name."""
    return {path.stem: path for path in sorted(data_folder("policies").glob(f"*{POLICY_SUFFIX}"))}
