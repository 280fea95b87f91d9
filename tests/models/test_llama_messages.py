"""What a run of the Llama says about wrong options, faulty data, missing packages and a full disk."""

from __future__ import annotations

import ast
import errno
import os
import re
import resource
import runpy
import shlex
import subprocess
import sys
from typing import Any

import jax
import pytest

import policyc
from policyc.models.llama import artifacts, command_line, configs, train
from tests.support import llama_runs
from tests.support.llama_runs import RUN, flags, train_here

pytestmark = pytest.mark.any_jax


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "resumes from the last checkpoint"),
        (errno.EROFS, "another folder with --folder"),
        (errno.EISDIR, "another folder with --folder"),
    ],
)
def test_an_error_of_writing_is_explained(monkeypatch, capsys, code, remedy):
    def write(*_: Any) -> None:
        raise OSError(code, os.strerror(code), "runs/a/metrics.jsonl")

    monkeypatch.setattr(train, "train", write)
    assert train.main(flags()) == 1
    message = capsys.readouterr().err
    assert f"{os.strerror(code)}: 'runs/a/metrics.jsonl'" in message
    assert remedy in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-command"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exited with 3"),
        (
            [sys.executable, "-c", "import time; time.sleep(60)"],
            r"took longer than 0\.2 s \(--export-timeout\)",
        ),
        (["'"], "cannot be started: No closing quotation"),
    ],
)
def test_a_faulty_export_command_is_explained(words, message, tmp_path):
    command = shlex.join(words) if len(words) > 1 else words[0]
    assert re.match(message, artifacts.run_command(command, tmp_path, 0.2 if "sleep" in command else 60))
    assert artifacts.run_command("test -d {path}", tmp_path, 60) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 1e-3", "there is no option '--lr': did you mean --learning-rate?"),
        ("--learning_rate=1", "there is no option '--learning_rate=1': did you mean --learning-rate?"),
        ("--layer 3", "there is no option '--layer': did you mean --layers?"),
        ("--resume", "the same command resumes a run by itself"),
        ("--config llama3_7b", "did you mean 'llama3_8b'? choose from"),
        ("--config llama3_300b", "did you mean 'llama3_405b'? choose from"),
        ("--config tinny", "there is no configuration 'tinny': did you mean 'tiny'? choose from"),
        ("--warmup 100", "--warmup 100 is a fraction of the steps: did you mean --warmup-steps 100?"),
        ("--warmup-steps 300", "the warm-up, plus --decay for wsd, is longer than the run"),
        ("--schedule wsd --warmup 0.9", "is longer than the run"),
        ("--heads 3", "--heads 3: it must be a multiple of --kv-heads 2"),
        ("tiny", "'tiny' does not belong to any option"),
        ("--steps 0", "--steps 0: it must be at least 1"),
        ("--learning-rate nan", "--learning-rate nan: it must be at least 0"),
        ("--learning-rate inf", "--learning-rate inf: it must be less than inf"),
        ("--beta2 1", "--beta2 1.0: it must be less than 1"),
        ("--seed 4294967296", "--seed 4294967296: it must be less than 4294967296"),
        ("--processes 2 --process-id 0", "without --distributed, this process would train alone"),
        ("--profile-steps 3", "such as 10:13"),
        ("--profile xplane --steps 12", "there are only 12 steps"),
        ("--no-\x1b[31msuch", r"'--no-\x1b[31msuch' has control characters"),
        ("--config \x1b]0;title\x07", "has control characters"),
        ("--folder \x9b31mred", "has control characters"),
        ("--schedule cosin", "invalid choice: 'cosin'"),
        ("--experts 4 --experts-per-token 1", "the loss would not teach the router which one to choose"),
        ("--experts 2 --experts-per-token 3", "--experts-per-token 3: there are only 2 experts"),
    ],
)
def test_a_wrong_option_is_explained(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.parse_args(words.split())
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert error.isprintable()
    assert "does not belong to any option" not in error or words == "tiny"


def test_data_that_does_not_fit_leaves_no_folder(capsys, tmp_path):
    assert train.main(flags(folder=tmp_path / "run", data="stdlib", vocab=256)) == 1
    assert "vocabulary of 256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("x" * 300, None, "File name too long"),
        ("run", "tensorboard", "File exists: '{out}/tensorboard'"),
        (os.fsdecode(b"\xff"), None, "is not UTF-8"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_message(capsys, tmp_path, name, file, message):
    out = tmp_path / name
    if file:
        out.mkdir()
        (out / file).touch()
    assert train_here(folder=out, **RUN) == 1
    assert message.format(out=out) in (error := capsys.readouterr().err)
    assert "choose another folder" in error


def test_too_few_open_files_are_one_message_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    assert train.main(flags(folder=tmp_path / "run")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: a run needs 256 open files, but this process may open only 20: ")
    assert "ulimit -n 1024" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((20, 4096), [(1024, 4096)]),
        ((256, 512), [(512, 512)]),
        ((20, resource.RLIM_INFINITY), [(1024, resource.RLIM_INFINITY)]),
        ((2048, 4096), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(limits, expected, monkeypatch):
    chosen = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: chosen.append(limits))
    configs.allow_open_files(1024)
    assert chosen == expected


def test_a_missing_package_of_metrics_leaves_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(flags(folder=tmp_path / "run", wandb="project")) == 1
    assert "pip install 'policyc[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_processes_that_are_not_found_are_explained(capsys, monkeypatch):
    """JAX says this outside of a cluster, in a process that has not used it yet. It is told what ends the others."""
    told = []

    def initialize(*_: Any, **options: Any) -> None:
        told.append(options)
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    assert train.main(flags(distributed=True, heartbeat=5)) == 1
    message = capsys.readouterr().err
    assert "--distributed: coordinator_address should be defined" in message
    assert "add --coordinator HOST:PORT" in message
    assert told == [{"heartbeat_timeout_seconds": 5}]


def test_weights_that_do_not_fit_leave_no_folder(capsys, tmp_path):
    assert train_here(folder=tmp_path / "run", **RUN, init_from=tmp_path / "none") == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_program_uses_only_the_documented_hooks_of_policyc():
    """It knows nothing else of policyc: it imports the package's root and its own modules."""
    imported, used = set(), set()
    for path in llama_runs.TRAIN.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "policyc" else set()
    ours = {name for name in imported if name.split(".")[0] == "policyc"}
    assert {name for name in ours if not name.startswith("policyc.models.llama")} == {"policyc"}
    assert used == {
        "__version__",
        "current_backends",
        "current_policy",
        "rounding_step",
        "set_step",
        "set_output_dir",
        "should_observe",
        "observe",
        "use_compile_cache",
    }


@pytest.mark.parametrize("package", ["optax", "orbax"])
def test_a_missing_package_is_named(package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("policyc.models")]:
        monkeypatch.delitem(sys.modules, name)  # imported again, and restored after the test
    monkeypatch.delattr(policyc, "models")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(llama_runs.TRAIN))
    assert f"needs the package '{package}': pip install 'policyc[train]'" in end.value.code


@pytest.mark.parametrize("program", [[str(llama_runs.TRAIN)], ["-m", "policyc.models.llama.train"]], ids=str)
def test_the_program_starts_as_a_script_and_as_a_module(program, tmp_path):
    """From another folder. It ends at its first import, so that the test is fast; slow tests let it train."""
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('none', name='jax')")
    paths = os.pathsep.join([str(tmp_path), str(llama_runs.ROOT)])
    ran = subprocess.run(
        [sys.executable, *program, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: training needs the package 'jax': pip install 'policyc[train]'\n",
    )
