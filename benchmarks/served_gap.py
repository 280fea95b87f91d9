"""The gap between training and serving: exports runs, and evaluates them as a server would compute.

    policyc train --policy te_nvfp4 --seeds 100,101,102 --checkpoint-every 12300 --out OUT/te_nvfp4 ...
    python -m benchmarks.served_gap OUT/te_nvfp4 OUT/rollout_nvfp4 --work WORK > served_gap.json

A run is a folder of `policyc train`, or one with a folder for each of its seeds. Static scales are the largest
magnitudes of `--calibration` batches of the training data. Every gap is that to the forward pass of training on the
same `--batches` of the validation data: nats per token, k3 (see `policyc eval --help`) and the share of positions with
the same most likely token. `codes` are the linears whose exported codes are not those of training, and the largest
share of such codes in one linear. The seeds of a run share what is compiled.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

import policyc
from benchmarks.command_line import make_parser
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.experiments.telemetry import StatsRecorder
from policyc.models.llama import model as llama
from policyc.models.llama.model import Batch, Params
from policyc.serving.export import export
from policyc.serving.llama_source import LlamaSource, host_arrays, read_source
from policyc.serving.rollout import (
    Activations,
    Arithmetic,
    Gap,
    add_limits,
    check_servable,
    compare,
    make_scorer,
    read_batches,
    score_batches,
    served_maxima,
)


def _arithmetic(activations: Activations, kv_cache: Any = "bf16") -> Arithmetic:
    return Arithmetic(activations={"nvfp4": activations, "fp8": activations}, kv_cache=kv_cache)


MODES: dict[str, Arithmetic | None] = {
    "training": None,  # twice, which must give a gap of 0
    "dynamic": _arithmetic("dynamic"),
    "static": _arithmetic("static"),
    "token": _arithmetic("token"),
    "weights only": _arithmetic("none"),
    "dynamic, KV cache in fp8": _arithmetic("dynamic", "fp8"),
    "static, KV cache in fp8": _arithmetic("static", "fp8"),
    "weights only, KV cache in fp8": _arithmetic("none", "fp8"),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--work", type=Path, required=True, help="folder for the exported files")
    parser.add_argument("--batches", type=int, default=84, help="validation batches")
    parser.add_argument("--calibration", type=int, default=8, help="training batches that set static scales")
    options = parser.parse_args()
    print(json.dumps({run.name: dict(measure(run, options)) for run in options.runs}, indent=1))
    return 0


def measure(run: Path, options: Any) -> Iterator[tuple[str, Any]]:
    """Yields, for each seed of a run, what was exported and the gap of each mode; then the seconds it all took."""
    begin = time.monotonic()
    recorder: StatsRecorder | None = None
    scorers: dict[str, Any] = {}
    for folder in sorted(run.glob("seed*")) or [run]:
        source = read_source(folder)
        policy = source.trained_policy
        policyc.set_step(source.step - 1, total=source.run.steps)
        params = source.load()
        config = replace(source.model, attention="xla", loss_chunks=1, remat="none")
        recorder = recorder or StatsRecorder(policy, lambda p, b, c=config: llama.loss(p, b, c)[0],
                                             ExecutionOptions(backend="emulate"))  # fmt: skip
        served = options.work / run.name / folder.name
        shutil.rmtree(served, ignore_errors=True)
        try:
            linears = check_servable(source, policy)
            stats = calibrate(recorder, source, params, options.calibration, served.with_suffix(".jsonl"))
            plan = source.plan(policy)
            written = export(
                host_arrays(params), plan, names=source.names(), config=source.hf_config,
                out=served, stats=stats, phase=source.phase(plan),
            )  # fmt: skip
        except ValueError as error:
            yield folder.name, {"refused": str(error)}
            continue
        note(begin, f"{folder}: exported")
        batches = read_batches(source, options.batches)
        limited = add_limits(params, linears, served_maxima(served, linears))
        scores: dict[str, Any] = {}
        gaps: dict[str, Gap] = {}
        for name, arithmetic in {"reference": None, **MODES}.items():
            scorer = scorers.setdefault(arithmetic and name, make_scorer(source, policy, arithmetic))
            inputs = limited if arithmetic is not None and arithmetic.is_static else params
            scores[name] = score_batches(scorer, inputs, batches)
            if name != "reference":
                masks = [jax.device_get(batch["mask"]) for batch in batches]
                gaps[name] = compare(scores["reference"], scores[name], masks)
                note(begin, f"{folder}: {name}: {gaps[name].nats:+.6f} nats")
        codes = [change.codes for change in written.changes]
        yield folder.name, {
            "linears": written.counts,
            "codes": {"changed_linears": len(codes), "largest_share": max(codes, default=0.0)},
            "gaps": {name: {**asdict(gap), "nats": gap.nats} for name, gap in gaps.items()},
        }
    yield "seconds", round(time.monotonic() - begin, 1)


def calibrate(recorder: StatsRecorder, source: LlamaSource, params: Params, count: int, path: Path) -> Path:
    """Writes the measurements of some training batches, as `train --stats-every` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    batches: list[Batch] = read_batches(source, count, "train")
    rows = [{"step": step, **row} for step, batch in enumerate(batches) for row in recorder(params, batch)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def note(begin: float, text: str) -> None:
    print(f"{time.monotonic() - begin:.0f} s: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
