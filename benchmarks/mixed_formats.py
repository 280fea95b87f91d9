"""Trains the policies of docs/results/19m_mixed_formats with the same seeds, and keeps thinned metrics.

    python -m benchmarks.corpus corpus
    python -m benchmarks.mixed_formats --corpus corpus --seeds 100,101,102 --out OUT

All seeds of a policy run in one process. `--jobs` processes share the device, in the order of the table, so that one
trains while another compiles. After `--seconds`, those that still run are stopped. Then, or with `--collect`, the
metrics are thinned to OUT/results, in the layout that `policyc report` reads. Run it again with other seeds, and merge
the folders, to add seeds. With `--variants NAME`, the table is bf16, fp8, a policy of docs/results/policies and all its
variants:

    python -m benchmarks.mixed_formats --variants nvfp4_options --corpus corpus --seeds 100,101,102 --out OUT
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
STEPS = 12_300  # of 16 sequences of 512 tokens: 100.8M tokens
MIXED = "mlp_nvfp4_rest_fp8"
TABLE = (
    "bf16", "fp8_with_head", MIXED, "fp8", "te_nvfp4", "fitted_te", "mlp_nvfp4_late_fp8", "llama_nvfp4",
    "mlp_nvfp4_late_bf16", "mxfp4_all_blocks", "fitted_llama",
)  # fmt: skip
"""In the order in which they run: what matters most comes first. The late switches continue MIXED."""
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
    parser.add_argument("--eval-batches", type=int, default=84)
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--variants", metavar="NAME", help="a policy whose variants are the table")
    parser.add_argument("--only", metavar="NAME,...", help="these rows of the table  [default: all]")
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the device")
    parser.add_argument("--seconds", type=float, default=86_400, help="time limit of all runs together")
    parser.add_argument("--collect", action="store_true", help="only thin the metrics of the runs in OUT")
    parser.add_argument("--out", type=Path, required=True)
    options, extra = parser.parse_known_args()  # other options are those of the trainer
    table = find_policies(options.variants)
    if not options.collect:
        only = options.only.split(",") if options.only else list(table)
        train_all([name for name in table if name in only], table, options, extra)
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


def train_all(waiting: list[str], table: dict[str, str], options: Any, extra: list[str]) -> None:
    """Runs policies of the table. A late switch waits for the checkpoint that it continues."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    begin = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)

    while (waiting or running) and time.monotonic() - begin < options.seconds:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            note(f"{name} ended with {running.pop(name).returncode}")
        ready = [name for name in waiting if name not in LATE or is_finished(options.out / MIXED)]
        for name in ready[: options.jobs - len(running)]:
            waiting.remove(name)
            running[name] = start(name, table[name], options, extra)
            note(f"{name} begins")
        if not ready and not running:
            break
        time.sleep(0.5)
    for name, process in running.items():
        note(f"{name} is stopped")
        process.kill()  # its metrics are written line by line
    for process in running.values():
        process.wait()
    note(f"not run: {', '.join(waiting) or 'none'}")


def start(name: str, policy: str, options: Any, extra: list[str]) -> subprocess.Popen[bytes]:
    out = options.out / name
    data = f"tokens:{options.corpus}/train.bin,dtype=uint16,validation={options.corpus}/validation.bin"
    switch = options.steps * SWITCH // 100
    settings = {
        "config": options.config, "steps": options.steps, "seeds": options.seeds, "data": data, "out": out,
        "eval-every": options.steps // 4, "eval-batches": options.eval_batches, "log-every": options.steps // 20,
        "checkpoint-every": switch if name == MIXED else 0,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    if name in LATE:
        first = options.seeds.partition(",")[0]
        checkpoint = options.out / MIXED / f"seed{first}" / "checkpoints" / str(switch)
        words += ["--resume-from", str(checkpoint), "--accept-changes"]
    command = [sys.executable, "-m", "policyc", "train", "--policy", policy, "--no-scan", *words, *extra]
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / options.jobs:.2f}"}
    with (out / "log.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def is_finished(folder: Path) -> bool:
    """Whether the run of the first seed reached its last step."""
    metrics = sorted(folder.glob("seed*/metrics.jsonl"))
    return bool(metrics) and '"is_complete": true' in metrics[0].read_text()


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
    for step in range(every, max(steps, default=0) + 1, every):
        block = [steps[each] for each in range(step - every + 1, step + 1) if each in steps]
        means = {name: float(np.mean([row[name] for row in block])) for name in ("loss", "grad_norm")}
        line = {"step": step, "tokens": block[-1]["tokens"]}
        lines.append(line | {"loss": round(means["loss"], 5), "grad_norm": round(means["grad_norm"], 4)})
    validation = {row["step"]: row for row in rows if "validation_loss" in row}
    names = ("step", "tokens", "validation_loss", "validation_loss_evaluated_in_bf16")
    return lines + [{k: row[k] for k in names if k in row} for row in validation.values()]


if __name__ == "__main__":
    sys.exit(main())
