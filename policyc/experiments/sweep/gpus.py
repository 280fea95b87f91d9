"""The GPUs of this machine, found without loading JAX: JAX would take their memory from the runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that runs may use, as values for CUDA_VISIBLE_DEVICES. Empty without NVIDIA GPUs.

    CUDA_VISIBLE_DEVICES limits them, and JAX_PLATFORMS may exclude them.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.lower().split(",")):
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip() not in ("", "-1"))
    try:
        words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        listed = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def group_gpus(gpus: tuple[str, ...], per_run: int) -> tuple[str, ...]:
    """Groups of GPUs for one run each; none without GPUs. Raises ValueError if there are too few for a run."""
    if per_run > max(1, len(gpus)):
        raise ValueError(f"--gpus-per-run {per_run}: this machine has {len(gpus)}")
    return tuple(",".join(gpus[i : i + per_run]) for i in range(0, len(gpus) - per_run + 1, per_run))
