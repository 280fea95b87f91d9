"""Transformer Engine's kernel that writes rows and rotated columns in one pass, which its JAX extension does not call.

`te_one_pass.cc` wraps it as an XLA FFI call. It is compiled on first use and kept in the user's cache folder. Where
that is not possible, the backend makes two calls, and a warning says why.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp

from policyc.base.files import cache_folder
from policyc.numerics.backends.selftest_record import ONE_PASS, find_versions, read_failures

TARGET = "policyc_te_quantize_ffi"
"""The name of the call in a compiled program."""

VARIABLE = "POLICYC_TE_ONE_PASS"
"""The environment variable that disables the kernel if set to 0."""

_SOURCE = Path(__file__).with_suffix(".cc")


class CannotBuild(Exception):
    """Says why the call cannot be built on this machine."""


@cache
def find_obstacle() -> str:
    """Why the kernel is not used; empty if it is. Transformer Engine must be loaded in this process."""
    reason = _find_obstacle()
    if reason:
        warnings.warn(
            f"Transformer Engine's kernel that quantizes rows and rotated columns in one pass is not used: {reason}. "
            "Rotated operands are read once more",
            UserWarning,
            stacklevel=2,
        )
    return reason


def avoid() -> None:
    """Switches this process to two calls, because the self-test found a fault."""
    os.environ[VARIABLE] = "0"
    find_obstacle.cache_clear()
    jax.clear_caches()


def _find_obstacle() -> str:
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} is 0"
    device = jax.devices()[0]
    failure = read_failures(str(device.device_kind)).get(ONE_PASS) if device.platform == "gpu" else None
    if failure:
        return f"it failed the self-test on this machine ({failure})"
    try:
        library = ctypes.CDLL(str(_build()))
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.PolicycTeQuantize), platform="CUDA")
    except (CannotBuild, OSError, AttributeError) as error:
        return str(error)
    return ""


def _build() -> Path:
    """The shared library of the call, compiled for the versions that are installed here."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise CannotBuild("there is no C++ compiler (c++ or g++)")
    library = cache_folder("te") / f"one_pass-{_find_key(compiler)}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        includes = [f"-I{path}" for path in _include_folders()]
        options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
        run = subprocess.run(
            [compiler, *options, *includes, "-o", str(built), str(_SOURCE)], capture_output=True, text=True
        )
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr.strip()]
            raise CannotBuild(f"{_SOURCE.name} does not compile: {errors[0][:300]}")
        built.replace(library)  # another process may have done the same
    return library


def _find_key(compiler: str) -> str:
    """A hash of the source and of what else the library depends on: packages, compiler, CUDA, libc."""
    about = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    if about.returncode:
        raise CannotBuild(f"'{compiler} --version' fails: {about.stderr.strip()[:300]}")
    headers = (folder / "cuda.h" for folder in _include_folders())
    cuda = next(
        (re.findall(r"define CUDA_VERSION (\d+)", h.read_text()) for h in headers if h.exists()), None
    )
    versions = sorted(find_versions().items()), about.stdout, cuda, platform.libc_ver()
    return hashlib.sha256(_SOURCE.read_bytes() + repr(versions).encode()).hexdigest()[:16]


def _include_folders() -> Iterator[Path]:
    """The header folders of XLA's FFI, of Transformer Engine and of CUDA."""
    yield Path(jax.ffi.include_dir())
    for package, pattern in (("transformer_engine", "common/include"), ("nvidia", "*/include")):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(place).glob(pattern)
    yield from (p for p in (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",) if p.exists())


def quantize(
    x: jax.Array, amax: jax.Array, rotated_amax: jax.Array, state: jax.Array | None, rotation: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The codes of the rows of a matrix and of its rotated columns, then the scales of both."""
    tokens, features = x.shape
    shapes = (tokens, features), (features, tokens), (tokens, features // 16), (features, tokens // 16)
    types = jnp.float4_e2m1fn, jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float8_e4m3fn
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, types, strict=True)]
    words = jnp.zeros((0,), jnp.uint32) if state is None else state
    call = jax.ffi.ffi_call(TARGET, results)
    rows, columns, row_scales, column_scales = call(
        x, amax, rotated_amax, words, rotation, stochastic_rounding=state is not None
    )
    return rows, columns, row_scales, column_scales
