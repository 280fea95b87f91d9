"""Exports weights, runs the user's command on each export, and records profiles."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from policyc.models.llama import model, weights
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig


def export(params: model.Params, config: ModelConfig, run: RunConfig, folder: Path) -> None:
    """Writes safetensors with a tokenizer, and runs `--export-command` on them."""
    files = weights.export_files(config, run.sequence, run.tokenizer)
    weights.save_safetensors(params, config, folder, files)
    if run.export_command and jax.process_index() == 0:
        fault = run_command(run.export_command, folder, run.export_timeout)
        if fault and run.on_export_fault == "stop":
            raise ConfigError(f"--export-command {fault}")
        if fault:
            print(f"warning: --export-command {fault}; training continues", file=sys.stderr)


def run_command(command: str, folder: Path, timeout: float) -> str | None:
    """Runs a command on an export. Returns why it failed, or None."""
    try:
        words = [word.replace("{path}", str(folder)) for word in shlex.split(command)]
        code = subprocess.run(words, check=False, timeout=timeout or None).returncode
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout:g} s (--export-timeout) and was killed"
    except (OSError, ValueError) as error:
        return f"cannot be started: {error}"
    return f"exited with {code}" if code else None


class Profiler(NamedTuple):
    """Starts and stops a profile: an XProf trace, or the capture range of `nsys profile -c cudaProfilerApi`."""

    start: Callable[[], Any]
    stop: Callable[[], Any]


def make_profiler(run: RunConfig, folder: Path) -> Profiler:
    if run.profile != "nsys":
        return Profiler(partial(jax.profiler.start_trace, str(folder / "profile")), jax.profiler.stop_trace)
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        with suppress(OSError):
            cuda = ctypes.CDLL(name)
            return Profiler(cuda.cudaProfilerStart, cuda.cudaProfilerStop)
    raise ConfigError("--profile nsys needs CUDA, but there is no libcudart.so: use --profile xplane")


def steps_to_profile(run: RunConfig, steps_done: int) -> tuple[int, int]:
    """The first and last of the remaining steps to profile; zeros if there are none."""
    if not run.profile:
        return 0, 0
    first, last = map(int, run.profile_steps.split(":"))
    if last <= steps_done:
        about = f"--profile-steps {run.profile_steps}: the run continues after step {steps_done}"
        print(f"warning: {about}, so nothing is recorded now", file=sys.stderr)
        return 0, 0
    return max(first, steps_done + 1), last
