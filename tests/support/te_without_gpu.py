"""Transformer Engine on a machine without a GPU: it is imported, traced and lowered for CUDA; no kernel can run."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

BLACKWELL = 100


class CannotImport(Exception):
    """Why Transformer Engine is not to be had here."""


def imported() -> Any:
    """`transformer_engine.jax`, told that the GPU is a Blackwell one."""
    try:
        _driver()
        import nvidia.nccl

        ctypes.CDLL(str(Path(next(iter(nvidia.nccl.__path__))) / "lib/libnccl.so.2"), mode=ctypes.RTLD_GLOBAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformer_engine.jax as te
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        raise CannotImport(f"Transformer Engine cannot be imported ({error}): run `make test-te`") from error
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and hasattr(module, "get_device_compute_capability"):
            module.get_device_compute_capability = lambda gpu=0: BLACKWELL
    return te


def _driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise CannotImport("there is no CUDA driver, and no C compiler to make a stub of it") from None
        with tempfile.TemporaryDirectory() as folder:
            stub = str(Path(folder) / "libcuda.so.1")
            source = Path(__file__).parents[1] / "data" / "libcuda_stub.c"
            command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", stub, str(source)]
            subprocess.run(command, check=True)
            ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True)
class Call:
    """A call of Transformer Engine in a lowered program: in which scope, with which attributes and operands."""

    name: str
    scope: str
    attributes: dict[str, Any]
    operands: tuple[str, ...]
    results: tuple[str, ...]


def calls(lowered: Any) -> list[Call]:
    """All of them, in their order: one in a function that is called twice, twice; one in a loop's body, once."""
    functions = {
        op.attributes["sym_name"].value: op for op in lowered.compiler_ir(dialect="stablehlo").body.operations
    }
    return list(_calls(functions["main"], functions, ""))


def _calls(op: Any, functions: dict[str, Any], scope: str) -> Iterator[Call]:
    for inner in (i for region in op.regions for block in region.blocks for i in block.operations):
        operation = inner.operation
        here = scope + str(operation.location)
        if operation.name == "func.call":
            yield from _calls(functions[operation.attributes["callee"].value], functions, here)
        elif operation.name == "stablehlo.custom_call":
            name = operation.attributes["call_target_name"].value
            if name.startswith("te_"):
                yield Call(
                    name.removeprefix("te_").removesuffix("_ffi"),
                    here,
                    _plain(operation.attributes["mhlo.backend_config"]),
                    tuple(str(o.type) for o in operation.operands),
                    tuple(str(r.type) for r in operation.results),
                )
        else:
            yield from _calls(operation, functions, scope)


def _plain(attribute: Any) -> Any:
    """An attribute of MLIR as Python has it."""
    if hasattr(attribute, "value"):
        return attribute.value
    return {entry.name: _plain(entry.attr) for entry in attribute}


def for_cuda(f: Any, *args: Any) -> Any:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
