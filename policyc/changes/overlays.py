"""Reads files that `policyc` wrote: the measurements of a run, and the policy of a plan.

Measurements are assigned to the linears and layers of a diff. Those that match no linear are counted, not silently
dropped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from policyc.base.files import explain_unreadable, parse_json, read_json, read_text
from policyc.changes.model import DiffData
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import Policy

_INDEX = re.compile(r"\[\d+\]")


def read_stats(folder: Path, diff: DiffData) -> dict[str, Any]:
    """Reads the SQNR of operands and cosines of gradients at the last measured step of a run. Raises ValueError."""
    path = folder / "stats.jsonl"
    with explain_unreadable(path, "policyc apply --stats-every"):
        rows = [row for row in map(_parse, read_text(path).splitlines()) if "step" in row]
    if not rows:
        raise ValueError(f"'{path}' has no measurements: run the program with --stats-every")
    step = max(row["step"] for row in rows)
    names = _linear_names(diff)
    operands, cosines = [], []
    unknown = 0
    for row in (row for row in rows if row["step"] == step):
        number = names.get(str(row.get("site", row.get("parameter", ""))))
        if "loss" in row:
            continue
        if number is None:
            unknown += 1
        elif "operand" in row:
            keys = ("layer", "operand", "format", "sqnr_db", "flushed", "saturated", "amax")
            operands.append({"linear": number, **{key: row.get(key) for key in keys}})
        else:
            cosines.append({"linear": number, "layer": row.get("layer"), "cosine": row.get("cosine")})
    measured = {"operands": operands, "cosines": cosines, "unknown": unknown}
    return {"run": diff.short_path(str(folder)), "step": step, **measured}


def read_plan(path: Path) -> tuple[Policy, str]:
    """Reads the policy of a plan that `policyc apply --plan-out` wrote, and the hash of its loss. Raises ValueError."""
    with explain_unreadable(path, "policyc apply --plan-out of this version"):
        data = read_json(path)
        loaded = parse_with_diagnostics(data["policy"]["text"], shown=str(path))
        if loaded.diagnostics:
            raise ValueError("its policy has errors")
        return loaded.policy, data["jaxpr"]["sha256"]


def _linear_names(diff: DiffData) -> dict[str, int]:
    """The numbers of the linears by their paths without indices. Paths that several linears share are left out."""
    numbers: dict[str, list[int]] = {}
    for number, linear in enumerate(diff.linears):
        numbers.setdefault(_INDEX.sub("", linear.full_name), []).append(number)
    return {name: members[0] for name, members in numbers.items() if len(members) == 1}


def _parse(line: str) -> dict[str, Any]:
    """Parses a line of measurements. Empty if the line is damaged, like the last one of a run that was killed."""
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    return row if isinstance(row, dict) else {}
