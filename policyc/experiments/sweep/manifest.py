"""`sweep.json`: the design of a sweep. A folder holds one sweep, which may grow, but not change."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from policyc import __version__
from policyc.base.files import read_json, read_text
from policyc.experiments.sweep.commands import SweepProgram
from policyc.experiments.sweep.run import LOCK_FILE, MANIFEST_FILE, POLICY_FILE, write_json
from policyc.experiments.sweep.variants import VariantList, without_title

_FORMAT = 2
_KEYS = (
    "command",
    "cwd",
    "program",
    "program_sha256",
    "seeds",
    "margin",
    "baselines",
    "policy",
    "variants",
    "not_run",
)
"""What a sweep that is continued is compared with."""


class ChangedSweep(Exception):
    """The folder holds another sweep. The message says what differs and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepDesign:
    """Everything that decides which runs a sweep has and how they are judged."""

    program: SweepProgram
    policies: VariantList
    seeds: tuple[int, ...]
    margin: str

    def as_json(self) -> dict[str, Any]:
        values = {
            "format": _FORMAT,
            "version": __version__,
            "command": ["policyc", *sys.argv[1:]],
            "cwd": None if self.program.config else os.getcwd(),
            "program": asdict(self.program),
            "program_sha256": self.program.source_hash(),
            "seeds": list(self.seeds),
            "steps": self.program.total_steps,
            "margin": self.margin,
            "baselines": list(self.policies.baselines),
            "policy": self.policies.policy,
            "variants": [
                {"name": v.name, "role": v.role, "policy_file": f"{v.name}/{POLICY_FILE}", "edit": v.edit,
                 "sha256": v.sha256}
                for v in self.policies.variants
            ],
            "not_run": [
                {"name": v.name, "edit": v.edit, "reason": v.reason, "sha256": v.sha256} for v in self.policies.omitted
            ],
        }  # fmt: skip
        return cast(dict[str, Any], json.loads(json.dumps(values)))  # tuples become lists, as in the file


def reuse_plans(out: Path, program: SweepProgram, policies: VariantList) -> VariantList | None:
    """Selects the policies to run as the sweep in this folder did; None if its program or policies were different.

    So a sweep that is continued need not trace its program again, while its runs may use the devices. Also None without
    a sweep. Raises ChangedSweep if `sweep.json` is damaged.
    """
    path = out / MANIFEST_FILE
    if not path.exists():
        return None
    earlier = _read_manifest(path)
    hashes = {variant["name"]: variant["sha256"] for variant in earlier["variants"]}
    dropped = {row["name"]: row for row in earlier["not_run"]}
    known = {**{name: row["sha256"] for name, row in dropped.items()}, **hashes}
    unchanged = earlier["program_sha256"] == program.source_hash() and all(
        known.get(variant.name) == variant.sha256 for variant in policies.variants
    )
    if not unchanged:
        return None
    kept = tuple(v for v in policies.variants if v.name in hashes)
    omitted = tuple(
        replace(v, reason=dropped[v.name]["reason"]) for v in policies.variants if v.name not in hashes
    )
    return replace(policies, variants=kept, omitted=(*policies.omitted, *omitted), policy=earlier["policy"])


def open_sweep(out: Path, design: SweepDesign) -> list[str]:
    """Writes the files of a sweep into its folder, or continues the sweep that is there.

    Returns the notes of `check_sweep`. Raises ChangedSweep, and OSError.
    """
    values, notes = check_sweep(out, design)
    for variant in design.policies.variants:
        (out / variant.name).mkdir(parents=True, exist_ok=True)
        (out / variant.name / POLICY_FILE).write_text(variant.text, encoding="utf-8")
    write_json(out / MANIFEST_FILE, values)
    return notes


