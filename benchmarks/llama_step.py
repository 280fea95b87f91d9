"""Time of a training step of the bundled Llama on one device, in bf16, FP8 and emulated NVFP4, and its input stall.

    python -m benchmarks.llama_step --json llama_step.json

On a GPU it runs the 1b configuration at sequence 4096. Unless a layout of the step (batch, remat, scan) is given, it
tries several in bf16 and takes the fastest. On a CPU it runs a tiny model, to try out the script. The policies run one
after the other on one training state, so that they need no more memory than one policy. Needs optax and grain,
from the extra `train`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax

import policyc
from benchmarks.command_line import make_parser
from benchmarks.timing import save
from policyc.models.llama import data, metrics, partition, train_step
from policyc.models.llama.configs import CONFIGS, ModelConfig, RunConfig

POLICIES = {"bf16": None, "fp8, all block linears": "fp8", "nvfp4 emulated, llama_nvfp4": "llama_nvfp4"}


os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")  # read by JAX when it creates the first array


class Layout(NamedTuple):
    """How a step is computed."""

    batch: int
    remat: str
    scan: bool
    loss_chunks: int


LAYOUTS = (
    Layout(8, "none", False, 1),
    Layout(16, "dots", False, 1),
    Layout(8, "dots", True, 1),
    Layout(4, "none", False, 1),
)


class Benchmark:
    """The model in one layout: its state, its batches and its compiled steps."""

    def __init__(self, config: ModelConfig, run: RunConfig, layout: Layout) -> None:
        self.config = dataclasses.replace(
            config, remat=layout.remat, scan=layout.scan, loss_chunks=layout.loss_chunks
        )
        self.run = dataclasses.replace(run, batch=layout.batch)
        self.mesh = partition.make_mesh(self.config, self.run)
        self.state_shapes = train_step.abstract_state(self.config, self.run, self.mesh)
        self.state = train_step.init_state(self.config, self.run, self.mesh)
        self.source = data.BatchSource(self.run, config.vocab)

    def next_batch(self) -> Any:
        return jax.device_put(next(self.source), partition.sharding(self.mesh, ("batch", "sequence")))

    def compile_step(self, policy: str | None) -> Any:
        """Compiles the step under a policy, or without policyc if `policy` is None."""
        step, start = train_step.make_train_step(self.config, self.run, self.mesh), time.perf_counter()
        if policy is None:
            compiled = step.lower(self.state_shapes, self.next_batch()).compile()
        else:
            with policyc.active(policy):
                compiled = step.lower(self.state_shapes, self.next_batch()).compile()
        print(f"  compiled {policy or 'bf16'} in {time.perf_counter() - start:.0f} s", flush=True)
        return compiled

    def time_step(self, step: Any, count: int) -> float:
        """Mean seconds of `count` steps on a batch that is already loaded."""
        batch = self.next_batch()
        self.state, step_metrics = step(self.state, batch)
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(count):
            self.state, step_metrics = step(self.state, batch)
        jax.block_until_ready(self.state)
        self.loss = float(step_metrics["loss"])
        return (time.perf_counter() - start) / count

    def measure_stall(self, step: Any, count: int) -> float:
        """Fraction of the time spent waiting for data, in a loop that reads the metrics one step late."""
        waited, previous, start = 0.0, None, time.perf_counter()
        for _ in range(count):
            requested = time.perf_counter()
            batch = self.next_batch()
            waited += time.perf_counter() - requested
            self.state, step_metrics = step(self.state, batch)
            if previous is not None:
                float(previous["loss"])
            previous = step_metrics
        jax.block_until_ready(self.state)
        return waited / (time.perf_counter() - start)

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilization of a step, if the peak of the device is known."""
        peak = metrics.peak_tflops()
        flops = metrics.flops_per_token(self.config, self.run.sequence) * self.run.batch * self.run.sequence
        return flops / seconds / (peak * 1e12) if peak else None


