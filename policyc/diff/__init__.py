"""What a policy changes in a program: every equation before and after, as data, as text and as pictures.

`policyc.diff` is this package and a function at once: calling the package calls `api.diff`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = [
    "api", "build", "data", "dot", "earlier", "figures", "gradient", "graph", "linears", "matching", "model",
    "model_explorer", "overlays", "page", "predict", "repeats", "scopes", "svg", "terminal",
]  # fmt: skip


class _CallablePackage(ModuleType):
    """Python binds the name of a package in its parent, so the package itself has to be the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("policyc.diff.api").diff(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
