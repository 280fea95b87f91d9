"""XLA's descriptions of GPUs: one `GpuTargetConfigProto` in text form for each target.

The files come from XLA, under the Apache License 2.0. If a file lacked fields that the others have, they were added;
the head of the file lists them.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Literal

from policyc.numerics.targets import Target


def has_description(target: Target) -> bool:
    """Whether there is a description of a target, so that programs can be compiled for it without the GPU."""
    return resources.files(__name__).joinpath(f"{target.name}.txtpb").is_file()


def read_description(target: Target) -> str:
    """Returns the description of a target, as XLA's deviceless compiler expects it."""
    return resources.files(__name__).joinpath(f"{target.name}.txtpb").read_text(encoding="utf-8")


def read_number(target: Target, field: Literal["device_memory_size", "core_count"]) -> int:
    """The bytes of memory that the driver reports, or the number of multiprocessors.

    `Target.memory_bytes` is the vendor's rounded figure.
    """
    match = re.search(rf"\b{field}: (\d+)", read_description(target))
    assert match is not None, f"the description of {target.name} has no {field}"
    return int(match[1])
