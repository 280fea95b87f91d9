"""Finds the runs in folders, and groups them into variants and seeds.

A folder is a sweep (`sweep.json`), a run (`metrics.jsonl`), or holds runs as `VARIANT/seedN/metrics.jsonl`.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from policyc.experiments.report.figures import read_figures
from policyc.experiments.report.runs import RunData, judge_run
from policyc.experiments.report.values import (
    JsonObject,
    as_list,
    as_objects,
    as_text,
    is_count,
    read_object,
    read_text,
)
from policyc.experiments.statistics import DEFAULT_MARGIN, Margin, parse_margin
from policyc.experiments.sweep.run import MANIFEST_FILE, METRICS_FILE
from policyc.experiments.verdicts import SeedLosses

USUAL_BASELINES = ("bf16", "fp8")

_SEED_FOLDER = re.compile(r"seed(\d{1,9})")


class ReportError(ValueError):
    """There is no run to report on, or the report cannot be written. The message says why."""

    exit_code = 2
    """The exit code of a command that ends with this error: wrong usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantData:
    """The runs of one policy. `role` and `edit` come from `sweep.json`, `policy_text` from `policy.policy`."""

    name: str
    runs: tuple[RunData, ...]
    role: str = ""
    edit: str = ""
    policy_text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepData:
    """All runs of a report, and how they are judged.

    Attributes:
      baselines: the variants that others are compared with, the most important first.
      manifest: the content of `sweep.json`; empty if there is none.
      later_choices: descriptions of what was chosen for this report, and not when the sweep began.
    """

    title: str
    variants: tuple[VariantData, ...]
    baselines: tuple[str, ...]
    margin: Margin
    manifest: JsonObject
    problems: tuple[str, ...] = ()
    later_choices: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[RunData, ...]:
        return tuple(run for variant in self.variants for run in variant.runs)

    def variant(self, name: str) -> VariantData:
        return next(variant for variant in self.variants if variant.name == name)


def read_sweep(
    folders: Sequence[Path], baselines: Sequence[str] = (), margin: str | None = None
) -> SweepData:
    """Reads all runs in some folders. Raises ReportError.

    Args:
      folders: sweeps, or runs.
      baselines: the names of the baselines; by default those of the sweep.
      margin: the margin; by default that of the sweep.
    """
    parts = [_read_folder(folder) for folder in folders]
    sweep = parts[0] if len(parts) == 1 else _merge(parts, folders)
    counts = Counter(run.folder.resolve() for run in sweep.runs)
    if twice := [folder for folder, count in counts.items() if count > 1]:
        raise ReportError(f"'{twice[0]}' is named twice: a run cannot be compared with itself")
    if not any(len(run.steps) or run.status for run in sweep.runs):
        raise ReportError(f"'{folders[0]}' has no run yet: no metrics.jsonl has a step in it")
    names = [variant.name for variant in sweep.variants]
    if unknown := [name for name in baselines if name not in names]:
        raise ReportError(f"no variant is named '{unknown[0]}'; variants: {', '.join(names)}")
    used = sweep.margin if margin is None else parse_margin(margin)
    compared = tuple(dict.fromkeys(baselines)) or sweep.baselines
    longest = max(run.last_step for run in sweep.runs)
    judged = [
        replace(v, runs=tuple(replace(r, end=judge_run(r, longest)) for r in v.runs)) for v in sweep.variants
    ]
    # The sort is stable: the other variants keep their order.
    ordered = sorted(judged, key=lambda variant: variant.name not in compared)
    changes = []
    if sweep.manifest and used != sweep.margin:
        changes.append(f"the margin (it was {sweep.margin})")
    if sweep.manifest and compared != sweep.baselines:
        changes.append(f"the baselines (they were {', '.join(sweep.baselines) or 'none'})")
    return replace(
        sweep, variants=tuple(ordered), baselines=compared, margin=used, later_choices=tuple(changes)
    )


def _read_folder(folder: Path) -> SweepData:
    if not os.path.isdir(folder):
        raise ReportError(f"'{folder}' is not a folder")
    if (folder / MANIFEST_FILE).exists():
        return _read_manifest(folder)
    if (folder / METRICS_FILE).exists():
        return _read_single_run(folder)
    return _find_runs(folder)


