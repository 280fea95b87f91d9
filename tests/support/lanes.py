"""The lanes of tests that need what `make setup` does not install, and of slow ones. A plugin of pytest."""

from __future__ import annotations

import re
from collections.abc import Generator

import pytest

LANES = ("trainers", "servers", "peers", "cuda", "browser", "te", "slurm")
ON_REQUEST = ("slow", *LANES)
NAMED = set[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out the tests on request that `-m` does not name."""
    named = config.option.markexpr
    NAMED.update(re.findall(r"\w+", named))
    left_out = [f"not {marker}" for marker in ON_REQUEST if marker not in NAMED]
    config.option.markexpr = " and ".join([f"({named})"] * bool(named) + left_out)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of a lane that `-m` names fails instead of being skipped: its subject is missing, and nothing ran."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        for lane in NAMED.intersection(LANES, (marker.name for marker in item.iter_markers())):
            report.outcome, report.longrepr = "failed", f"-m {lane}: {report.longrepr[-1]}"
    return report
