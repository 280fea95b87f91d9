"""The numbers of runs, variants and comparisons, as data."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence

from policyc.experiments.report.runs import RunData
from policyc.experiments.report.sweeps import (
    SweepData,
    VariantData,
    final_validation_loss,
    seed_losses,
)
from policyc.experiments.report.values import JsonObject, as_list, as_number, as_object, as_objects, as_text
from policyc.experiments.verdicts import Comparison, compare_variants

FREE_SETTINGS = frozenset(
    {"seed", "seeds", "folder", "out", "coordinator", "process_id", "accept_changes", "wandb"}
)
"""Settings that may differ between the runs of a sweep."""


def summarize_run(run: RunData) -> JsonObject:
    """The figures of a run; None for what it did not measure."""
    tokens = run.tokens_at(run.steps.step)
    # Without a sweep, take the command that the program recorded.
    command = as_list(run.status.get("command")) or as_list(run.about.get("command"))

    return {
        "name": run.name,
        "seed": run.seed,
        "folder": str(run.folder),
        "state": run.end.state,
        "reason": run.end.reason,
        "last_step": run.last_step,
        "planned_steps": run.planned_steps,
        "tokens": float(tokens[-1]) if tokens is not None and len(tokens) else None,
        **{
            name: value
            for name, value in run.figures.items()
            if name not in ("divergence", "lost_lines", "rows")
        },
        "validation_loss": final_validation_loss(run),
        "validation_loss_evaluated_in_bf16": final_validation_loss(run, "validation_loss_evaluated_in_bf16"),
        **_account(run),
        "command": [as_text(word) for word in command],
        "log_tail": list(run.log_tail),
    }


def _account(run: RunData) -> JsonObject:
    """How a run spent its time, restarts included. None for what it did not report."""
    seconds = {name: as_number(value) for name, value in as_object(run.account.get("seconds")).items()}
    known = {name: value for name, value in seconds.items() if value is not None}
    return {
        "goodput": as_number(run.account.get("goodput")),
        "seconds": known or None,
        "restarts": as_number(run.account.get("restarts")),
        "lost_steps": as_number(run.account.get("lost_steps")),
    }


_LOSSES = ("trailing_loss", "validation_loss", "validation_loss_evaluated_in_bf16")
_MEANS = ("step_seconds", "tokens_per_second", "mfu", "stall_fraction", "goodput")
_MAXIMA = ("memory_bytes",)
_SUMS = ("loss_spikes", "gradient_spikes", "skipped_steps")


def summarize_variant(variant: VariantData, runs: Sequence[JsonObject]) -> JsonObject:
    """The figures of a variant: means over its runs, but the maximum of memory, and sums of spikes and skipped steps.

    Losses are means over the finished runs only: the loss of a run that stopped early is not comparable.
    """
    finished = [run for run in runs if run["state"] == "finished"]
    figures: JsonObject = {}
    for names, reduce in (
        (_LOSSES, statistics.fmean),
        (_MEANS, statistics.fmean),
        (_MAXIMA, max),
        (_SUMS, sum),
    ):
        for name in names:
            values = [run[name] for run in (finished if names is _LOSSES else runs) if run[name] is not None]
            figures[name] = reduce(values) if values else None
    plans = [run.plan for run in variant.runs if run.plan is not None]
    policies = {as_text(as_object(plan.get("policy")).get("sha256")) for plan in plans}
    policies |= {
        as_text(run.about["policy_sha256"]) for run in variant.runs if run.about.get("policy_sha256")
    }
    return {
        "name": variant.name,
        "role": variant.role,
        "edit": variant.edit,
        "figures": figures,
        "states": {s: sum(r["state"] == s for r in runs) for s in ("finished", "unfinished", "failed")},
        "policy_names": sorted({as_text(run.about.get("policy_name")) for run in variant.runs} - {""}),
        "policy_sha256": sorted(policies - {""}),
        "plan_sha256": sorted({hash_plan(plan) for plan in plans}),
        "backends": sorted({as_text(plan.get("backend")) for plan in plans} - {""}),
        "policy_text": variant.policy_text,
        "runs": list(runs),
    }


def hash_plan(plan: JsonObject) -> str:
    """A hash of the rules and of the decisions for each site. It is the same on every machine."""
    sites = [{k: v for k, v in site.items() if k != "place"} for site in as_objects(plan.get("sites"))]
    text = json.dumps([plan.get("rules"), plan.get("phases"), sites], sort_keys=True)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


# ---- comparisons


def compare_all(sweep: SweepData) -> list[Comparison]:
    """Compares every variant with every baseline. A baseline is compared only with the baselines before it."""
    losses = {variant.name: seed_losses(sweep, variant) for variant in sweep.variants}
    comparisons: list[Comparison] = []
    for number, baseline in enumerate(sweep.baselines):
        earlier = sweep.baselines[: number + 1]
        variants = [losses[variant.name] for variant in sweep.variants if variant.name not in earlier]
        comparisons += compare_variants(losses[baseline], variants, sweep.margin)
    return comparisons


# ---- are the runs comparable?


def find_inequalities(sweep: SweepData) -> list[str]:
    """Sentences about differences between the runs of a sweep that make them incomparable."""
    compared = sweep.runs if sweep.baselines else ()
    abouts = [run.about for run in compared if run.about]
    settings = [as_object(about.get("settings")) for about in abouts]
    values = {
        f"setting {name}": {json.dumps(each.get(name), sort_keys=True) for each in settings}
        for name in sorted({name for each in settings for name in each} - FREE_SETTINGS)
    }
    values |= {name: {as_text(about.get(name)) for about in abouts} - {""} for name in ("device", "data")}
    sentences = [
        f"the {name} is not the same in all runs: {', '.join(sorted(texts))[:200]}"
        for name, texts in values.items()
        if len(texts) > 1
    ]
    if compared:
        sentences += _find_lengths(sweep)
    for variant in sweep.variants:
        plans = [run.plan for run in variant.runs if run.plan is not None]
        if len({as_text(plan.get("schema")) for plan in plans}) > 1:
            sentences.append(f"the plans of {variant.name} were written by different versions of policyc")
        elif len({hash_plan(plan) for plan in plans}) > 1:
            sentences.append(f"the runs of {variant.name} have different plans")
    return sentences


def _find_lengths(sweep: SweepData) -> list[str]:
    """Sentences about finished runs that differ in their number of steps or of tokens."""
    finished = [run for run in sweep.runs if run.end.state == "finished"]
    steps = {run.last_step for run in finished}
    columns = [run.tokens_at(run.steps.step) for run in finished]
    tokens = {int(column[-1]) for column in columns if column is not None}
    return [
        f"the runs that finished have different numbers of {name}: {', '.join(f'{n:,}' for n in sorted(numbers))}"
        for name, numbers in (("steps", steps), ("tokens", tokens))
        if len(numbers) > 1
    ]
