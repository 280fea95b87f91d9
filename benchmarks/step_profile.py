"""Profile of a training step of the bundled Llama: its compilation by phase, its program by kernel, and its time.

    python -m benchmarks.step_profile --config 19m --batch 256 --sequence 512 --policy bf16 --policy te_nvfp4 \
        [--target h200] [--json step_profile.json] [--hlo FOLDER] [--seconds 400]

Each policy is compiled in a process of its own, unrolled and scanned, so that no compilation benefits from another
one. With --target, the step is compiled for a GPU that is not present, and does not run. `distinct` counts kernels
that differ in more than their names; `but for constants` counts those that also differ in more than their constants.
XLA compiles equal fusions only once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import policyc
from benchmarks.command_line import make_parser
from benchmarks.profiles import kernel_times, phase_times, print_totals, record
from benchmarks.timing import describe_machine
from policyc.models.llama.configs import CONFIGS

_STEPS = 10
_LEAST_MS = 20
"""Shorter phases of the compilation are not listed."""
_NAME = re.compile(r"%[\w.\-]+")
_CONSTANT = re.compile(r"constant\([^)]*\)")
_METADATA = re.compile(r', (?:metadata|backend_config)=\{(?:[^{}"]|"[^"]*"|\{[^{}]*\})*\}')


# ---- the program


def describe_program(text: str) -> dict[str, Any]:
    """Counts the instructions and kernels of an optimized module: all, distinct, and distinct but for constants."""
    bodies: dict[str, str] = {}
    instructions, opcodes, targets = 0, Counter[str](), Counter[str]()
    for block in re.split(r"\n\n+", text):
        header, _, body = block.partition("\n")
        match = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", header)
        if match is None:
            continue
        instructions += body.count(" = ")
        bodies[match[1]] = _canonical(body)
        for line in body.splitlines():
            found = re.search(r" = (?:\([^=]*?\)|\S+) ([\w\-]+)\(", line)
            if found is None:
                continue
            opcodes[found[1]] += 1
            if target := re.search(r'custom_call_target="([^"]*)"', line):
                targets[target[1]] += 1
    fused = [bodies[name] for name in re.findall(r"fusion\(.*?calls=%?([\w.\-]+)", text) if name in bodies]
    kernels = re.findall(r'"?kernel_hash"?\s*[=:]\s*"?([^",} ]+)', text)
    return {
        "instructions": instructions,
        "fusions": len(fused),
        "distinct fusions": len(set(fused)),
        "distinct fusions but for constants": len({_CONSTANT.sub("constant()", body) for body in fused}),
        "distinct Mosaic kernels": len(set(kernels)),
        "opcodes": dict(opcodes.most_common(25)),
        "custom calls": dict(targets.most_common()),
    }


def _canonical(body: str) -> str:
    """The text of a computation, with names replaced by numbers in order of appearance, and without metadata."""
    numbers: dict[str, str] = {}
    body = _METADATA.sub("", body)
    return _NAME.sub(lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), body)


# ---- one case, in a process of its own


def profile_case(options: argparse.Namespace) -> dict[str, Any]:
    config, run = CONFIGS[options.config]
    config = dataclasses.replace(config, scan=options.scan, remat=options.remat or config.remat)
    run = dataclasses.replace(run, batch=options.batch, sequence=options.sequence, steps=10**6, accumulate=1)
    policy = None if options.case == "bf16" else options.case
    result: dict[str, Any] = {}
    make_step, arguments, state, compiler_options = _prepare(config, run, options.target, policy)
    start = time.perf_counter()
    traced = make_step().trace(*arguments)
    result["trace s"] = (end := time.perf_counter()) - start
    lowered = traced.lower(lowering_platforms=("cuda",)) if options.target else traced.lower()
    result["lower s"] = time.perf_counter() - end
    module = lowered.as_text()
    result["StableHLO"] = {
        "operations": module.count(" = "), "functions": module.count("func.func "), "bytes": len(module)
    }  # fmt: skip
    start = time.perf_counter()
    compiled, profile = record(lambda: lowered.compile(compiler_options=compiler_options))
    result["XLA s"] = time.perf_counter() - start
    result["phases"], result["phases without inner"] = phase_times(profile, _LEAST_MS)
    text = compiled.as_text()
    if options.hlo:
        Path(options.hlo).mkdir(parents=True, exist_ok=True)
        (Path(options.hlo) / f"{options.case}_{'scan' if options.scan else 'unrolled'}.txt").write_text(text)
    result["program"] = describe_program(text)
    memory = compiled.memory_analysis()
    result["temporaries GiB"] = memory.temp_size_in_bytes / 2**30
    if not options.target:
        result.update(_time_steps(compiled, state, arguments[1], run.batch * run.sequence))
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        result["peak GiB"] = peak / 2**30  # of all device allocations, including the state
    return result


def _prepare(config: Any, run: Any, target: str | None, policy: str | None) -> Any:
    """A function that makes the step, its arguments, its first state (if it can run), and compiler options."""
    from policyc.models.llama import data, partition, train_step

    def make_step(mesh: Any) -> Any:
        step = train_step.make_train_step(config, run, mesh)
        return _UnderPolicy(step, policy, target) if policy else step

    if target:
        import numpy as np

        from policyc.hardware import deviceless
        from policyc.numerics.targets import TARGETS

        devices = deviceless.make_devices(TARGETS[target], 1)
        shape = (1,) * len(partition.AXES)
        types = (jax.sharding.AxisType.Auto,) * len(shape)
        mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), partition.AXES, axis_types=types)
        arguments = train_step.abstract_state(config, run, mesh), partition.abstract_batch(run, mesh)
        return (lambda: make_step(mesh)), arguments, None, deviceless.COMPILER_OPTIONS
    mesh = partition.make_mesh(config, run)
    state = train_step.init_state(config, run, mesh)
    source = data.BatchSource(run, config.vocab)
    batch = jax.device_put(next(source), partition.sharding(mesh, ("batch", "sequence")))
    return (lambda: make_step(mesh)), (train_step.abstract_state(config, run, mesh), batch), state, None


class _UnderPolicy:
    """A jitted step that is traced with a policy active."""

    def __init__(self, step: Any, policy: str, target: Any) -> None:
        self.step, self.policy, self.target = step, policy, target

    def trace(self, *arguments: Any) -> Any:
        with policyc.active(self.policy, target=self.target):
            return self.step.trace(*arguments)


def _time_steps(compiled: Any, state: Any, batch: Any, tokens: int) -> dict[str, Any]:
    """Milliseconds per step, tokens per second, and the kernels of one step."""

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, _ = compiled(state, batch)
        jax.block_until_ready(state)

    run(2)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(_STEPS)
        times.append((time.perf_counter() - start) / _STEPS)
    _, profile = record(lambda: run(1))
    kernels = kernel_times(profile)
    seconds = sorted(times)[1]
    return {
        "step ms": seconds * 1e3,
        "tokens/s": tokens / seconds,
        "kernel ms": sum(k["ms"] for k in kernels.values()),
        "launches": sum(k["count"] for k in kernels.values()),
        "kernels": kernels,
    }


# ---- all cases


def run_cases(options: argparse.Namespace) -> dict[str, Any]:
    deadline = time.perf_counter() + options.seconds
    results: dict[str, Any] = {}
    layouts = (False, True) if options.layout == "both" else (options.layout == "scan",)
    for scan, policy in itertools.product(layouts, options.policy):
        name = f"{policy}, {'scanned' if scan else 'unrolled'}"
        if time.perf_counter() > deadline:
            print(f"no time for {name}")
            continue
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = [sys.executable, "-m", "benchmarks.step_profile", "--case", policy, "--json", file.name]
            for option in ("config", "batch", "sequence", "target", "remat", "hlo"):
                if getattr(options, option):
                    words += [f"--{option}", str(getattr(options, option))]
            words += ["--scan"] if scan else []
            start = time.perf_counter()
            if subprocess.run(words).returncode:
                print(f"{name} failed")
                continue
            results[name] = json.loads(Path(file.name).read_text())
        results[name]["process s"] = time.perf_counter() - start
        print_case(name, results[name])
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return results


def print_case(name: str, result: dict[str, Any]) -> None:
    program = {k: v for k, v in result["program"].items() if not isinstance(v, dict)}
    columns = ("trace s", "lower s", "XLA s", "step ms", "tokens/s", "launches")
    times = {k: round(result[k], 2) for k in columns if k in result}
    print(f"\n== {name}: {times}\n{program}\n{result['program']['custom calls']}\n{result['StableHLO']}")
    print_totals("phases", result["phases"], 14)
    print_totals("phases without those inside", result["phases without inner"], 14)
    if "kernels" in result:
        print_totals("kernels of one step", result["kernels"], 16)
    sys.stdout.flush()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", default="19m", choices=CONFIGS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--remat")
    parser.add_argument("--policy", action="append", help="bf16, or a policy (may be repeated)")
    parser.add_argument("--layout", default="both", choices=("both", "scan", "unrolled"))
    parser.add_argument("--target", help="compile for this GPU, which is not present")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new case after this time")
    parser.add_argument("--hlo", metavar="FOLDER", help="also write the optimized HLO of each case")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--scan", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        Path(options.json).write_text(json.dumps(profile_case(options)) + "\n")
        return
    options.policy = options.policy or ["bf16", "fp8", "llama_nvfp4", "te_nvfp4"]
    results = run_cases(options)
    if options.json:
        machine = {} if options.target else describe_machine()
        Path(options.json).write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
