"""Builds the report of some folders as data. docs/reference/reports.md describes its fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from policyc import __version__
from policyc.base.text import count_noun
from policyc.experiments.report.charts import make_charts
from policyc.experiments.report.equal_loss import compare_times, read_exchange
from policyc.experiments.report.series import (
    GRADIENT_SPIKE,
    LOSS_SPIKE,
    SPIKE_WINDOW,
    make_axis,
)
from policyc.experiments.report.summary import (
    FREE_SETTINGS,
    compare_all,
    find_inequalities,
    summarize_run,
    summarize_variant,
)
from policyc.experiments.report.sweeps import (
    SweepData,
    read_sweep,
    uses_validation,
)
from policyc.experiments.report.values import JsonObject, as_list, as_object, as_objects, as_text
from policyc.experiments.statistics import ALPHA, FEW_SEEDS, POWER, RERUN_NOISE
from policyc.experiments.sweep.metrics import LEAST_TRAILING, TRAILING_FRACTION
from policyc.numerics.backends import PRICED, title

FORMAT = 2
"""The version of the data. It changes when a field is removed or changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The step whose speed is predicted: a configuration of the bundled Llama on some GPUs, with a backend."""

    config: str = "llama3_8b"
    target: str = "gb200"
    devices: int = 8
    backend: str = PRICED

    def __str__(self) -> str:
        return f"{self.config} on {self.devices} × {self.target.upper()}, {title(self.backend)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The data of a report, and the runs that it was built from, with their telemetry and plans."""

    data: JsonObject
    sweep: SweepData

    @property
    def problems(self) -> list[str]:
        """Problems while building the report, and reasons why runs are not comparable."""
        return [*self.data["problems"], *(f"not comparable: {text}" for text in self.data["inequalities"])]


def build_report(
    folders: Sequence[Path],
    *,
    baselines: Sequence[str] = (),
    margin: str | None = None,
    step: PredictedStep | None = None,
    curve: str | None = None,
) -> Report:
    """Reads some folders and computes everything that a report shows. Raises ReportError or ValueError.

    Args:
      folders: runs and sweeps.
      baselines: the variants to compare with; by default those of the sweep.
      margin: the margin of parity; by default that of the sweep.
      step: the step to predict speed-ups for; None for no prediction.
      curve: how nats are exchanged for tokens, for `read_exchange`; by default by the curve of each baseline.
    """
    sweep = read_sweep(folders, baselines, margin)
    problems = [
        *sweep.problems,
        *(f"{run.name}: {problem}" for run in sweep.runs for problem in run.problems),
    ]
    axis = make_axis(sweep.runs)
    variants = [
        summarize_variant(variant, [summarize_run(run) for run in variant.runs]) for variant in sweep.variants
    ]
    comparisons = compare_all(sweep)
    margins = {c.baseline: c.margin for c in comparisons if c.margin is not None}
    speeds = {variant["name"]: variant["figures"]["tokens_per_second"] for variant in variants}
    predicted = _predict(sweep, step, problems) if step else None
    data: JsonObject = {
        "format": FORMAT,
        "policyc": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "title": sweep.title,
        "folders": [str(folder) for folder in folders],
        "axis": axis.label,
        "statistics": _statistics(sweep),
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "variants": variants,
        "equal_loss": compare_times(
            sweep,
            speeds,
            predicted["values"] if predicted else {},
            comparisons,
            read_exchange(curve) if curve else None,
        ),
        "speed_ups": predicted,
        "charts": make_charts(sweep, axis, margins),
        "diffs": _policy_diffs(sweep),
        "environment": _environment(sweep),
        "commands": _commands(sweep, [run for variant in variants for run in variant["runs"]]),
        "not_run": [
            {k: as_text(v) for k, v in row.items()} for row in as_objects(sweep.manifest.get("not_run"))
        ],
        "inequalities": find_inequalities(sweep),
        "problems": problems,
    }
    return Report(data=data, sweep=sweep)


