"""A whole run of the Llama, which several modules compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.llama_runs import RUN, train_here


@pytest.fixture(scope="session")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed. Only for tests that compile quickly."""
    folder = tmp_path_factory.mktemp("completed") / "run"
    assert train_here(folder=folder, **RUN) == 0
    return folder