def check_sweep(out: Path, design: SweepDesign) -> tuple[dict[str, Any], list[str]]:
    """Returns the content of `sweep.json`, and notes about differences from the sweep that this folder may have.

    Raises ChangedSweep if the runs of the folder are not those of this sweep.
    """
    path, values = out / MANIFEST_FILE, design.as_json()
    notes: list[str] = []
    if path.exists():
        earlier = _read_manifest(path)
        differences = [*_find_changes(earlier, values), *_find_changed_policies(out, design)]
        if differences:
            command = shlex.join(earlier["command"])
            raise ChangedSweep(
                f"{out} holds another sweep: {'; '.join(differences)}. Choose another --folder, or give the command "
                f"that made it: {command}"
            )
        values["earlier"] = _list_earlier(earlier, values)
        if earlier["cwd"] != values["cwd"]:
            notes.append(
                f"this sweep began in {earlier['cwd']}: relative paths in its program's arguments now start here"
            )
        if earlier["program_sha256"] != values["program_sha256"]:
            name = design.program.words[0]
            notes.append(f"{name} has changed since this sweep began: its finished runs used the earlier one")
    elif out.exists() and any(entry.name != LOCK_FILE for entry in out.iterdir()):
        raise ChangedSweep(f"{out} is not empty, and holds no sweep: choose another --folder")
    return values, notes


def _list_earlier(earlier: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier versions of a sweep that grew, oldest first. Reports mention them: results may have been known."""
    sizes = [
        {
            "seeds": manifest["seeds"],
            "baselines": manifest["baselines"],
            "variants": [variant["name"] for variant in manifest["variants"]],
        }
        for manifest in (earlier, now)
    ]
    before: list[dict[str, Any]] = earlier.get("earlier", [])
    return before if sizes[0] == sizes[1] else [*before, sizes[0]]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Reads `sweep.json`. Raises ChangedSweep if it is damaged, or from another version."""
    try:
        values = read_json(path)
    except ValueError as error:
        raise ChangedSweep(f"{path} is damaged: {error}. Restore it, or choose another --folder") from None
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ChangedSweep(f"{path} is not a file of this version of policyc: choose another --folder")
    if missing := [name for name in _KEYS if name not in values]:
        raise ChangedSweep(
            f"{path} is damaged: it has no '{missing[0]}'. Restore it, or choose another --folder"
        )
    return values


def _find_changes(earlier: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describes what differs between two sweeps. Additional seeds, baselines and variants do not count."""
    before, after = (_list_settings(manifest) for manifest in (earlier, now))
    if now["program_sha256"] is not None and earlier["program_sha256"] == now["program_sha256"]:
        before["cwd"] = after["cwd"]  # the same script in another folder, as after the sweep was copied
    changes = [
        f"{name} is {before.get(name) or 'not set'} there, and {after.get(name) or 'not set'} here"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    if missing := [seed for seed in earlier["seeds"] if seed not in now["seeds"]]:
        changes.append(f"it also has the seeds {', '.join(map(str, missing))}")
    if missing := [name for name in earlier["baselines"] if name not in now["baselines"]]:
        changes.append(f"it also has the baselines {', '.join(missing)}")
    names = {variant["name"] for variant in now["variants"]}
    if missing := [v["name"] for v in earlier["variants"] if v["name"] not in names]:
        changes.append(f"it also has the variants {', '.join(missing)}")
    return changes


def _list_settings(manifest: dict[str, Any]) -> dict[str, str]:
    """The settings that may not change, as text."""
    program = {**manifest["program"]}
    settings = {
        "program": shlex.join(program.pop("words")),
        **program,
        "margin": manifest["margin"],
        "cwd": manifest["cwd"],
    }
    return {name.replace("_", " "): "" if value is None else str(value) for name, value in settings.items()}


def _find_changed_policies(out: Path, design: SweepDesign) -> list[str]:
    changed = []
    for variant in design.policies.variants:
        path = out / variant.name / POLICY_FILE
        if path.exists() and without_title(read_text(path)) != without_title(variant.text):
            changed.append(f"the policy '{variant.name}' was different: {path}")
    return changed