def _predict(sweep: SweepData, step: PredictedStep, problems: list[str]) -> JsonObject | None:
    """Predicts speed-ups over the first baseline with a policy text. Variants without one are added to `problems`."""
    texts = {v.name: v.policy_text for v in sweep.variants if v.policy_text is not None}
    problems += [
        f"{v.name}: no policy.policy, so no speed-up is predicted"
        for v in sweep.variants
        if v.name not in texts
    ]
    baseline = next((name for name in sweep.baselines if name in texts), None)
    if baseline is None:
        problems.append("no baseline has a policy.policy, so no speed-up is predicted")
        return None
    return predict_speed_ups(texts, baseline, step)


def predict_speed_ups(policies: Mapping[str, str], baseline: str, step: PredictedStep) -> JsonObject:
    """Predicts the speed-up of each policy over the baseline. Raises ValueError if the step is not possible.

    The time of a policy with a schedule is the mean over all steps of a training run. `policies` maps names to policy
    texts, including the baseline's. `other` has the speed-ups of xla beside those of te, or the other way round.
    """
    from policyc.compiler.matching.execution import execution_options  # loads JAX
    from policyc.hardware import llama_step, step_cost
    from policyc.hardware.mesh import parse_mesh
    from policyc.language.loader import parse

    execution = execution_options(step.backend, step.target)
    mesh = parse_mesh(f"fsdp={step.devices}", step.devices)
    first = parse(policies[baseline])
    traced = llama_step.plan_step(first, step.config, mesh, llama_step.Sizes(), execution)
    steps = {name: traced.under(parse(text)) for name, text in policies.items()}
    others = {name: under.with_other_backend() for name, under in steps.items()}
    values, other = (
        {name: seconds[baseline] / each for name, each in seconds.items()}
        for seconds in (
            {name: step_cost.scheduled_seconds(under, traced.target, mesh) for name, under in side.items()}
            for side in (steps, others)
        )
    )
    named = {under.plan.execution.backend for name, under in others.items() if other[name] != values[name]}
    return {
        "step": str(step),
        "values": values,
        "other": {"backend": " or ".join(sorted(named)), "values": other} if named else None,
    }


def _statistics(sweep: SweepData) -> JsonObject:
    return {
        "measure": "validation_loss" if uses_validation(sweep) else "trailing_loss",
        "margin": str(sweep.margin),
        "alpha": ALPHA,
        "power": POWER,
        "baselines": list(sweep.baselines),
        "rules": _rules(sweep) if sweep.baselines else [],
        "caveats": _caveats(sweep) if sweep.baselines else [],
        "spikes": (
            f"A loss spike is a step more than {LOSS_SPIKE:g} robust standard deviations above the median of the "
            f"{SPIKE_WINDOW} steps before it. A gradient spike is a gradient norm of more than {GRADIENT_SPIKE:g} "
            "times that median."
        ),
    }


def _rules(sweep: SweepData) -> list[str]:
    """How the verdicts are made, in sentences. Nothing in them depends on the results."""
    trailing = (
        f"the mean training loss of the last {TRAILING_FRACTION:.0%} of the steps (at least {LEAST_TRAILING})"
    )
    validation = "the validation loss after the last step"
    losses = f"{validation}, which every finished run has"
    if not uses_validation(sweep):
        losses = f"{trailing}; {validation} is used only if every finished run has it"
    return [
        f"Losses: {losses}.",
        "Pairs: a variant and its baseline with the same seed, and so the same data order and initial weights.",
        f"Interval: paired t interval at {1 - ALPHA:.0%}, for each variant alone.",
        f"Rerun noise: two runs with the same policy and seed differ by up to {RERUN_NOISE} nats (19M parameters, "
        f"H200). An interval over {FEW_SEEDS} seeds or fewer may be narrower by chance; the reason says so.",
        f"Parity: two one-sided t tests show that the gap is within the margin of {sweep.margin}"
        f"{' of the loss of the baseline' if sweep.margin.is_relative else ''}.",
        "Better or worse: a two-sided paired t test shows a gap, and parity is not shown.",
        f"Correction: Holm's, over the variants of each baseline, failed ones included. The probability of any wrong "
        f"claim of a difference among all variants is at most {ALPHA:g}, and so is that of any wrong claim of "
        "parity.",
        f"Smallest detectable gap: found with {POWER:.0%} power at Holm's strictest level.",
        "Failed seeds: a variant that lost seeds cannot be at parity or better, because those that survived are not "
        "a fair sample. There is no verdict until all runs have ended.",
    ]


