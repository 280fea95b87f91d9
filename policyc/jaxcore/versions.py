"""Differences between the supported versions of JAX (0.10.2 to 0.12), apart from its internals."""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import Any

import jax
from jax import lax

SUPPORTED = ((0, 10), (0, 12))
"""The oldest and the newest version of JAX that policyc supports."""

if not SUPPORTED[0] <= jax.__version_info__[:2] <= SUPPORTED[1]:
    _oldest, _newest = (".".join(map(str, version)) for version in SUPPORTED)
    raise ImportError(
        f"policyc supports JAX {_oldest} to {_newest}, but {jax.__version__} is installed: "
        f"pip install 'jax=={_newest}.*'",
        name="jax",
    )

FP8_PRECISION: Any = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
"""The `precision` of an 8-bit `dot_general` that accumulates in fp32 throughout."""
FAST_FP8_PRECISION: Any = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
"""The `precision` of an 8-bit `dot_general` that may accumulate in fewer bits."""
if jax.__version_info__ >= (0, 12):
    # The GPU plugin of 0.12 rejects these presets: it has no algorithm for 8-bit numbers. Without a preset, cuBLAS
    # takes the highest precision to mean fp32 accumulation.
    FP8_PRECISION, FAST_FP8_PRECISION = lax.Precision.HIGHEST, lax.Precision.DEFAULT

BARRIERS_SKIP_ZERO_TANGENTS = jax.__version_info__ >= (0, 11)
"""Whether `optimization_barrier` differentiates only the operands that have a tangent. Older versions differentiate all
operands if one has a tangent."""


INLINE_WHEN_TRACED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
"""The `inline` option that makes a jitted function's equations part of the jaxpr around it. Since 0.12, `True` means
that a function is inlined when it is lowered."""


MOSAIC_LOAD_INDEX: tuple[None, ...] = () if jax.__version_info__ >= (0, 11) else (None,)
"""The index that Mosaic's `load` takes in addition to an already indexed reference. None since 0.11."""

MOSAIC_HAS_STORE = jax.__version_info__ >= (0, 12)
"""Whether Mosaic has `store`. In older versions, assigning to a reference does the same."""


def set_cpu_device_count(count: int) -> None:
    """Gives the CPU platform `count` devices. Does nothing if JAX has already initialized its devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def find_cuda_versions() -> dict[str, str]:
    """Versions of the CUDA libraries that JAX loaded. Empty without a CUDA plugin."""
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        with contextlib.suppress(ImportError, AttributeError):
            versions = importlib.import_module(f"{plugin}._versions")
            names = {"CUDA": "cuda_runtime", "CUDA of the driver": "cuda_driver"}
            names |= {"cuDNN": "cudnn", "cuBLAS": "cublas"}
            return {name: str(getattr(versions, f"{part}_get_version")()) for name, part in names.items()}
    return {}


_GPU_FIELDS_SINCE_0_11 = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)


def convert_gpu_description(text: str) -> str:
    """Converts a GPU description (a text proto) to what the installed XLA accepts.

    XLA before JAX 0.11 rejects fields that it does not know, and reads cuDNN's version from another field.
    """
    if jax.__version_info__ >= (0, 11):
        return text
    lines = [line for line in text.splitlines() if not line.strip().startswith(_GPU_FIELDS_SINCE_0_11)]
    version = re.search(r'dnn_version: "(\d+)\.(\d+)\.(\d+)"', text)
    assert version is not None
    lines.append(f"dnn_version_info {{ major: {version[1]} minor: {version[2]} patch: {version[3]} }}")
    return "".join(f"{line}\n" for line in lines)
