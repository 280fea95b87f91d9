"""A training step of the Llama driver on one device: bf16, FP8 and emulated NVFP4 side by side, and the input's stall.

    python benchmarks/llama_step.py --json llama_step.json

On a GPU it is the 1b configuration at sequence 4096; the form of the step (batch, remat, scan) is the fastest of some
that are tried in bf16, unless one is given. Elsewhere it is a tiny model, to try the script. One state goes through
all steps in turn, so that they take no more memory than one. Of the driver's packages it needs optax and grain.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import jax
from llama import data, metrics, model, optimizer
from llama.configs import CONFIGS, Model, Run

import policyc
from benchmarks.timing import save

POLICIES = {"bf16": None, "fp8, all block linears": "fp8", "nvfp4 emulated, llama_nvfp4": "llama_nvfp4"}


os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")  # read when the first array is made


class Form(NamedTuple):
    """How a step is computed."""

    batch: int
    remat: str
    scan: bool
    loss_chunks: int


FORMS = (
    Form(8, "none", False, 1),
    Form(16, "dots", False, 1),
    Form(8, "dots", True, 1),
    Form(4, "none", False, 1),
)


class Bench:
    """The model in one form: its state, its batches, its compiled steps."""

    def __init__(self, c: Model, run: Run, form: Form) -> None:
        more = {"remat": form.remat, "scan": form.scan, "loss_chunks": form.loss_chunks}
        self.c, self.run = dataclasses.replace(c, **more), dataclasses.replace(run, batch=form.batch)
        self.mesh = model.make_mesh(self.c, self.run)
        self.described, make = optimizer.first_state(self.c, self.run, self.mesh)
        self.state = make()
        self.source = data.Source(self.run, c.vocab)

    def batch(self) -> Any:
        return jax.device_put(next(self.source), model.sharding(self.mesh, ("batch", "sequence")))

    def compiled(self, policy: str | None) -> Any:
        """The step under a policy. Plainly where there is none."""
        step, begin = optimizer.train_step(self.c, self.run, self.mesh), time.perf_counter()
        if policy is None:
            found = step.lower(self.described, self.batch()).compile()
        else:
            with policyc.active(policy):
                found = step.lower(self.described, self.batch()).compile()
        print(f"  compiled {policy or 'bf16'} in {time.perf_counter() - begin:.0f} s", flush=True)
        return found

    def seconds(self, step: Any, count: int) -> float:
        """Of one step, with its batch at hand."""
        batch = self.batch()
        self.state, measured = step(self.state, batch)
        jax.block_until_ready(self.state)
        begin = time.perf_counter()
        for _ in range(count):
            self.state, measured = step(self.state, batch)
        jax.block_until_ready(self.state)
        self.loss = float(measured["loss"])
        return (time.perf_counter() - begin) / count

    def stall(self, step: Any, count: int) -> float:
        """The part of the time that was waited for data, in a loop that reads results one step late."""
        waited, before, begin = 0.0, None, time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            batch = self.batch()
            waited += time.perf_counter() - asked
            self.state, measured = step(self.state, batch)
            if before is not None:
                float(before["loss"])
            before = measured
        jax.block_until_ready(self.state)
        return waited / (time.perf_counter() - begin)

    def mfu(self, seconds: float) -> float | None:
        peak = metrics.peak_tflops(self.run)
        flops = metrics.flops_per_token(self.c, self.run.sequence) * self.run.batch * self.run.sequence
        return flops / seconds / (peak * 1e12) if peak else None


def fastest(c: Model, run: Run, forms: tuple[Form, ...], until: float) -> tuple[Bench, Any, dict[str, float]]:
    """The form with the most tokens a second in bf16, of those that fit and that there is time for."""
    rates: dict[Form, float] = {}
    best = None
    for form in forms:
        if best is not None and time.perf_counter() > until:
            print(f"no time to try {form}")
            continue
        bench = None
        try:
            bench = Bench(c, run, form)
            step = bench.compiled(None)
            seconds = bench.seconds(step, 4)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{form} does not fit into memory")
            del bench
            continue
        rates[form] = form.batch * run.sequence / seconds
        mfu = bench.mfu(seconds)
        print(f"{form}: {rates[form]:.0f} tokens/s" + (f", MFU {mfu:.1%}" if mfu else ""), flush=True)
        if rates[form] == max(rates.values()):
            best = bench, step
        del bench, step
    if best is None:
        sys.exit("no form fits into memory: give --batch 1 --remat full")
    return *best, {str(k): v for k, v in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = jax.default_backend() == "gpu"
    parser.add_argument("--config", default="1b" if on_gpu else "tiny")
    parser.add_argument("--sequence", type=int, default=4096 if on_gpu else 64)
    parser.add_argument("--batch", type=int, help="only this form: with --remat, --scan, --loss-chunks")
    parser.add_argument("--remat", default="none", choices=("none", "full", "dots", "quantized"))
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--loss-chunks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5 if on_gpu else 2)
    parser.add_argument("--steps", type=int, default=4 if on_gpu else 1, help="of each kind in a round")
    parser.add_argument("--search-seconds", type=float, default=150, help="no new form is tried after this")
    parser.add_argument("--json", help="write the results here too")
    args = parser.parse_args()
    c, run = CONFIGS[args.config]
    run = dataclasses.replace(run, sequence=args.sequence, steps=10**6, accumulate=1)
    forms = FORMS if on_gpu else (Form(2, "none", True, 1),)
    if args.batch:
        forms = (Form(args.batch, args.remat, args.scan, args.loss_chunks),)

    bench, plain, tried = fastest(c, run, forms, time.perf_counter() + args.search_seconds)
    print(f"\n{args.config}, sequence {args.sequence}, batch {bench.run.batch}, remat {bench.c.remat}")
    steps = {name: plain if policy is None else bench.compiled(policy) for name, policy in POLICIES.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(bench.seconds(step, args.steps))
            losses[name] = bench.loss
    rows = {}
    for name, found in times.items():
        middle = statistics.median(found)
        ratio = middle / statistics.median(times["bf16"])
        rows[name] = {
            "ms": middle * 1e3, "spread": (max(found) - min(found)) / middle, "step_time_to_bf16": ratio,
            "tokens_per_second": bench.run.batch * args.sequence / middle, "tokens_to_bf16": 1 / ratio,
            "mfu": bench.mfu(middle), "loss": losses[name],
        }  # fmt: skip
        mfu = f"  MFU {rows[name]['mfu']:.1%}" if rows[name]["mfu"] else ""
        print(
            f"{name:32s} {middle * 1e3:9.1f} ms  {ratio:5.3f} x step time  {1 / ratio:5.3f} x tokens/s{mfu}"
            f"  spread {rows[name]['spread']:.1%}"
        )
    stall = bench.stall(plain, 2 * args.rounds)
    print(f"input stall {stall:.3%}; memory {metrics.memory_bytes() / 2**30:.1f} GiB")
    form = {"config": args.config, "sequence": args.sequence, "batch": bench.run.batch, "remat": bench.c.remat,
            "scan": bench.c.scan, "loss_chunks": bench.c.loss_chunks}  # fmt: skip
    results = {
        "form": form,
        "tried": tried,
        "steps": rows,
        "input_stall": stall,
        "memory": metrics.memory_bytes(),
    }
    save(args.json, results)


if __name__ == "__main__":
    main()
