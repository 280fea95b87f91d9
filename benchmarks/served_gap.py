"""The gap between training and serving: exports runs, and evaluates them as a server would compute.

    policyc train --policy te_nvfp4 --seeds 100,101,102 --checkpoint-every 12300 --folder OUT/te_nvfp4 ...
    python -m benchmarks.served_gap OUT/te_nvfp4 OUT/rollout_nvfp4 --work WORK > served_gap.json

A run is a folder of `policyc train`, or one with a folder for each of its seeds. Static scales are the largest
magnitudes of `--calibration` batches of the training data. Every gap is that to the forward pass of training on the
same `--batches` of the validation data: nats per token, k3 (see `policyc eval --help`) and the share of positions with
the same most likely token. `training` is evaluated twice, which gives 0. `codes` counts the linears whose exported
codes are not those of training, and has the largest share of such codes in one linear. The seeds of a run share what is
compiled.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import policyc
from benchmarks.command_line import make_parser
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.experiments.telemetry import StatsRecorder
from policyc.language.policy import Policy
from policyc.models.llama import model as llama
from policyc.models.llama.model import Batch, Params
from policyc.serving.arithmetic import Activations, Arithmetic
from policyc.serving.export import export
from policyc.serving.linears import find_linears
from policyc.serving.llama_source import LlamaSource, host_arrays, read_source
from policyc.serving.rollout import (
    Gap,
    add_limits,
    compare,
    make_scorer,
    read_batches,
    score_batches,
    served_maxima,
)


def _arithmetic(activations: Activations, kv_cache: Any = "bf16") -> Arithmetic:
    return Arithmetic(activations={"nvfp4": activations, "fp8": activations}, kv_cache=kv_cache)


MODES: dict[str, Arithmetic | None] = {
    "training": None,
    "dynamic": _arithmetic("dynamic"),
    "static": _arithmetic("static"),
    "token": _arithmetic("token"),
    "weights only": _arithmetic("none"),
    "dynamic, KV cache in fp8": _arithmetic("dynamic", "fp8"),
    "static, KV cache in fp8": _arithmetic("static", "fp8"),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--work", type=Path, required=True, help="folder for the exported files")
    parser.add_argument("--batches", type=int, default=84, help="validation batches")
    parser.add_argument("--calibration", type=int, default=8, help="training batches that set static scales")
    options = parser.parse_args()
    print(json.dumps({run.name: measure(run, options) for run in options.runs}, indent=1))
    return 0


def measure(run: Path, options: Any) -> dict[str, Any]:
    """What was exported and the gap of each mode, for each seed of a run; and the seconds that all of it took."""
    begin = time.monotonic()
    recorder: StatsRecorder | None = None
    scorers: dict[str, Any] = {}
    results: dict[str, Any] = {}

    def note(text: str) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {text}", file=sys.stderr, flush=True)

    for folder in sorted(run.glob("seed*")) or [run]:
        source, params = load_stacked(folder)
        policy, batches = source.trained_policy, read_batches(source, options.batches)
        served = options.work / run.name / folder.name
        shutil.rmtree(served, ignore_errors=True)
        try:
            plan = source.plan(policy)
            linears = find_linears(host_arrays(params), plan, source.phase(plan), source.names())
            if not any(linear.format for linear in linears):
                raise ValueError("the policy quantizes no weight")
        except ValueError as error:
            results[folder.name] = {"refused": str(error)}
            continue
        with ThreadPoolExecutor() as pool:
            if not scorers:
                limited = add_limits(
                    params, linears, dict.fromkeys(((x.path, x.layer) for x in linears), 1.0)
                )
                compiling = {name: pool.submit(compile_scorer, source, policy, arithmetic, params, limited, batches[0])
                             for name, arithmetic in MODES.items()}  # fmt: skip
            recorder = recorder or make_recorder(source, policy)
            stats = calibrate(recorder, source, params, options.calibration, served.with_suffix(".jsonl"))
            note(f"{folder}: calibrated")
            with jax.default_device(jax.devices("cpu")[0]):  # as the command does
                written = export(
                    host_arrays(params), plan, names=source.names(), config=source.hf_config, out=served,
                    stats=stats, phase=source.phase(plan),
                )  # fmt: skip
            note(f"{folder}: exported")
            scorers = scorers or {name: compiled.result() for name, compiled in compiling.items()}
            note(f"{folder}: compiled")
        limited = add_limits(params, linears, served_maxima(served, linears))
        masks = [jax.device_get(batch["mask"]) for batch in batches]
        reference = score_batches(scorers["training"], params, batches)
        gaps: dict[str, Gap] = {}
        for name, arithmetic in MODES.items():
            inputs = limited if arithmetic is not None and arithmetic.is_static else params
            gaps[name] = compare(reference, score_batches(scorers[name], inputs, batches), masks)
            note(f"{folder}: {name}: {gaps[name].nats:+.6f} nats")
        codes = [change.codes for change in written.changes]
        results[folder.name] = {
            "linears": written.counts,
            "codes": {"changed_linears": len(codes), "largest_share": max(codes, default=0.0)},
            "gaps": {name: {**asdict(gap), "nats": gap.nats} for name, gap in gaps.items()},
        }
    return results | {"seconds": round(time.monotonic() - begin, 1)}


def load_stacked(folder: Path) -> tuple[LlamaSource, Params]:
    """A run and its weights, with the layers stacked: a loop over layers compiles in a fraction of the time."""
    source = read_source(folder)
    policyc.set_step(source.step - 1, total=source.run.steps)
    params = source.load()
    if not source.model.scan:
        params["layers"] = jax.tree.map(lambda *arrays: jnp.stack(arrays), *params["layers"])
        source = replace(source, model=replace(source.model, scan=True))
    return source, params


def compile_scorer(
    source: LlamaSource, policy: Policy, arithmetic: Arithmetic | None, params: Params, limited: Params, batch: Batch
) -> Any:  # fmt: skip
    is_static = arithmetic is not None and arithmetic.is_static
    scorer: Any = make_scorer(source, policy, arithmetic)
    return scorer.lower(limited if is_static else params, batch).compile()


def make_recorder(source: LlamaSource, policy: Policy) -> StatsRecorder:
    config = replace(source.model, attention="xla", loss_chunks=1, remat="none")
    execution = ExecutionOptions(backend="emulate")
    return StatsRecorder(policy, lambda params, batch: llama.loss(params, batch, config)[0], execution)


def calibrate(recorder: StatsRecorder, source: LlamaSource, params: Params, count: int, path: Path) -> Path:
    """Writes the measurements of some training batches, as `train --stats-every` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    batches = read_batches(source, count, "train")
    rows = [{"step": step, **row} for step, batch in enumerate(batches) for row in recorder(params, batch)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