def _find_runs(folder: Path) -> SweepData:
    """The runs of a sweep that has no `sweep.json`."""
    variants = _find_variants(folder)
    others = [str(path.parent) for path in sorted(folder.glob(f"*/{METRICS_FILE}"))]
    if not variants:
        help = (
            f"name the runs in it: {' '.join(others)}"
            if others
            else "is it the folder of a run or of a sweep?"
        )
        raise ReportError(
            f"'{folder}' has no {METRICS_FILE}, no {MANIFEST_FILE} and no VARIANT/seedN/{METRICS_FILE}: {help}"
        )
    names = [variant.name for variant in variants]
    baselines = tuple(name for name in USUAL_BASELINES if name in names) or tuple(names[:1])
    return SweepData(
        title=folder.resolve().name,
        variants=variants,
        baselines=baselines if len(variants) > 1 else (),
        margin=DEFAULT_MARGIN,
        manifest={},
        problems=(f"runs that are not VARIANT/seedN: {', '.join(others)}",) if others else (),
    )


def _read_single_run(folder: Path) -> SweepData:
    path = folder.resolve()
    match = _SEED_FOLDER.fullmatch(path.name)
    name, seed = (path.parent.name, int(match[1])) if match else (path.name, None)
    run = read_figures(folder, variant=name, seed=seed)
    policy = read_text(folder / "policy.policy", []) or read_text(folder.parent / "policy.policy", [])
    variant = VariantData(name=name, runs=(run,), policy_text=policy if match else None)
    return SweepData(title=run.name, variants=(variant,), baselines=(), margin=DEFAULT_MARGIN, manifest={})


def _read_manifest(folder: Path) -> SweepData:
    problems: list[str] = []
    manifest = read_object(folder / MANIFEST_FILE, problems) or {}
    steps = manifest.get("steps")
    planned = steps if is_count(steps) else None
    seeds = [seed for seed in as_list(manifest.get("seeds")) if is_count(seed)]
    variants = []
    for entry in as_objects(manifest.get("variants")):
        name = as_text(entry.get("name"))
        if Path(name).name != name or name in ("", ".."):  # a folder of the sweep, not a path out of it
            problems.append(f"{MANIFEST_FILE} names a variant '{name}', which is not a folder")
            continue
        variants.append(
            VariantData(
                name=name,
                runs=tuple(
                    read_figures(
                        folder / name / f"seed{seed}", variant=name, seed=seed, planned_steps=planned
                    )
                    for seed in seeds
                ),
                role=as_text(entry.get("role")),
                edit=as_text(entry.get("edit")),
                policy_text=read_text(folder / name / "policy.policy", problems),
            )
        )
    if not variants:
        problems.append(f"{MANIFEST_FILE} names no variant, so runs are found by their folders")
        runs = _find_runs(folder)
        return replace(runs, problems=(*problems, *runs.problems))
    names = [variant.name for variant in variants]
    baselines = tuple(name for name in as_list(manifest.get("baselines")) if name in names)
    return SweepData(
        title=folder.resolve().name,
        variants=tuple(variants),
        baselines=baselines,
        margin=_read_margin(manifest, problems),
        manifest=manifest,
        problems=tuple(problems),
    )


def _read_margin(manifest: JsonObject, problems: list[str]) -> Margin:
    """The margin that was fixed when the sweep began."""
    try:
        return parse_margin(as_text(manifest["margin"])) if "margin" in manifest else DEFAULT_MARGIN
    except ValueError as error:
        problems.append(f"{MANIFEST_FILE}: {error}; the margin is {DEFAULT_MARGIN}")
        return DEFAULT_MARGIN