def find_fastest(
    config: ModelConfig, run: RunConfig, layouts: tuple[Layout, ...], deadline: float
) -> tuple[Benchmark, Any, dict[str, float]]:
    """Finds the layout with the most tokens per second in bf16, among those that fit and are tried before the deadline.

    Returns its benchmark, its compiled step, and the tokens per second of each layout tried.
    """
    rates: dict[Layout, float] = {}
    best = None
    for layout in layouts:
        if best is not None and time.perf_counter() > deadline:
            print(f"no time to try {layout}")
            continue
        bench = None
        try:
            bench = Benchmark(config, run, layout)
            step = bench.compile_step(None)
            seconds = bench.time_step(step, 4)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{layout} does not fit into memory")
            del bench  # frees its state before the next layout is tried
            continue
        rates[layout] = layout.batch * run.sequence / seconds
        mfu = bench.mfu(seconds)
        print(f"{layout}: {rates[layout]:.0f} tokens/s" + (f", MFU {mfu:.1%}" if mfu else ""), flush=True)
        if rates[layout] == max(rates.values()):
            best = bench, step
        del bench, step
    if best is None:
        sys.exit("no layout fits into memory: try --batch 1 --remat full")
    return *best, {str(layout): rate for layout, rate in rates.items()}


def time_policies(bench: Benchmark, bf16_step: Any, rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Times the step under each policy in turn, in every round. Prints and returns the medians."""
    compiled = {
        name: bf16_step if policy is None else bench.compile_step(policy) for name, policy in POLICIES.items()
    }
    times: dict[str, list[float]] = {name: [] for name in compiled}
    losses = {}
    for _ in range(rounds):
        for name, step in compiled.items():
            times[name].append(bench.time_step(step, steps))
            losses[name] = bench.loss
    rows = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratio = median / statistics.median(times["bf16"])
        rows[name] = row = {
            "ms": median * 1e3,
            "spread": (max(seconds) - min(seconds)) / median,
            "step_time_to_bf16": ratio,
            "tokens_per_second": bench.run.batch * bench.run.sequence / median,
            "tokens_to_bf16": 1 / ratio,
            "mfu": bench.mfu(median),
            "loss": losses[name],
        }
        mfu = f"  MFU {row['mfu']:.1%}" if row["mfu"] else ""
        print(
            f"{name:32s} {median * 1e3:9.1f} ms  {ratio:5.3f} x step time  {1 / ratio:5.3f} x tokens/s{mfu}"
            f"  spread {row['spread']:.1%}"
        )
    return rows


def parse_options(on_gpu: bool) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--config", default="1b" if on_gpu else "tiny", help="default: 1b on a GPU, else tiny"
    )
    parser.add_argument(
        "--sequence", type=int, default=4096 if on_gpu else 64, help="default: 4096 on a GPU, else 64"
    )
    parser.add_argument(
        "--batch", type=int, help="try only this layout, with --remat, --scan and --loss-chunks"
    )
    parser.add_argument("--remat", default="none", choices=("none", "full", "dots", "quantized"))
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--loss-chunks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5 if on_gpu else 2)
    parser.add_argument("--steps", type=int, default=4 if on_gpu else 1, help="steps per policy and round")
    parser.add_argument(
        "--search-seconds", type=float, default=150, help="try no new layout after this time (default: 150)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    options = parse_options(on_gpu)
    config, run = CONFIGS[options.config]
    run = dataclasses.replace(run, sequence=options.sequence, steps=10**6, accumulate=1)
    layouts = LAYOUTS if on_gpu else (Layout(2, "none", True, 1),)
    if options.batch:
        layouts = (Layout(options.batch, options.remat, options.scan, options.loss_chunks),)
    deadline = time.perf_counter() + options.search_seconds
    bench, bf16_step, rates = find_fastest(config, run, layouts, deadline)
    layout = {
        "config": options.config, "sequence": options.sequence, "batch": bench.run.batch,
        "remat": bench.config.remat, "scan": bench.config.scan, "loss_chunks": bench.config.loss_chunks,
    }  # fmt: skip
    print("\n{config}, sequence {sequence}, batch {batch}, remat {remat}".format(**layout))
    rows = time_policies(bench, bf16_step, options.rounds, options.steps)
    stall = bench.measure_stall(bf16_step, 2 * options.rounds)
    print(f"input stall {stall:.3%}; memory {metrics.memory_bytes() / 2**30:.1f} GiB")
    results = {"form": layout, "tried": rates, "steps": rows, "input_stall": stall}
    save(options.json, {**results, "memory": metrics.memory_bytes()})


if __name__ == "__main__":
    main()
