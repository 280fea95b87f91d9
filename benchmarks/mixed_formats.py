"""Trains the policies of docs/results/19m_controls with the same seeds, and keeps thinned metrics.

    python -m benchmarks.corpus corpus
    python -m benchmarks.mixed_formats --corpus corpus --seeds 200,201,202 --out OUT

Each run is a process. `--jobs` of them share the device, in the order of the table, so that one trains while another
compiles; CUDA's multi-process service lets their kernels overlap. After `--seconds`, those that still run are stopped.
Then, or with `--collect`, the metrics are thinned to OUT/results, in the layout that `policyc report` reads. Run it
again with other seeds, and merge the folders, to add seeds. With `--variants NAME`, the table is bf16, fp8, a policy of
docs/results/policies and all its variants:

    python -m benchmarks.mixed_formats --variants nvfp4_options --config 5m --steps 1526 --corpus corpus --out OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import policyc
from benchmarks.command_line import make_parser

POLICIES = Path(__file__).parents[1] / "docs" / "results" / "policies"
BUNDLED = POLICIES.parents[2] / "policies"
STEPS = 3072  # of 64 sequences of 512 tokens: 100.7M tokens
MIXED = "mlp_nvfp4_rest_fp8"
TABLE = (
    "bf16", "fp8", "te_nvfp4", MIXED, "rollout_nvfp4", "fp8_with_head", "mlp_nvfp4_late_fp8", "mxfp4_all_blocks",
    "llama_nvfp4", "fitted_te", "fitted_llama", "mlp_nvfp4_late_bf16",
)  # fmt: skip
"""In the order in which they run: what matters most comes first. The late switches continue MIXED."""
KEPT = ("te_nvfp4", "rollout_nvfp4")
"""Policies whose last weights are kept: benchmarks.served_gap serves them."""
BASELINES = ("bf16", "fp8")
MARGIN = "0.5%"
LATE = tuple(name for name in TABLE if "late" in name)
SWITCH = 82  # percent of the steps
MEANS = 100
"""Lines of thinned metrics, each the mean of as many steps."""
SETTINGS = ("steps", "batch", "sequence", "learning_rate", "schedule", "warmup", "final", "data")
ABOUT = ("program", "config", "seed", "policy_sha256", "data", "device", "devices", "versions")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--corpus", type=Path, default=Path("corpus"), help="folder of train.bin, validation.bin"
    )
    parser.add_argument("--config", default="19m")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1.4e-3)
    parser.add_argument("--eval-batches", type=int, default=21, help="of --batch sequences")
    parser.add_argument("--seeds", default="200,201,202")
    parser.add_argument("--variants", metavar="NAME", help="a policy whose variants are the table")
    parser.add_argument("--only", metavar="NAME,...", help="these rows of the table  [default: all]")
    parser.add_argument("--jobs", type=int, default=5, help="processes that share the device")
    parser.add_argument("--seconds", type=float, default=86_400, help="time limit of all runs together")
    parser.add_argument("--collect", action="store_true", help="only thin the metrics of the runs in OUT")
    parser.add_argument("--out", type=Path, required=True)
    options, extra = parser.parse_known_args()  # other options are those of the trainer
    table = find_policies(options.variants)
    if not options.collect:
        only = options.only.split(",") if options.only else list(table)
        runs = [(name, seed) for name in table if name in only for seed in options.seeds.split(",")]
        train_all(runs, table, options, extra)
    print(json.dumps(collect(options.out, table), indent=1))
    return 0


def find_policies(variants: str | None = None) -> dict[str, str]:
    """The policies to train by name, in the order in which they run: TABLE, or the variants of a policy."""
    if not variants:
        files = {name: POLICIES / f"{name}.policy" for name in TABLE}
        return {name: str(file) if file.exists() else name for name, file in files.items()}
    file = str(POLICIES / f"{variants}.policy")
    named = {variant.name: f"{file}:{variant.name}" for variant in policyc.load(file).variants}
    return {name: name for name in BASELINES} | {variants: file} | named


def train_all(waiting: list[tuple[str, str]], table: dict[str, str], options: Any, extra: list[str]) -> None:
    """Runs policies of the table with their seeds. A late switch waits for the run that it continues."""
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
    begin = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)

    while (waiting or running) and time.monotonic() - begin < options.seconds:
        for one in [one for one, process in running.items() if process.poll() is not None]:
            note(f"{'/'.join(one)} ended with {running.pop(one).returncode}")
        ready = [
            one for one in waiting if one[0] not in LATE or is_finished(run_folder(options, MIXED, one[1]))
        ]
        for one in ready[: options.jobs - len(running)]:
            waiting.remove(one)
            running[one] = start(*one, table[one[0]], options, extra)
            note(f"{'/'.join(one)} begins")
        if not ready and not running:
            break
        time.sleep(0.2)
    for one, process in running.items():
        note(f"{'/'.join(one)} is stopped")
        process.kill()  # its metrics are written line by line
    for process in running.values():
        process.wait()
    note(f"not run: {', '.join(map('/'.join, waiting)) or 'none'}")


def run_folder(options: Any, name: str, seed: str) -> Path:
    folder: Path = options.out / name / f"seed{seed}"
    return folder


def start(name: str, seed: str, policy: str, options: Any, extra: list[str]) -> subprocess.Popen[bytes]:
    out = run_folder(options, name, seed)
    data = f"tokens:{options.corpus}/train.bin,dtype=uint16,validation={options.corpus}/validation.bin"
    switch = options.steps * SWITCH // 100
    settings = {
        "config": options.config, "steps": options.steps, "batch": options.batch, "seed": seed, "folder": out,
        "data": data, "learning-rate": options.learning_rate, "log-every": options.steps // 20,
        "eval-every": options.steps // 4, "eval-batches": options.eval_batches,
        "checkpoint-every": switch if name == MIXED else options.steps if name in KEPT else 0,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    if name in LATE:
        checkpoint = run_folder(options, MIXED, seed) / "checkpoints" / str(switch)
        words += ["--resume-from", str(checkpoint), "--accept-changes"]
    command = [sys.executable, "-m", "policyc", "train", "--policy", policy, "--no-scan", *words, *extra]
    out.parent.mkdir(parents=True, exist_ok=True)
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / options.jobs:.2f}"}
    with (out.parent / f"seed{seed}.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=share | os.environ)


def is_finished(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.exists() and '"is_complete": true' in metrics.read_text()


# ---- thinned metrics


def collect(out: Path, table: dict[str, str]) -> dict[str, dict[str, float | None]]:
    """Writes OUT/results. Returns the last validation loss of each run, None without one.

    `sweep.json` names the whole table: Holm's correction counts the policies that have not run, too.
    """
    last: dict[str, dict[str, float | None]] = {}
    steps = 0
    for metrics in sorted(out.glob("*/seed*/metrics.jsonl")):
        rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        about = json.loads((metrics.parent / "run.json").read_text())
        policy, seed = metrics.parts[-3:-1]
        folder = out / "results" / policy / seed
        folder.mkdir(parents=True, exist_ok=True)
        steps = about["settings"]["steps"]
        thinned = thin(rows, steps // MEANS or 1)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in thinned))
        settings = {name: about["settings"][name] for name in SETTINGS}
        settings["data"] = "tokens:train.bin,validation=validation.bin"
        shown = {name: about[name] for name in ABOUT} | {"settings": settings}
        (folder / "run.json").write_text(json.dumps(shown) + "\n")
        losses = [row["validation_loss"] for row in thinned if "validation_loss" in row]
        last.setdefault(policy, {})[seed] = losses[-1] if losses else None
    for name, policy in table.items():
        (out / "results" / name).mkdir(parents=True, exist_ok=True)
        (out / "results" / name / "policy.policy").write_text(policy_text(policy))
    seeds = sorted({int(seed.removeprefix("seed")) for by_seed in last.values() for seed in by_seed})
    variants = [{"name": name} for name in table]
    design = {"baselines": BASELINES, "margin": MARGIN, "seeds": seeds, "steps": steps, "variants": variants}
    (out / "results" / "sweep.json").write_text(json.dumps(design) + "\n")
    return last


def policy_text(policy: str) -> str:
    """The text of a file, or of a bundled policy; the rules of a variant."""
    if ":" in policy:
        return f"{replace(policyc.load(policy), variants=())}\n"
    return (Path(policy) if policy.endswith(".policy") else BUNDLED / f"{policy}.policy").read_text()


def thin(rows: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """The mean loss and gradient norm of every `every` steps, then the validation losses."""
    steps = {row["step"]: row for row in rows if "loss" in row}
    lines: list[dict[str, Any]] = []
    last = max(steps, default=0)
    for start in range(0, last, every):
        step = min(start + every, last)  # a run is finished if its last step is there
        block = [steps[each] for each in range(start + 1, step + 1) if each in steps]
        means = {name: float(np.mean([row[name] for row in block])) for name in ("loss", "grad_norm")}
        line = {"step": step, "tokens": block[-1]["tokens"]}
        lines.append(line | {"loss": round(means["loss"], 5), "grad_norm": round(means["grad_norm"], 4)})
    validation = {row["step"]: row for row in rows if "validation_loss" in row}
    names = ("step", "tokens", "validation_loss", "validation_loss_evaluated_in_bf16")
    return lines + [{k: row[k] for k in names if k in row} for row in validation.values()]


if __name__ == "__main__":
    sys.exit(main())
