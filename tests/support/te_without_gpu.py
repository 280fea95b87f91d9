"""Imports Transformer Engine on a machine without a GPU, and lowers its calls for CUDA. Its kernels cannot run."""

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
    """Transformer Engine cannot be imported here. The message says why."""


def import_engine() -> Any:
    """Imports `transformer_engine.jax`, and makes it report the compute capability of a Blackwell GPU."""
    try:
        _load_driver()
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


def _load_driver() -> None:
    """Loads the CUDA driver, or a stub if there is none."""
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


@dataclass(frozen=True, slots=True)
class Call:
    """A call of Transformer Engine in a lowered program: its scope, attributes, operands and results."""

    name: str
    scope: str
    attributes: dict[str, Any]
    operands: tuple[str, ...]
    results: tuple[str, ...]


def find_calls(lowered: Any) -> list[Call]:
    """All calls in program order. A call in a function that is called twice counts twice; in a loop body, once."""
    functions = {
        op.attributes["sym_name"].value: op for op in lowered.compiler_ir(dialect="stablehlo").body.operations
    }
    return list(_find_calls(functions["main"], functions, ""))


def _find_calls(op: Any, functions: dict[str, Any], scope: str) -> Iterator[Call]:
    for inner in (i for region in op.regions for block in region.blocks for i in block.operations):
        operation = inner.operation
        inner_scope = scope + str(operation.location)
        if operation.name == "func.call":
            yield from _find_calls(functions[operation.attributes["callee"].value], functions, inner_scope)
        elif operation.name == "stablehlo.custom_call":
            name = operation.attributes["call_target_name"].value
            if name.startswith(("te_", "policyc_te_")):
                yield Call(
                    name.removeprefix("te_").removesuffix("_ffi"),
                    inner_scope,
                    _as_python(operation.attributes["mhlo.backend_config"]),
                    tuple(str(o.type) for o in operation.operands),
                    tuple(str(r.type) for r in operation.results),
                )
        else:
            yield from _find_calls(operation, functions, scope)


def _as_python(attribute: Any) -> Any:
    """An MLIR attribute as a Python value."""
    if hasattr(attribute, "value"):
        return attribute.value
    return {entry.name: _as_python(entry.attr) for entry in attribute}


def lower_for_cuda(f: Any, *args: Any) -> Any:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
