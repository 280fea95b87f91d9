"""Reads the measurements of a run.

They are assigned to the linears and layers of a diff. Those that match no linear are counted, not silently
dropped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from policyc.base.files import explain_unreadable, read_json_lines
from policyc.changes.model import DiffData

_INDEX = re.compile(r"\[\d+\]")


def read_stats(folder: Path, diff: DiffData) -> dict[str, Any]:
    """Reads the SQNR of operands and cosines of gradients at the last measured step of a run. Raises ValueError."""
    path = folder / "stats.jsonl"
    with explain_unreadable(path, "policyc apply --stats-every"):
        rows = [row for row in read_json_lines(path) if "step" in row]
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


def _linear_names(diff: DiffData) -> dict[str, int]:
    """The numbers of the linears by their paths without indices. Paths that several linears share are left out."""
    numbers: dict[str, list[int]] = {}
    for number, linear in enumerate(diff.linears):
        numbers.setdefault(_INDEX.sub("", linear.full_name), []).append(number)
    return {name: members[0] for name, members in numbers.items() if len(members) == 1}
