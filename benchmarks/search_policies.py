"""Is a policy that the search finds better than others of the same predicted speed?

    python -m benchmarks.search_policies --out OUT

Trains a small Llama in bf16, scores it at three checkpoints, and finds policies at the predicted time of `te_nvfp4` and
of `llama_nvfp4`. Then trains these, random policies of the same time, "the last N blocks in bf16", the bundled ones,
and `te_nvfp4` in one product each, all with the same seeds. Writes OUT/search.json: scores, predictions, validation
losses by seed, and gaps. Speed is predicted for the same number of blocks with the widths of Llama 3 8B on 8 GB200: at
the size of the trained model, no format is faster. Runs that have not finished after --minutes are left out. With
--policies, trains the policies of an earlier OUT, and scores nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.command_line import make_parser
from policyc.compiler.matching.execution import execution_options
from policyc.experiments.program import Program
from policyc.experiments.record import KEEP, record_loss
from policyc.experiments.search.candidates import parse_formats
from policyc.experiments.search.found import Searched
from policyc.experiments.search.problem import Assignment, Pricer, expand, make_problem
from policyc.experiments.search.scores import Scores, score_formats
from policyc.experiments.search.solve import minimize_damage
from policyc.hardware import llama_step
from policyc.hardware.mesh import parse_mesh
from policyc.hardware.step_cost import estimate
from policyc.language.bundled import data_folder
from policyc.language.loader import load, parse
from policyc.models.llama.configs import CONFIGS

TRAINER = str(data_folder("models") / "llama" / "train.py")
FORMATS = "nvfp4,fp8"
NV = "recipe nv = nvfp4(rht=wgrad, sr=grad, scale2d=weights)\n"
BLOCKS = "* where block and (attention or mlp)"
RANDOM_TRIES = 9000
NEAR = 1.005
"""Predicted times up to this factor longer count as the same time."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", default="5m")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the GPU")
    parser.add_argument("--minutes", type=float, default=8.7)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument(
        "--attention", default="xla", help="fused attention hides how noise is divided among sites"
    )
    parser.add_argument("--eval-batches", type=int, default=64)
    parser.add_argument("--policies", type=Path, help="the OUT of an earlier run, whose policies are trained")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    study = Study(options)
    if options.policies is not None:
        study.read_policies(options.policies)
        study.train_all()
        return
    study.train_reference()
    scores = [study.score(step) for step in study.checkpoints]
    study.find(scores[-1])
    study.describe_scores(scores)
    study.report()
    study.train_all()


