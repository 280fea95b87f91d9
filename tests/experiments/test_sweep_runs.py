"""Runs of a sweep: their files, how their end is judged, their commands, and what a folder refuses."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from policyc.experiments.sweep.commands import SweepProgram, make_runs
from policyc.experiments.sweep.judge import judge_end
from policyc.experiments.sweep.manifest import ChangedSweep, SweepDesign, open_sweep, reuse_plans
from policyc.experiments.sweep.planning import PlannedPolicy
from policyc.experiments.sweep.run import RunStatus, tail_lines
from policyc.experiments.sweep.run_job import read_grace
from policyc.experiments.sweep.variants import SweepVariant, VariantList, collect_variants, drop_equal_plans
from policyc.language.loader import parse
from tests.support.sweep_runs import make_run, write_metrics

pytestmark = pytest.mark.any_jax

# ---- the end of a run


@pytest.mark.parametrize(
    ("code", "losses", "log", "stop", "state", "reason"),
    [
        (0, [3.0, 2.0, 1.0], "", None, "finished", ""),
        (0, [3.0, 2.0], "", None, "failed", "the program ended at step 2 of 3"),
        (0, [], "", None, "failed", "the program wrote no line with 'step' and 'loss'"),
        (0, [3.0, float("nan")], "", None, "failed", "diverged: the loss is not finite from step 2 on"),
        (1, [3.0, float("inf")], "", None, "failed", "diverged: the loss is not finite from step 2 on"),
        (1, [3.0], "Traceback\nKeyError: 'x'\n\n", None, "failed", "exit code 1: KeyError: 'x'"),
        (
            1,
            [3.0],
            "a:1:1: error[x]: no site\n1 | a\n  | ^ help\n",
            None,
            "failed",
            "exit code 1: a:1:1: error[x]: no site",
        ),
        (1, [3.0], "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out\nbye\n", None, "failed", "out of memory"),
        (-9, [3.0], "", None, "failed", "killed by SIGKILL (by the system if memory ran out)"),
        (-11, [], "", None, "failed", "killed by SIGSEGV"),
        (130, [3.0], "", signal.SIGTERM, "preempted", "stopped by SIGTERM at step 1"),
        (0, [3.0, 2.0, 1.0], "", signal.SIGTERM, "finished", ""),  # it was done already
    ],
)
def test_how_a_run_ended(
    tmp_path: Path, code: int, losses: list[float], log: str, stop: int | None, state: str, reason: str
) -> None:
    run = make_run(tmp_path)
    write_metrics(run.folder, losses)
    (run.folder / "log.txt").write_text(log)
    end = judge_end(run, code, stop)
    assert end.state == state
    assert end.reason.startswith(reason)
    assert end.reason == reason or reason.startswith("the program wrote")
    assert end.diverged == reason.startswith("diverged")


def test_the_reason_of_a_failure_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_metrics(run.folder, [3.0])
    earlier = "RESOURCE_EXHAUSTED: Out of memory\n--- attempt 2\n"
    log = run.folder / "log.txt"
    log.write_text(earlier + "KeyError: 'x'\n")
    assert judge_end(run, 1, None, len(earlier)).reason == "exit code 1: KeyError: 'x'"
    log.write_text(earlier)
    assert judge_end(run, 1, None, len(earlier)).reason == "exit code 1"


def test_a_damaged_status_is_that_of_a_run_to_be_run_again(tmp_path: Path) -> None:
    status = RunStatus(state="finished", command=())
    status.write(tmp_path)
    assert RunStatus.read(tmp_path) == status
    unknown = (tmp_path / "status.json").read_text().replace("finished", "done")
    for text in ("", "{", "[]", "{}", '{"state": "finished"}', unknown, "[" * 100_000):
        (tmp_path / "status.json").write_text(text)
        assert RunStatus.read(tmp_path) is None


@pytest.mark.parametrize("text", ["soon", "nan", "inf", "-1"])
def test_a_grace_period_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(ValueError, match=f"POLICYC_STOP_GRACE is '{text}'"):
        read_grace({"POLICYC_STOP_GRACE": text})


def test_the_last_lines_of_a_log_are_those_that_a_terminal_would_show(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert tail_lines(log, 3) == []
    log.write_bytes(b"a\n" * 9000 + b"1 %\r50 %\r100 %\n\n \nlast \xff\n")
    assert tail_lines(log, 3) == ["a", "100 %", "last \ufffd"]


# ---- programs and commands


def test_a_run_of_the_bundled_trainer(tmp_path: Path) -> None:
    program = SweepProgram(words=("--batch", "2"), config="tiny", steps=7, stats_every=5)
    program.check()
    run = program.make_run("fp8", 3, tmp_path)
    assert run.folder == tmp_path / "fp8" / "seed3"
    words = run.command
    assert words[:8] == (sys.executable, "-P", "-m", "policyc", "apply", str(tmp_path / "fp8" / "policy.policy"),
                         "--stats-every", "5")  # fmt: skip
    assert words[9:] == ("--config", "tiny", "--steps", "7", "--seed", "3", "--folder", str(run.folder), "--keep", "1",
                         "--batch", "2")  # fmt: skip
    assert replace(program, steps=None).total_steps == 200  # that of the configuration


def test_another_folder_of_compiled_programs_makes_no_other_sweep(tmp_path: Path) -> None:
    program = SweepProgram(words=("train.py",))
    (default,) = make_runs(program, ["bf16"], [0], tmp_path)
    (named,) = make_runs(program, ["bf16"], [0], tmp_path, "/cache")
    assert named.environment == {**default.environment, "POLICYC_COMPILE_CACHE": "/cache"}
    assert named == replace(default, environment=named.environment)


def test_a_program_gets_its_seed_steps_and_folder(tmp_path: Path) -> None:
    words = ("train.py", "--seed={seed}", "--out", "{out}/x", "{variant}", "{steps}", "{other}")
    program = SweepProgram(words=words, steps=9, metrics_source="maxtext={out}/m.txt")
    run = program.make_run("no_rht", 4, tmp_path)
    folder = str(tmp_path / "no_rht" / "seed4")
    assert run.command[6:8] == ("--plan-out", f"{folder}/plan.json")  # for the report
    assert run.command[8:] == ("train.py", "--seed=4", "--out", f"{folder}/x", "no_rht", "9", "{other}")
    assert run.environment == {
        "POLICYC_SEED": "4", "POLICYC_STEPS": "9", "POLICYC_RUN_DIR": folder, "POLICYC_VARIANT": "no_rht",
    }  # fmt: skip
    assert run.metrics_source == f"maxtext={folder}/m.txt"


# ---- the folder of a sweep


def design(
    text: str = "mlp.* -> fp8", seeds: tuple[int, ...] = (0, 1), margin: str = "0.5%", **program: object
) -> SweepDesign:
    base = SweepVariant(name="mine", policy=parse(text), edit="the policy mine")
    listed: VariantList = collect_variants([], [base], [])
    values = {"words": ("--batch", "2"), "config": "tiny", "steps": 5} | program
    return SweepDesign(program=SweepProgram(**values), policies=listed, seeds=seeds, margin=margin)  # type: ignore[arg-type]  # the values are those of the fields


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (design(steps=6), "another sweep: steps is 5 there, and 6 here[.] Choose"),
        (design(words=()), "program is --batch 2 there, and not set here"),
        (design(seeds=(0,)), "it also has the seeds 1"),
        (design(margin="1%"), "margin is 0.5% there, and 1% here"),
        (design("mlp.* -> mxfp8"), "the policy 'mine' was different"),
    ],
)
def test_a_changed_sweep_in_the_same_folder_is_refused(
    tmp_path: Path, changed: SweepDesign, message: str
) -> None:
    open_sweep(tmp_path, design())
    with pytest.raises(ChangedSweep, match=message) as refusal:
        open_sweep(tmp_path, changed)
    assert "Choose another --folder" in str(refusal.value)
    assert open_sweep(tmp_path, design()) == []  # the first one continues


def test_a_sweep_may_grow(tmp_path: Path) -> None:
    open_sweep(tmp_path, design())
    assert open_sweep(tmp_path, design(seeds=(0, 1, 2))) == []
    assert open_sweep(tmp_path, design(seeds=(0, 1, 2))) == []  # continued, and not larger
    manifest = json.loads((tmp_path / "sweep.json").read_text())
    assert manifest["seeds"] == [0, 1, 2]
    assert manifest["earlier"] == [{"seeds": [0, 1], "baselines": [], "variants": ["mine"]}]
    assert manifest["variants"][0]["policy_file"] == "mine/policy.policy"
    assert (tmp_path / "mine" / "policy.policy").read_text() == "# the policy mine\n\nmlp.* -> fp8\n"


def test_a_sweep_that_is_continued_keeps_its_plans(tmp_path: Path) -> None:
    base = SweepVariant(name="mine", policy=parse("mlp.* -> fp8"), edit="the policy mine")
    edit = SweepVariant(name="same", policy=parse("mlp.* -> fp8\nmlp.* -> fp8"), edit="an edit")
    listed = collect_variants([], [base], [edit])
    program = SweepProgram(words=(), config="tiny")
    assert reuse_plans(tmp_path, program, listed) is None
    plans = {"mine": PlannedPolicy(digest="a"), "same": PlannedPolicy(digest="a")}
    planned = drop_equal_plans(listed, plans)
    open_sweep(tmp_path, SweepDesign(program=program, policies=planned, seeds=(0,), margin="0.5%"))
    assert reuse_plans(tmp_path, program, listed) == planned
    other = SweepVariant(name="same", policy=parse("mlp.* -> mxfp8"), edit="an edit")
    assert reuse_plans(tmp_path, program, collect_variants([], [base], [other, edit])) is None
    # An edit that was left out, and now is another one, must be planned.
    assert reuse_plans(tmp_path, program, collect_variants([], [base], [other])) is None


def test_a_script_that_changed_is_noted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("1")
    sweep = design(words=(str(script),), config=None)
    out = tmp_path / "out"
    out.mkdir()
    open_sweep(out, sweep)
    assert open_sweep(out, sweep) == []
    script.write_text("2")
    (note,) = open_sweep(out, sweep)
    assert "has changed since this sweep began" in note


def test_a_sweep_is_continued_in_another_folder_if_its_script_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, text in zip(folders, "112", strict=True):
        folder.mkdir()
        (folder / "train.py").write_text(text)
    out = tmp_path / "out"
    out.mkdir()
    for folder, notes in zip(folders[:2], (0, 1), strict=True):
        monkeypatch.chdir(folder)
        assert len(open_sweep(out, design(words=("train.py",), config=None))) == notes
    monkeypatch.chdir(folders[2])
    with pytest.raises(ChangedSweep, match=r"cwd is .*/b there, and .*/c here"):
        open_sweep(out, design(words=("train.py",), config=None))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 1, "seeds": [0]}', '{"format": 2}', "[" * 100_000]
)
def test_a_damaged_sweep_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ChangedSweep, match=r"sweep[.]json is"):
        open_sweep(tmp_path, design())
    with pytest.raises(ChangedSweep, match=r"sweep[.]json is"):
        reuse_plans(tmp_path, design().program, design().policies)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ChangedSweep, match="is not empty"):
        open_sweep(tmp_path, design())
