"""Calls a function when the program imports a module."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def on_import(name: str, callback: Callable[[], None]) -> Iterator[None]:
    """Calls a function once: right after the first import of a module, or now if it is imported already."""
    if name in sys.modules:
        callback()
        yield
        return
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _Finder(MetaPathFinder):
    """Finds a module as the other finders do, and has its loader call a function after it has run the module."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback
        self._is_searching = False

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # a method of this one loader is replaced, until it has run
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = run
            run(module)
            self.remove()
            self._callback()

        loader.exec_module = exec_module
        return spec
