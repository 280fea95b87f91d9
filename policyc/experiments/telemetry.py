"""Measures the effect of a policy on the numerics of a loss, in a separate step.

For each operand of each quantized GEMM in each layer: its SQNR, the fractions flushed to zero, saturated, and zero
before quantization, and its largest magnitude. For each parameter: the cosine between its gradient under the policy and
its plain gradient, the norm of the plain gradient over the norm of their difference, and whether only the policy makes
it zero. Ragged products and sites inside a shard_map run as the policy says but are not measured.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.base.files import atomic_write, parse_json, read_file
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.pipeline import LossCall, as_policy, no_reentry, plan_loss
from policyc.compiler.planning.plan import Plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.schedule import current_phase
from policyc.compiler.session import Session
from policyc.experiments.report.runs import describe_zero_gradients
from policyc.experiments.taps import TappedLoss, first_loss
from policyc.language.policy import Policy
from policyc.language.selectors import DottedPath
from policyc.numerics.operand_stats import summarize_errors

StatsRow = dict[str, Any]


def stats(policy: Policy | str | Path, loss: Callable[..., Any], *args: Any) -> list[StatsRow]:
    """Measures the effect of a policy on the numerics of a loss.

    Args:
      policy: a `Policy`, a path, the name of a bundled policy, or the text of a policy.
      loss: the loss function, which is executed.
      *args: its arguments. The first one holds the parameters.

    Returns:
      The rows of `stats.jsonl`: one for each operand of each quantized product, one for each parameter (or each layer
      of a stack), and one with the loss under the policy and the plain loss.
    """
    return StatsRecorder(policy, loss)(*args)


def measure_step(session: Session, step: int, loss: Callable[..., Any], args: Sequence[Any]) -> None:
    """Measures a loss under the policy of a session, and appends the rows to `stats.jsonl`."""
    if loss not in session.recorders:
        session.recorders[loss] = StatsRecorder(
            session.policy, loss, session.execution, multiple_losses=session.multiple_losses
        )
    recorder = session.recorders[loss]
    rows = recorder(*args)
    if jax.process_index() == 0:
        zeros = describe_zero_gradients(rows)
        if zeros:
            warnings.warn(f"step {step}: {zeros}", stacklevel=2)
        path = ((session.output_dir or Path()) / "stats.jsonl").absolute()
        if not any(path in other.files for other in session.recorders.values()):
            _drop_rows(path, step)
        recorder.files.add(path)
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)


class StatsRecorder:
    """Measures one loss. It is compiled once for each phase of the policy's schedule."""

    def __init__(
        self,
        policy: Policy | str | Path,
        loss: Callable[..., Any],
        execution: ExecutionOptions | None = None,
        *,
        multiple_losses: bool = False,
    ) -> None:
        self._policy, self._loss = as_policy(policy), loss
        self._execution, self._multiple_losses = execution or ExecutionOptions(), multiple_losses
        self._tapped: dict[Phase, TappedLoss] = {}
        self._measure = jax.jit(self._trace_step)
        self.files: set[Path] = set()
        """The files that the rows were written to."""

    def __call__(self, *args: Any) -> list[StatsRow]:
        with no_reentry():
            measured = jax.device_get(self._measure(*args))
        plan = next(iter(self._tapped.values())).plan
        tapped = self._tapped[current_phase(plan)]
        losses = {"loss": _json_number(measured["loss"]), "plain_loss": _json_number(measured["plain"])}
        return [
            *operand_rows(tapped, measured["taps"]),
            *_gradient_rows(plan, measured["gradients"]),
            losses,
        ]

    def _trace_step(self, *args: Any) -> dict[str, Any]:
        call = LossCall(fn=self._loss, args=args, param_argnums=(0,))
        planned = plan_loss(self._policy, call, self._execution)
        plan, traced = planned.plan, planned.traced
        check_plan(plan, may_miss=self._multiple_losses)
        phase = current_phase(plan)
        tapped = self._tapped[phase] = TappedLoss(plan, plan.decisions(phase))

        def under_policy(inputs: Sequence[Any], taps: Sequence[jax.Array]) -> jax.Array:
            return first_loss(traced.assemble_result(tapped.evaluate(inputs, taps)))

        def plain(inputs: Sequence[Any]) -> jax.Array:
            return first_loss(traced.run(traced.jaxpr, inputs))

        inputs = call.inputs(args)
        value_and_grad = jax.value_and_grad(under_policy, argnums=(0, 1), allow_int=True)
        loss, (gradients, taps) = value_and_grad(inputs, tapped.taps())
        plain_loss, plain_gradients = jax.value_and_grad(plain, allow_int=True)(inputs)
        stacks = stacked_parameters(plan)
        compared = [
            _compare_gradients(a, b, path in stacks)
            for a, b, path in zip(gradients, plain_gradients, plan.sites.parameters, strict=True)
        ]
        return {"taps": taps, "gradients": compared, "loss": loss, "plain": plain_loss}


