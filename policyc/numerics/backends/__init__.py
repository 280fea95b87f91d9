"""The backends that run quantized GEMMs: one module each, imported on first use.

To add a backend, write a module with a `BACKEND`, which implements `backend.Backend`, and add its row to the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from typing import Literal, cast

from policyc.numerics.backends.backend import Backend, GemmQuery, Obstacle

__all__ = [
    "MODULES",
    "NAMES",
    "PRICED",
    "TITLES",
    "Backend",
    "BackendName",
    "GemmQuery",
    "Obstacle",
    "join_titles",
    "load",
    "preferred",
    "title",
]

MODULES: dict[str, str] = {
    "emulate": "policyc.numerics.backends.emulate",
    "xla": "policyc.numerics.backends.xla",
    "te": "policyc.numerics.backends.te",
    "cudnn": "policyc.numerics.backends.cudnn",
}
"""The module of each backend. `auto` prefers later ones."""

BackendName = Literal["auto", "emulate", "xla", "te", "cudnn"]

NAMES = ("auto", *MODULES)
"""The values of `--backend`."""

PRICED: BackendName = "te"
"""The default backend of predictions: what a user of Blackwell would run, whatever is installed here."""


TITLES = {"emulate": "emulation", "xla": "XLA", "te": "Transformer Engine", "cudnn": "cuDNN"}


def title(name: str) -> str:
    """The name of a backend for people. `te`, the value of an option, reads like the policy te_nvfp4."""
    return TITLES.get(name, name)


def join_titles(names: Iterable[str]) -> str:
    """Several backends in a sentence: "Transformer Engine and XLA"."""
    return " and ".join(map(title, names))


@cache
def load(name: str) -> Backend:
    """A backend."""
    return cast("Backend", importlib.import_module(MODULES[name]).BACKEND)


def preferred() -> tuple[str, ...]:
    """The names of all backends, in the order in which `auto` tries them."""
    return tuple(reversed(MODULES))
