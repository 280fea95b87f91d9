"""The last self-test of this machine: which backends failed it, by GPU and by versions of the software they run on.

`policyc selftest` writes the record into the user's cache folder. `choice` reads it when it chooses a backend.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from policyc.base.files import atomic_write, cache_folder, read_json

_PACKAGES = (
    r"(policyc|jax|jaxlib|jax-cuda\d+-(plugin|pjrt)|transformer-engine.*|"
    r"nvidia-(cublas|cudnn|cutlass-dsl)(-cu\d+|-frontend)?)"
)
ONE_PASS = "te one_pass"
"""The key for a failure of Transformer Engine's one-pass quantizer, which the backend can do without."""

_DRIVER = Path("/proc/driver/nvidia/version")


@cache
def find_versions() -> Mapping[str, str]:
    """Versions of the installed packages that backends run on, and of the driver if there is one."""
    versions: dict[str, str] = {}
    for package in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.name or "").lower()
        if re.fullmatch(_PACKAGES, name):
            versions.setdefault(name, package.version)  # the first one in the path is imported
    driver = re.search(r"  (\d[\d.]+)  ", _DRIVER.read_text()) if _DRIVER.exists() else None
    return dict(sorted(versions.items())) | ({"driver": driver[1]} if driver else {})


def record_path(gpu: str) -> Path:
    """The record file for a GPU and the versions that are installed here. May raise OSError."""
    versions = hashlib.sha256(json.dumps(find_versions()).encode()).hexdigest()[:16]
    return cache_folder() / "selftest" / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{versions}.json"


def read_failures(gpu: str) -> dict[str, str]:
    """Why backends failed the last self-test on this GPU, by "backend format". Empty if it was not run."""
    try:
        if not (cache_folder() / "selftest").is_dir():  # the usual case; finding all versions takes 0.1 s
            return {}
        failures = read_json(record_path(gpu))["failures"]
        return {str(name): str(reason) for name, reason in failures.items()}
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return {}


def write_record(gpu: str, data: Mapping[str, Any]) -> None:
    """Stores the data of a self-test for `read_failures`. May raise OSError."""
    cache_folder("selftest")
    with atomic_write(record_path(gpu)) as stream:
        stream.write(json.dumps(data).encode())