# ---- rows


def operand_rows(tapped: TappedLoss, taps: Sequence[np.ndarray]) -> Iterator[StatsRow]:
    for site, layer, operand_names, figures in tapped.measurements(taps):
        path = site.layer_path(site.stack_indices(layer))
        labels = _site_and_layer(path, site.name)
        for number, (name, format) in enumerate(operand_names):
            if format:
                yield {
                    **labels,
                    "operand": name,
                    "format": format,
                    **summarize_errors(figures[..., number, :]),
                }


def _site_and_layer(path: DottedPath, default: str = "") -> StatsRow:
    """Splits a path into the site, without indices, and the layer: its index, a list if it has several, or None."""
    indices = [n.index for n in path if n.index is not None]
    return {
        "site": ".".join(n.text for n in path) or default,
        "layer": indices[0] if len(indices) == 1 else indices or None,
    }


# ---- gradients


def stacked_parameters(plan: Plan) -> set[DottedPath]:
    """The parameters whose first axis is a stack of layers."""
    templates = (t for s in plan.sites if s.stacks for t in s.parameters)
    return {t.path for t in templates if any(slot.axis == 0 for slot in t.slots)}


def _compare_gradients(a: jax.Array, b: jax.Array, by_layer: bool) -> jax.Array:
    """By layer: the cosine of a gradient with the plain one, the plain norm over that of their difference, and whether
    it is zero where the plain one is not.
    """
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.zeros((3, 0))
    rows = a.shape[0] if by_layer else 1
    x, y = (g.astype(jnp.float32).reshape(rows, -1) for g in (a, b))
    # Scale to a maximum of 1: no ratio changes, and the squares of small gradients do not underflow.
    largest = jnp.max(jnp.maximum(jnp.abs(x), jnp.abs(y)), axis=1, keepdims=True)
    x, y = (g / jnp.maximum(largest, 1e-30) for g in (x, y))
    norms = jnp.sum(x * x, 1), jnp.sum(y * y, 1)
    return jnp.stack(
        [
            jnp.sum(x * y, 1) / jnp.sqrt(norms[0] * norms[1]),
            jnp.sqrt(norms[1] / jnp.sum((x - y) ** 2, 1)),
            (norms[0] == 0) & (norms[1] > 0),
        ]
    )


def _gradient_rows(plan: Plan, compared: Sequence[np.ndarray]) -> Iterator[StatsRow]:
    """Yields a row for each parameter, or for each layer of a stacked parameter.

    Training stalls if `gradient_to_noise` is below √3 (arXiv:2505.19115).
    """
    stacks = stacked_parameters(plan)
    for path, values in zip(plan.sites.parameters, compared, strict=True):
        labels = _site_and_layer(path)
        for layer, (cosine, ratio, is_zero) in enumerate(values.T.tolist()):
            yield {
                "parameter": labels["site"],
                "layer": layer if path in stacks else labels["layer"],
                "cosine": _json_number(cosine),
                "gradient_to_noise": _json_number(ratio),
                **({"is_zero": True} if is_zero else {}),
            }


def _json_number(value: Any) -> float | None:
    """Converts a number for JSON: NaN and infinities become None."""
    return float(value) if math.isfinite(value) else None


# ---- files


def _drop_rows(path: Path, step: int) -> None:
    """Prepares a file for the rows of a session. Drops rows from this step on: the run is resumed here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = read_file(path).splitlines(keepends=True) if path.exists() else []
    with atomic_write(path) as stream:
        stream.writelines(line for line in lines if _read_step(line) < step)


def _read_step(line: bytes) -> float:
    """The step of a line; infinity if the line is damaged, for example after a kill."""
    try:
        return float(parse_json(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