def _find_variants(folder: Path) -> tuple[VariantData, ...]:
    """The variants in a folder. A seed without metrics is a run that has not begun."""
    variants = []
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        matches = (_SEED_FOLDER.fullmatch(seed.name) for seed in path.iterdir() if seed.is_dir())
        seeds = sorted(int(match[1]) for match in matches if match)
        if any((path / f"seed{seed}" / METRICS_FILE).exists() for seed in seeds):
            runs = tuple(read_figures(path / f"seed{seed}", variant=path.name, seed=seed) for seed in seeds)
            text = read_text(path / "policy.policy", [])
            variants.append(VariantData(name=path.name, runs=runs, policy_text=text))
    return tuple(variants)


def _merge(parts: Sequence[SweepData], folders: Sequence[Path]) -> SweepData:
    """Merges several folders into one sweep.

    The margin and the baselines are those of the first folder with a `sweep.json`. Variants that are named like
    `USUAL_BASELINES` become baselines too.
    """
    counts = Counter(variant.name for part in parts for variant in part.variants)
    repeated = {name for name, count in counts.items() if count > 1}
    parts = [_rename_variants(part, folder, repeated) for part, folder in zip(parts, folders, strict=True)]
    variants = tuple(variant for part in parts for variant in part.variants)
    first = next((part for part in parts if part.manifest), parts[0])
    known = [variant.name for variant in variants]
    baselines = [*first.baselines, *(name for name in USUAL_BASELINES if name in known)] or known[:1]
    return SweepData(
        title=" · ".join(part.title for part in parts),
        variants=variants,
        baselines=tuple(dict.fromkeys(baselines)),
        margin=first.margin,
        manifest=first.manifest,
        problems=tuple(problem for part in parts for problem in part.problems) + _find_margins(parts, first),
    )


def _rename_variants(part: SweepData, folder: Path, repeated: Set[str]) -> SweepData:
    """Renames the variants of a sweep after their folder if their names occur in other sweeps too."""
    path = folder.as_posix()
    names = {
        v.name: v.name if v.name not in repeated else path if len(part.variants) == 1 else f"{path}/{v.name}"
        for v in part.variants
    }
    variants = tuple(
        replace(v, name=names[v.name], runs=tuple(replace(run, variant=names[v.name]) for run in v.runs))
        for v in part.variants
    )
    return replace(part, variants=variants, baselines=tuple(names[name] for name in part.baselines))


def _find_margins(parts: Sequence[SweepData], first: SweepData) -> tuple[str, ...]:
    """Notes about sweeps whose margin differs from the one that is used for all."""
    return tuple(
        f"the margin of {part.title}, {part.margin}: this report uses that of {first.title}, {first.margin}"
        for part in parts
        if part.manifest and part.margin != first.margin
    )


# ---- losses


def final_validation_loss(run: RunData, metric: str = "validation_loss") -> float | None:
    """The validation loss after the last step; None if that step was not validated, or its loss is not finite."""
    column = run.evaluations.column(metric)
    if column is None or not _is_validated(run):
        return None
    return float(column[-1]) if math.isfinite(column[-1]) else None


def _is_validated(run: RunData) -> bool:
    """Whether the model was validated after the last step."""
    return len(run.evaluations) > 0 and bool(run.evaluations.step[-1] >= run.last_step)


def uses_validation(sweep: SweepData) -> bool:
    """Whether variants are compared by validation loss: only if every finished run has one, finite or not."""
    finished = [run for run in sweep.runs if run.end.state == "finished"]
    return bool(finished) and all(_is_validated(run) for run in finished)


def seed_losses(sweep: SweepData, variant: VariantData) -> SeedLosses:
    """The final losses of a variant, and the runs that have none."""
    is_validation = uses_validation(sweep)
    kind = "validation" if is_validation else "trailing"
    losses, failed, unfinished = {}, {}, {}
    for number, run in enumerate(variant.runs):
        seed = number if run.seed is None else run.seed
        end = run.end
        loss = final_validation_loss(run) if is_validation else run.figures["trailing_loss"]
        if end.state == "unfinished":
            unfinished[seed] = end.reason
        elif end.state == "failed" or loss is None:
            failed[seed] = end.reason or f"its {kind} loss is not finite"
        else:
            losses[seed] = loss
    return SeedLosses(name=variant.name, losses=losses, failed=failed, unfinished=unfinished)
