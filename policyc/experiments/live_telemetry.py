"""Measures the operands of every loss of an unmodified program inside its own steps, and reports them while it runs.

The results of a step are those of the policy; a step that is measured also quantizes each operand once more.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from policyc.compiler.pipeline import PlannedLoss, no_reentry
from policyc.compiler.rewriting.run_step import current_run_step
from policyc.compiler.schedule import current_phase
from policyc.experiments.taps import GatedTapRewriter, TappedLoss
from policyc.experiments.telemetry import StatsRow, operand_rows

WANDB = "wandb"
_PREFIX = "policyc"

Sink = Callable[[int, list[StatsRow]], None]


class TelemetryError(ValueError):
    """The measurements could not be reported."""


class LiveTelemetry:
    """Measures every `every`-th evaluation of each loss, and passes the rows to a sink in a thread of its own. A loss
    that is differentiated inside a shard_map runs as the policy says, but is not measured.

    As a context it waits at its end for what is still measured, and raises what a sink raised as a TelemetryError.
    """

    def __init__(self, where: str, every: int) -> None:
        self._every = every
        self._open = ExitStack()
        self._sink = _log_to_wandb() if where == WANDB else _write_to_folder(Path(where), self._open)
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._pending: list[Future[None]] = []
        self._evaluations: Counter[Any] = Counter()
        self.measured = 0
        """The number of evaluations that were measured."""

    def __enter__(self) -> LiveTelemetry:
        return self

    def __exit__(self, *_: object) -> None:
        jax.effects_barrier()
        with self._open, self._writer:
            for future in self._pending:
                if error := future.exception():
                    raise TelemetryError(f"--telemetry: {error}") from error

    def compile(self, planned: PlannedLoss) -> Callable[..., Any]:
        """The loss as `planned.compile` builds it, which measures itself when it is differentiated."""
        plan = planned.plan
        decisions = plan.decisions(current_phase(plan))
        tapped = TappedLoss(plan, decisions, GatedTapRewriter, current_run_step())
        taps = tapped.taps()
        if (
            not taps or jax.sharding.get_abstract_mesh().manual_axes
        ):  # in a shard_map, a tap would need its axes
            return planned.compile()
        loss = plan.sites.sites, plan.sites.others

        def next_step() -> np.int32:
            step = self._evaluations[loss]
            self._evaluations[loss] += 1
            return np.int32(-1 if step % self._every else step)

        def report(step: Any, figures: Sequence[Any]) -> None:
            if jax.process_index() == 0:
                self.measured += 1
                arrays = [np.asarray(f) for f in figures]
                self._pending.append(self._writer.submit(self._report, int(step), tapped, arrays))

        @jax.custom_vjp
        def run(step: Any, inputs: Any) -> Any:
            del step
            return tapped.evaluate(inputs, taps)

        def forward(step: Any, inputs: Any) -> tuple[Any, Any]:
            skip = (step < 0).astype(jnp.float32)
            results, vjp = jax.vjp(tapped.evaluate, inputs, [tap + skip for tap in taps])
            return results, (vjp, step)

        def backward(residuals: Any, cotangents: Any) -> tuple[Any, Any]:
            vjp, step = residuals
            gradients, figures = vjp(cotangents)
            lax.cond(step < 0, lambda *_: None, lambda *a: jax.debug.callback(report, *a), step, figures)
            return None, gradients

        run.defvjp(forward, backward)

        def quantized(*args: Any) -> Any:
            with no_reentry():
                step = io_callback(next_step, jax.ShapeDtypeStruct((), np.int32))
                return planned.traced.assemble_result(run(step, planned.call.inputs(args)))

        return quantized

    def _report(self, step: int, tapped: TappedLoss, figures: Sequence[np.ndarray]) -> None:
        with no_reentry():
            self._sink(step, list(operand_rows(tapped, figures)))


def _scalars(rows: Sequence[StatsRow]) -> dict[str, float]:
    """The numbers of rows by tag: `policyc.METRIC/SITE.LAYER.PRODUCT.OPERAND`. `zeros` is only of gradients."""
    scalars = {}
    for row in rows:
        layer = "".join(f".{index}" for index in np.ravel(row["layer"]) if index is not None)
        for metric in ("sqnr_db", "flushed", "saturated", "zeros"):
            if row[metric] is not None and (metric != "zeros" or row["operand"].endswith("gradient")):
                scalars[f"{_PREFIX}.{metric}/{row['site']}{layer}.{row['operand']}"] = row[metric]
    return scalars


def _write_to_folder(folder: Path, stack: ExitStack) -> Sink:
    """Writes `stats.jsonl`, as `--stats-every` does, and an event file of TensorBoard."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = stack.enter_context((folder / "stats.jsonl").open("w", encoding="utf-8"))
    events = stack.enter_context(import_module("tensorboardX").SummaryWriter(str(folder), purge_step=0))

    def write(step: int, rows: list[StatsRow]) -> None:
        stream.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)
        stream.flush()
        for tag, value in _scalars(rows).items():
            events.add_scalar(tag, value, step)
        events.flush()

    return write


def _log_to_wandb() -> Sink:
    """Adds the numbers to the program's own run, with its next line of metrics; without one, to a run of their own."""
    wandb = import_module("wandb")
    runs: list[tuple[Any, bool]] = []

    def log(step: int, rows: list[StatsRow]) -> None:
        if not runs:
            is_own = wandb.run is None
            runs.append((wandb.init() if is_own else wandb.run, is_own))
            runs[0][0].define_metric(f"{_PREFIX}.*", step_metric=f"{_PREFIX}.step")
        run, is_own = runs[0]
        run.log({f"{_PREFIX}.step": step, **_scalars(rows)}, commit=is_own)

    return log
