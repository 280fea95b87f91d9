"""What a run of a sweep asks of Slurm: `--slurm partition=long,gpus=8,nodes=16,time=1440`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from policyc.base.text import did_you_mean
from policyc.experiments.sweep.wrapper import DEFAULT_GRACE

_NUMBERS = {
    "nodes": "nodes of a run",
    "gpus": "GPUs on each node",
    "tasks": "processes on each node; default: one per GPU if a run has several GPUs, as JAX expects under Slurm",
    "cpus": "CPUs of each process",
    "time": "time limit in minutes; a run that is longer is requeued and goes on from its checkpoint",
    "grace": f"seconds that a run gets to save before it is requeued ({DEFAULT_GRACE})",
}
_TEXTS = ("partition", "account", "qos", "mem", "constraint", "nodelist", "exclude", "reservation")
"""Options that Slurm gets as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The resources of one run. `sbatch` holds the texts."""

    time: int
    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    cpus: int | None = None
    grace: int = DEFAULT_GRACE
    sbatch: tuple[tuple[str, str], ...] = ()

    @property
    def processes(self) -> int:
        """How many processes one run has."""
        return self.nodes * self.tasks

    def submitit_parameters(self) -> dict[str, Any]:
        """The parameters of `submitit.SlurmExecutor`."""
        numbers = {
            "time": self.time,
            "nodes": self.nodes,
            "ntasks_per_node": self.tasks,
            "cpus_per_task": self.cpus,
            # Not gpus_per_task: JAX takes the GPU with the number of its process, so it must see all of a node.
            "gpus_per_node": self.gpus or None,
            # The wrapper kills a program that does not stop after `grace`, and then writes the status.
            "signal_delay_s": self.grace + 30,
        }
        return {
            **{name: value for name, value in numbers.items() if value is not None},
            "additional_parameters": {**dict(self.sbatch), "requeue": True},
            "srun_args": ["--kill-on-bad-exit=1"],  # a process that fails ends the others
        }


def parse_slurm_options(texts: Sequence[str]) -> SlurmOptions:
    """Reads `partition=long,gpus=8`. Raises ValueError that names every fault."""
    values: dict[str, Any] = {}
    sbatch: list[tuple[str, str]] = []
    errors: list[str] = []
    for word in (word.strip() for text in texts for word in text.split(",")):
        name, equals, value = word.partition("=")
        if name not in (*_NUMBERS, *_TEXTS):
            errors.append(f"no option '{name}': {did_you_mean(name, (*_NUMBERS, *_TEXTS))}")
        elif not equals or not value:
            errors.append(f"'{name}' has no value: write {name}=VALUE")
        elif name in _TEXTS:
            sbatch.append((name, value))
        elif not value.isdecimal() or (int(value) == 0 and name != "gpus"):
            errors.append(f"{name}={value}: expected a number ({_NUMBERS[name]})")
        else:
            values[name] = int(value)
    if "time" not in values and not errors:
        errors.append("time is missing: give the time limit of a run in minutes, such as time=240")
    if errors:
        raise ValueError("--slurm: " + "; ".join(errors))
    nodes, gpus = values.get("nodes", 1), values.get("gpus", 0)
    values.setdefault("tasks", gpus if nodes * gpus > 1 else 1)
    return SlurmOptions(**values, sbatch=tuple(sbatch))


def check_program(options: SlurmOptions, config: str | None, words: Sequence[str]) -> None:
    """Raises ValueError if the processes of a run of the bundled trainer would not know of each other."""
    if config is not None and options.processes > 1 and "--distributed" not in words:
        raise ValueError(
            f"--slurm: a run has {options.processes} processes ({options.nodes} x {options.tasks}): add "
            "--distributed to the options of the trainer, or give tasks=1"
        )
