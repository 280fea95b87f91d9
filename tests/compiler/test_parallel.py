"""Programs on several devices, and in several processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parallel_programs import PROGRAMS

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).parents[2]
POLICY = "* -> mxfp4(sr=grad) expect 7\nlayers[-1:].up -> fp8 expect 1\nhead -> keep\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_on_eight_devices(program):
    program()


def test_two_processes_do_what_one_does(tmp_path):
    (tmp_path / "p.policy").write_text(POLICY)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def start(processes: int, number: int) -> subprocess.Popen[str]:
        words = ["apply", "p.policy", "--plan-out", f"{processes}-{number}.json"]
        words += [
            str(ROOT / "tests" / "support" / "distributed_program.py"),
            str(processes),
            str(number),
            str(port),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "policyc.cli.main", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)

    running = [start(2, 0), start(2, 1), start(1, 0)]
    said = [process.communicate(timeout=300) for process in running]
    assert not any(process.returncode for process in running), [err[-2000:] for _, err in said]
    first, second, alone = ([line for line in out.splitlines() if line[0].isdigit()] for out, _ in said)
    assert len(alone) == 4
    assert first == second == alone
    plans = {(tmp_path / name).read_text() for name in ("2-0.json", "2-1.json", "1-0.json")}
    assert len(plans) == 1, "every process has the same plan"
    tables = ["policyc: rule" in err for _, err in said]
    assert tables == [True, False, True], "the first process alone prints the table"
