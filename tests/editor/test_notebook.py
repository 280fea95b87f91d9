"""The notebook of the documentation runs, and shows what it has stored. `UPDATE_SNAPSHOTS=1` stores it again."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

from policyc.editor.magic import register  # noqa: E402
from policyc.language.policy import Policy  # noqa: E402
from tests.support.command import ROOT  # noqa: E402
from tests.support.quick_options import quick_environment  # noqa: E402

NOTEBOOK = ROOT / "docs" / "howto" / "notebook.ipynb"


def shown(notebook: Any) -> list[list[str]]:
    """What each cell of code shows: HTML if there is any, else text. Without what depends on the machine."""
    cells = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        outputs = []
        for output in cell.outputs:
            data = output.get("data", {"text/plain": output.get("text", "")})
            text = data.get("text/html", data["text/plain"])
            outputs.append(re.sub(r"/[^\s<>'\"()]*/", "", re.sub(r"0x[0-9a-f]+", "", text)))
        cells.append(outputs)
    return cells


def run(notebook: Any) -> None:
    env = {**os.environ, **quick_environment(), "PYTHONPATH": str(ROOT), "IPYTHONDIR": os.devnull}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    client.execute(env=env, cwd=str(ROOT))


@pytest.mark.slow  # it starts a kernel, which loads JAX and compiles
@pytest.mark.skipif(not NOTEBOOK.exists(), reason="an installed package has no docs")
def test_the_notebook_of_the_documentation_runs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = shown(notebook)
    run(notebook)
    for cell in notebook.cells:
        cell.metadata.clear()
    if os.environ.get("UPDATE_SNAPSHOTS"):
        nbformat.write(notebook, NOTEBOOK)
    else:
        assert shown(notebook) == stored
    tables = [
        output for outputs in shown(notebook) for output in outputs if "<table>" in output or "<svg" in output
    ]
    assert len(tables) >= 5  # findings, sites, plan, diff and run


class Shell:
    """The part of an IPython shell that the magic uses."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"mine": "an earlier policy"}
        self.magics: dict[str, Any] = {}

    def register_magic_function(self, function: Any, magic_kind: str, magic_name: str) -> None:
        assert magic_kind == "cell"
        self.magics[magic_name] = function


def test_a_cell_is_linted_and_named() -> None:
    shell = Shell()
    register(shell)
    findings = shell.magics["policy"]("mine", "* -> nvfp4")
    assert [d.code for d in findings] == ["everything-in-4-bits"]
    assert isinstance(shell.user_ns["mine"], Policy)
    assert "everything-in-4-bits" in findings._repr_html_()
    assert repr(findings) == "<Findings: 1 warning>"


def test_a_policy_with_errors_is_not_assigned() -> None:
    shell = Shell()
    register(shell)
    (finding,) = shell.magics["policy"]("mine", "* -> nvfp5")
    assert finding.code == "unknown-format"
    assert "mine" not in shell.user_ns
    with pytest.raises(ValueError, match="needs the name of a variable"):
        shell.magics["policy"]("", "* -> bf16")