def _caveats(sweep: SweepData) -> list[str]:
    """Why the error rates of the rules may not hold, in sentences."""
    caveats = []
    if sweep.later_choices:
        caveats.append(
            f"Chosen for this report, not before the runs: {' and '.join(sweep.later_choices)}. If the results were "
            "already known, the error rates of the rules do not hold."
        )
    if began := _describe_begin(sweep):
        caveats.append(
            f"This sweep has grown: it began with {began}. If results were known before it grew, the error rates of "
            "the rules do not hold."
        )
    return caveats


def _describe_begin(sweep: SweepData) -> str:
    """Describes the first version of a sweep that has grown; empty otherwise."""
    earlier = as_objects(sweep.manifest.get("earlier"))
    if not earlier:
        return ""
    names = ("seed", "baseline", "variant")
    return ", ".join(count_noun(len(as_list(earlier[0].get(f"{name}s"))), name) for name in names)


def _policy_diffs(sweep: SweepData) -> list[JsonObject]:
    """Unified diffs from the policy of the sweep to each of its edits."""
    edited = sweep.manifest.get("policy")  # a baseline, if the policy is one too
    originals = [v for v in sweep.variants if v.policy_text and (v.name == edited or v.role == "policy")]
    original = originals[0] if originals else None
    diffs = []
    for variant in sweep.variants:
        if original is None or variant.role != "edit" or variant.policy_text is None:
            continue
        before, after = (text.splitlines() for text in (original.policy_text or "", variant.policy_text))
        lines = difflib.unified_diff(before, after, original.name, variant.name, n=2, lineterm="")
        diffs.append({"variant": variant.name, "against": original.name, "lines": list(lines)})
    return diffs


_ENVIRONMENT = ("program", "config", "device", "devices", "host", "data")


def _environment(sweep: SweepData) -> list[JsonObject]:
    """The distinct environments and settings of the runs, each with the runs that used it."""
    environments: dict[str, JsonObject] = {}
    for run in sweep.runs:
        values: dict[str, Any] = {name: as_text(run.about.get(name)) for name in _ENVIRONMENT}
        values["host"] = values["host"] or as_text(run.status.get("host"))
        values |= {f"{k} version": as_text(v) for k, v in as_object(run.about.get("versions")).items()}
        if isinstance(run.plan, dict):
            values["machine of the plan"] = as_text(run.plan.get("machine"))
        values = {name: value for name, value in values.items() if value}
        settings = {k: as_text(v) for k, v in as_object(run.about.get("settings")).items()}
        if values or settings:
            shared = [(name, text) for name, text in settings.items() if name not in FREE_SETTINGS]
            key = repr(sorted(values.items())) + repr(sorted(shared))
            entry = environments.setdefault(
                key,
                {
                    "values": values,
                    "settings": settings if len(sweep.runs) == 1 else dict(shared),
                    "runs": [],
                },
            )
            entry["runs"].append(run.name)
    return list(environments.values())


def _commands(sweep: SweepData, runs: Sequence[JsonObject]) -> list[JsonObject]:
    """The exact commands of the sweep and of each run."""
    words = [as_text(word) for word in as_list(sweep.manifest.get("command"))]
    commands = [("sweep", words), *((run["name"], run["command"]) for run in runs)]
    return [{"of": name, "words": words} for name, words in commands if words]