class Study:
    """The policies, their runs, and the results so far."""

    def __init__(self, options: Any) -> None:
        self.options, self.started = options, time.monotonic()
        self.out = options.out.absolute()
        self.runs = Path(os.environ.get("TMPDIR", "/tmp")) / f"search_policies_{os.getpid()}"
        third = options.steps // 3
        self.checkpoints = [third, 2 * third, 3 * third]
        self.policies: dict[str, str] = {}
        self.predicted: dict[str, dict[str, float]] = {}
        self.losses: dict[str, dict[str, float]] = {}
        self.plain: dict[str, dict[str, float | None]] = {}
        """Losses evaluated in bf16; None if the run did not measure them."""
        self.scores: dict[str, Any] = {}
        self.notes: list[str] = []
        (self.out / "policies").mkdir(parents=True, exist_ok=True)

    def note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self.started:.0f} s: {text}")
        print(self.notes[-1], flush=True)

    # ---- the reference and its scores

    def trainer_words(self) -> list[str]:
        options = self.options
        return [
            "--config",
            options.config,
            "--batch",
            str(options.batch),
            "--learning-rate",
            "1e-3",
            "--data",
            options.data,
            "--warmup",
            "0.1",
            "--attention",
            options.attention,
        ]

    def train_reference(self) -> None:
        """Trains one seed in bf16, and saves the checkpoints that are scored."""
        words = [*self.trainer_words(), "--steps", str(self.checkpoints[-1]), "--folder", str(self.runs / "reference"),
                 "--checkpoint-every", str(self.checkpoints[0]), "--keep", "4"]  # fmt: skip
        subprocess.run([sys.executable, TRAINER, *words], check=True)
        self.note("trained the reference")

    def score(self, step: int) -> Scores:
        checkpoint = self.runs / "reference" / "checkpoints" / str(step)
        words = [*self.trainer_words(), "--steps", str(step + 8), "--folder", str(self.runs / f"record{step}"),
                 "--checkpoint-every", "0", "--resume-from", str(checkpoint), "--accept-changes"]  # fmt: skip
        recorded = record_loss(Program(TRAINER, tuple(words)), 4)
        scores = score_formats(recorded, parse_formats(FORMATS))
        self.note(f"scored step {step}: loss {np.mean(scores.losses):.4f}")
        return scores

    def read_policies(self, folder: Path) -> None:
        """Reads the policies of an earlier run, and its predictions for them."""
        data = json.loads((folder / "search.json").read_text())
        self.predicted = data["predicted"]
        for name in self.predicted:
            self.policies[name] = (folder / "policies" / f"{name}.policy").read_text()
            (self.out / "policies" / f"{name}.policy").write_text(self.policies[name])

    # ---- policies of the same time

    def find(self, scores: Scores) -> None:
        whole, layers = CONFIGS["llama3_8b"][0], CONFIGS[self.options.config][0].layers
        # The head keeps its share of the step.
        wide = dataclasses.replace(whole, layers=layers, vocab=whole.vocab * layers // whole.layers // 8 * 8)
        CONFIGS["wide"] = (wide, CONFIGS["llama3_8b"][1])
        execution, mesh = execution_options("te", "gb200"), parse_mesh("fsdp=8", 8)
        step = llama_step.plan_step(parse(KEEP), "wide", mesh, llama_step.Sizes(batch=1024), execution)
        formats = parse_formats(FORMATS)
        problem = make_problem(Pricer(step, mesh, formats), scores)
        searched = Searched(problem=problem, scores=scores, step=step, mesh=mesh, segments=4,
                            source=self.options.config, command="benchmarks.search_policies")  # fmt: skip
        self.searched = searched
        for name in ("te_nvfp4", "llama_nvfp4", "fp8"):
            self.policies[name] = load(name).source.text
        for gemm in ("fprop", "dgrad", "wgrad"):
            self.policies[f"te_{gemm}"] = f"{NV}* @ {gemm} where block and (attention or mlp) -> nv\n"
        target = step.plan.execution.target
        assert target is not None
        for name in ("te_nvfp4", "llama_nvfp4"):
            seconds = estimate(step.under(load(name)), target, mesh).seconds
            short = name.partition("_")[0]
            self.policies[f"found_{short}"] = searched.write_policy(minimize_damage(problem, seconds, 4))
            for number, assignment in enumerate(self._random(seconds, 2)):
                self.policies[f"random_{short}_{number}"] = self._write(assignment)
            last = self._last_blocks(seconds)
            if last:
                self.policies[f"last_{last}_{short}"] = (
                    f"{NV}{BLOCKS} -> nv\n* where layer >= -{last} -> keep\n"
                )
        for name, text in self.policies.items():
            (self.out / "policies" / f"{name}.policy").write_text(text)
            policy = parse(text)
            cost = searched.place_policy(policy)
            seconds = estimate(step.under(policy), target, mesh).seconds
            damage = cost.damage if cost else float("nan")
            self.predicted[name] = {"speed_up": problem.seconds / seconds, "damage": damage}
        self.note(f"found policies: {json.dumps(self.predicted)}")

    def _random(self, seconds: float, count: int) -> list[Assignment]:
        """Random formats by group and third of the layers: the assignments just within the time limit."""
        problem = self.searched.problem
        generator = np.random.default_rng(0)
        layers = 1 + max(i.number for i in problem.items if i.number is not None)
        bundled = [self.searched.read_assignment(parse(text)) for text in self.policies.values()]
        tried: list[tuple[float, Assignment]] = []
        for number in range(RANDOM_TRIES):
            power = 1 + 3 * (number % 3)  # the fastest are rare
            chosen: dict[Any, Any] = {}

            def choose(item: Any, chosen: dict[Any, Any] = chosen, power: int = power) -> Any:
                key = item.group, None if item.number is None else 3 * item.number // layers
                choices = list(item.options)
                weights = np.array([1 + 3 * sum(f == "nv" for f in c) for c in choices], float) ** power
                return chosen.setdefault(
                    key, choices[generator.choice(len(choices), p=weights / weights.sum())]
                )

            assignment = expand(problem, choose)
            time_of = problem.total(assignment).seconds
            if time_of <= NEAR * seconds and assignment not in bundled:
                tried.append((abs(seconds - time_of), assignment))
        return [assignment for _, assignment in sorted(tried, key=lambda t: t[0])[:count]]

    def _write(self, assignment: Assignment) -> str:
        from policyc.experiments.search.rules import write_rules

        return NV + "\n".join(write_rules(self.searched.problem, self.searched.plan, assignment)) + "\n"

    def _last_blocks(self, seconds: float) -> int:
        """How many of the last blocks can stay in bf16 within this time, if all others are in NVFP4."""
        step, mesh = self.searched.step, self.searched.mesh
        target = step.plan.execution.target
        assert target is not None
        count = 0
        for last in range(1, CONFIGS[self.options.config][0].layers):
            policy = parse(f"{NV}{BLOCKS} -> nv\n* where layer >= -{last} -> keep")
            if estimate(step.under(policy), target, mesh).seconds <= NEAR * seconds:
                count = last
        return count

    # ---- training

    def train_all(self) -> None:
        """Trains all policies, those of the main comparison first. Kills runs that have not ended after --minutes."""
        first = ("bf16", "found_te", "te_nvfp4", "found_llama", "llama_nvfp4")
        queue = sorted(("bf16", *self.policies), key=lambda n: (first.index(n) if n in first else 9, n))
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            while (queue or running) and self._seconds_left() > 0:
                while queue and len(running) < self.options.jobs:
                    name = queue.pop(0)
                    running[name] = self._start(name)
                time.sleep(0.5)
                for name, process in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        self._read(name)
                        self.report()
        finally:
            for process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self.note(f"left out: {[*running, *queue]}")
            self.report()

    def _seconds_left(self) -> float:
        return float(60 * self.options.minutes - (time.monotonic() - self.started))

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        options = self.options
        words = [*self.trainer_words(), "--steps", str(options.steps), "--seeds", options.seeds,
                 "--checkpoint-every", "0", "--eval-every", str(options.steps),
                 "--eval-batches", str(options.eval_batches),
                 "--folder", str(self.runs / name)]  # fmt: skip
        policy = [] if name == "bf16" else ["--policy", str(self.out / "policies" / f"{name}.policy")]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with (self.out / f"{name}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, "-m", "policyc.cli.main", "train", *policy, *words], stdout=log,
                                    stderr=log, env=environment, start_new_session=True)  # fmt: skip

    def _read(self, name: str) -> None:
        """Reads the last validation loss of each seed, under the policy and in bf16."""
        for seed in self.options.seeds.split(","):
            path = self.runs / name / f"seed{seed}" / "metrics.jsonl"
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [row for line in lines if "validation_loss" in (row := json.loads(line))]
            if not rows:
                self.note(f"{name} has no result: {(self.out / f'{name}.log').read_text()[-800:]}")
                return
            self.losses.setdefault(name, {})[seed] = rows[-1]["validation_loss"]
            self.plain.setdefault(name, {})[seed] = rows[-1].get("validation_loss_evaluated_in_bf16")
        self.note(f"{name}: {self.losses[name]}")

    # ---- the result

    def report(self) -> None:
        gaps: dict[str, Any] = {}
        reference = self.losses.get("bf16", {})
        for name, losses in self.losses.items():
            each = [losses[s] - reference[s] for s in losses if s in reference]
            if each and name != "bf16":
                gaps[name] = {
                    "mean": float(np.mean(each)),
                    "deviation": float(np.std(each, ddof=1)),
                    "each": each,
                }
        measured = [(self.predicted[n]["damage"], g["mean"]) for n, g in gaps.items() if n in self.predicted]
        data = {
            "options": {
                k: str(v) for k, v in vars(self.options).items() if k not in ("out", "policies", "data")
            },
            "notes": self.notes,
            "predicted": self.predicted,
            "losses": self.losses,
            "losses_evaluated_in_bf16": self.plain,
            "gaps": gaps,
            "rank_correlation": _rank_correlation([m for m in measured if np.isfinite(m[0])]),
            **self.scores,
        }
        (self.out / "search.json").write_text(json.dumps(data, indent=1))

    def describe_scores(self, scores: list[Scores]) -> None:
        """The scores of all checkpoints, and the rank correlation of each with the last."""
        self.scores = {
            "score_stability": [_rank_correlation(_pairs(each, scores[-1])) for each in scores[:-1]],
            "scores": {step: _rows(each) for step, each in zip(self.checkpoints, scores, strict=True)},
        }


def _rows(scores: Scores) -> list[dict[str, Any]]:
    return [
        {"site": key[0], "layer": key[1], "product": str(gemm), "format": format, **dataclasses.asdict(score)}
        for (key, gemm, format), score in scores.by_product.items()
    ]


def _pairs(one: Scores, other: Scores) -> list[tuple[float, float]]:
    return [
        (score.damage, other.by_product[key].damage)
        for key, score in one.by_product.items()
        if key in other.by_product
    ]


def _rank_correlation(pairs: list[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


if __name__ == "__main__":
    main()
