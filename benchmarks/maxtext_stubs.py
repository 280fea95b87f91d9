"""Runs MaxText's training with stubs for packages that a synthetic run does not use: see `maxtext_step`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import runpy
import sys
import types
from typing import Any

_NAMES = frozenset(
    {
        "cloud_tpu_diagnostics",
        "datasets",
        "fastapi",
        "google_cloud_mldiagnostics",
        "huggingface_hub",
        "ml_goodput_measurement",
        "opentelemetry",
        "pathwaysutils",
        "pyarrow",
        "sentencepiece",
        "tensorboard",
        "tensorboardX",
        "tensorflow",
        "tensorflow_datasets",
        "tensorflow_text",
        "tiktoken",
        "transformers",
        "tunix",
        "uvicorn",
        "vllm",
        "xprof",
    }
)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class _StubClass(type):
    """A class that has every attribute, and whose instances do nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubClass(name, (Exception,), {})


class _StubModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package: its modules are stubs, too

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubClass(name, (), {"__init__": _do_nothing, "__getattr__": lambda *_: _do_nothing})


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what no other finder has found."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        is_stub = name.partition(".")[0] in _NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if __name__ == "__main__":
    sys.meta_path.append(_StubFinder())
    runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__", alter_sys=True)
