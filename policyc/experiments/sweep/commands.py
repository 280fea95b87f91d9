"""The program of a sweep, and the command of each of its runs.

A program learns its seed, steps and output folder in two ways: from `{seed}`, `{steps}`, `{out}` and `{variant}` in its
arguments, and from the environment variables POLICYC_SEED, POLICYC_STEPS, POLICYC_RUN_DIR and POLICYC_VARIANT.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from policyc.base.compile_cache import VARIABLE as COMPILE_CACHE_VARIABLE
from policyc.base.python import PYTHON
from policyc.experiments.sweep.metrics import parse_metrics_source
from policyc.experiments.sweep.run import (
    POLICY_FILE,
    RUN_DIR_VARIABLE,
    SEED_VARIABLE,
    STEPS_VARIABLE,
    VARIANT_VARIABLE,
    Run,
)
from policyc.language.bundled import data_folder
from policyc.models.llama.command_line import parse_args
from policyc.models.llama.configs import CONFIGS

PLAN_FILE = "plan.json"

PLACEHOLDERS = {
    "{seed}": SEED_VARIABLE,
    "{steps}": STEPS_VARIABLE,
    "{out}": RUN_DIR_VARIABLE,
    "{variant}": VARIANT_VARIABLE,
}
"""Placeholders in the arguments of a program, each with the environment variable that has the same value."""

_SET_BY_SWEEP = ("--config", "--seed", "--seeds", "--steps", "--folder")
"""Options of the bundled trainer that a sweep sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgram:
    """The program that every run of a sweep executes.

    Attributes:
      words: the program and its arguments as given: `train.py --lr 1`, or the options of the bundled trainer.
      config: the configuration of the bundled trainer; None for another program.
      steps: the number of steps; None if the program decides.
      backend, require_native, multiple_losses, stats_every: how the program runs under its policy.
      metrics_source: KIND=PATH of another trainer's metrics; None if the program writes our lines.
    """

    words: tuple[str, ...]
    config: str | None = None
    steps: int | None = None
    backend: str = "auto"
    require_native: bool = False
    multiple_losses: bool = False
    stats_every: int = 0
    metrics_source: str | None = None

    def check(self) -> None:
        """Raises ValueError if this program cannot be swept."""
        if self.metrics_source is not None:
            parse_metrics_source(self.metrics_source)
        if self.steps is None and any("{steps}" in word for word in self.words):
            raise ValueError("the program's arguments have {steps}: give --steps")
        if self.config is None:
            return
        if self.metrics_source is not None:
            raise ValueError("--metrics: the bundled trainer writes metrics.jsonl itself")
        for word in self.words:
            option = word.partition("=")[0]
            if option in _SET_BY_SWEEP:
                raise ValueError(
                    f"{option} is set by the sweep: give --seeds, --steps, --folder and --config to policyc"
                )
        parse_args(["--config", self.config, *self.words])  # exits with the trainer's own message

    @property
    def total_steps(self) -> int | None:
        """The step at which a run is complete, if it is known before the run."""
        if self.config is None or self.steps is not None:
            return self.steps
        return CONFIGS[self.config][1].steps

    def make_run(self, variant: str, seed: int, out: Path, compile_cache: str | None = None) -> Run:
        """Builds the run of a variant with a seed."""
        folder = out / variant / f"seed{seed}"
        environment = {
            SEED_VARIABLE: str(seed),
            RUN_DIR_VARIABLE: str(folder),
            VARIANT_VARIABLE: variant,
        }
        if self.total_steps is not None:
            environment[STEPS_VARIABLE] = str(self.total_steps)
        if compile_cache is not None:  # a variable, because an option would make this another sweep
            environment[COMPILE_CACHE_VARIABLE] = compile_cache
        policy = str(out / variant / POLICY_FILE)
        # The bundled trainer writes its plan itself.
        plan_out = () if self.config else ("--plan-out", str(folder / PLAN_FILE))
        apply = (*PYTHON, "-m", "policyc", "apply", policy, *self._apply_options(), *plan_out)
        source = self.metrics_source
        run = Run(
            variant=variant,
            seed=seed,
            folder=folder,
            command=(),
            environment=environment,
            cwd=Path.cwd(),
            steps=self.total_steps,
            metrics_source=None if source is None else _fill((source,), environment)[0],
        )
        return replace(run, command=(*apply, *self.program_words(run)))

    def _apply_options(self) -> tuple[str, ...]:
        """The options of `policyc apply` that are not at their defaults."""
        return (
            *(("--backend", self.backend) if self.backend != "auto" else ()),
            *(("--require-native",) if self.require_native else ()),
            *(("--multiple-losses",) if self.multiple_losses else ()),
            *(("--stats-every", str(self.stats_every)) if self.stats_every else ()),
        )

    def program_words(self, run: Run) -> tuple[str, ...]:
        """The command line of the program for one run, without `policyc apply`."""
        if self.config is None:
            return _fill(self.words, run.environment)
        script = str(data_folder("models") / "llama" / "train.py")
        settings = ("--steps", str(self.total_steps), "--seed", str(run.seed), "--folder", str(run.folder))
        # A sweep has many runs: each keeps the one checkpoint that it needs to continue.
        keep = () if any(w.partition("=")[0] == "--keep" for w in self.words) else ("--keep", "1")
        return (script, "--config", self.config, *settings, *keep, *self.words)

    def source_hash(self) -> str | None:
        """The hash of a script, to tell whether it changed between two sweeps; None for other programs."""
        if self.config is not None or not os.path.isfile(self.words[0]):
            return None
        return hashlib.sha256(Path(self.words[0]).read_bytes()).hexdigest()


def make_runs(
    program: SweepProgram,
    variants: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    compile_cache: str | None = None,
) -> list[Run]:
    """The runs of a sweep in order: all variants with the first seed, then all variants with the next one.

    So a sweep that is stopped early has the same seeds for all variants.
    """
    return [program.make_run(variant, seed, out, compile_cache) for seed in seeds for variant in variants]


def _fill(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Replaces the placeholders in words. Other braces stay."""
    filled = []
    for word in words:
        for placeholder, variable in PLACEHOLDERS.items():
            if variable in environment:
                word = word.replace(placeholder, environment[variable])
        filled.append(word)
    return tuple(filled)
