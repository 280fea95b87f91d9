"""The self-test finds planted faults, accepts what is right, and `auto` and `estimate` read its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.hardware import gemm_cost
from policyc.hardware.selftest import checks, report
from policyc.hardware.selftest.checks import CHECKS, Check, Result, collect_failures, run_checks
from policyc.hardware.selftest.products import check_groups
from policyc.hardware.selftest.subject import Finding, Subject
from policyc.language.recipes import Gemm, make_recipe
from policyc.numerics import backends
from policyc.numerics.backends import GemmQuery, Obstacle, cudnn, te, te_calls
from policyc.numerics.backends.choice import Machine, choose, machine_here
from policyc.numerics.backends.cudnn import CudnnGroups
from policyc.numerics.backends.emulate import BACKEND as EMULATION
from policyc.numerics.backends.emulate import Emulation
from policyc.numerics.backends.selftest_record import ONE_PASS, read_failures, record_path, write_record
from policyc.numerics.quantize import make_key
from policyc.numerics.targets import get_target
from tests.support import te_kernels
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

# ---- planted faults


def wrong_scale(*args: Any) -> Any:
    (q,) = EMULATION.quantize(*args)
    assert q.scales is not None
    return [replace(q, scales=q.scales.at[3, 5].add(1))]


def lost_nan(x: jax.Array, *rest: Any) -> Any:
    return EMULATION.quantize(jnp.nan_to_num(x, posinf=1.0, neginf=-1.0), *rest)


def biased_rounding(x: jax.Array, requests: Any, context: Any) -> Any:
    """Draws twice and takes the smaller magnitude: halfway between two codes, three of four are rounded down."""
    keys = [requests[0].rounding_key.fold(i) for i in (1, 2)]
    draws = [EMULATION.quantize(x, [replace(requests[0], key=k)], context) for k in keys]
    (one,), (other,) = draws
    pairs = [(q.codes & 7, (q.codes >> 4) & 7) for q in (one, other)]
    low, high = (jnp.minimum(a, b) for a, b in zip(*pairs, strict=True))
    return [replace(one, codes=(one.codes & 0x88) | low | (high << 4))]


def stale_rounding(x: jax.Array, requests: Any, context: Any) -> Any:
    return EMULATION.quantize(x, [replace(requests[0], key=make_key(0))], context)


def wrong_product(*args: Any) -> Any:
    return EMULATION.gemm(*args) * jnp.bfloat16(1.0078125)


def lost_nan_of_product(*args: Any) -> Any:
    return jnp.nan_to_num(EMULATION.gemm(*args))


FAULTS = {
    "wrong_scale": ("random", "mxfp8", {"quantize": wrong_scale}, "1 scales differ"),
    "lost_nan": ("nan", "fp8", {"quantize": lost_nan}, "values lost their NaN"),
    "biased": ("rounding", "mxfp4", {"quantize": biased_rounding}, "biased by -0."),
    "stale": (
        "rounding",
        "mxfp4",
        {"quantize": stale_rounding},
        "the random numbers of two keys are correlated",
    ),
    "wrong_product": ("gemm", "fp8", {"gemm": wrong_product}, "differs from the emulation"),
    "lost_nan_of_product": ("gemm", "fp8", {"gemm": lost_nan_of_product}, "results lost it"),
}


def plant(
    monkeypatch: pytest.MonkeyPatch, name: str, format: str, parts: Mapping[str, Callable[..., Any]]
) -> None:
    """A backend that is the emulation of one format, but for some parts."""

    def refuse(query: GemmQuery) -> Obstacle | None:
        return None if query.format == format else Obstacle("another format", "")

    planted, load = Emulation(), backends.load
    for part, replacement in ({"obstacle": refuse} | dict(parts)).items():
        setattr(planted, part, replacement)
    monkeypatch.setattr(backends, "load", lambda other: planted if other == name else load(other))


def run_one(check: str, backend: str) -> Result:
    (result,) = run_checks((backend,), quick=True, only=(check,))
    return result


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("wrong_scale", "wrong_product")))
        for name in FAULTS
    ],
)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, format, parts, fault = FAULTS[name]
    plant(monkeypatch, name, format, parts)
    result = run_one(check, name)
    assert result.status == "failed"
    assert any(fault in detail for detail in result.details), result.details
    assert collect_failures([result]) == {f"{name} {format}": f"{check}: {result.reason}"}


@pytest.mark.parametrize(
    ("check", "format"),
    [
        pytest.param(check, format, marks=[pytest.mark.slow] * (check in ("nan", "rounding")))
        for check, format in sorted({(check, format) for check, format, *_ in FAULTS.values()})
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(
    check: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "sound", format, {})
    result = run_one(check, "sound")
    assert (result.status, result.reason) == ("passed", "")
    assert result.details


def test_an_exception_is_a_failure_and_other_checks_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    plant(monkeypatch, "broken", "fp8", {"quantize": fail})
    results = list(run_checks(("broken",), quick=True, only=("random", "llama")))
    assert [r.status for r in results] == ["failed", "not run"]
    assert "no kernel image is available" in results[0].reason


@pytest.mark.slow
def test_transformer_engines_layouts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With substitutes for its kernels: the checks read what the te backend writes, whatever its random stream.

    Its products are compared with the emulation in test_te.py.
    """
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    monkeypatch.setattr(te_calls, "load", te_kernels.Engine)
    names = ("pairs", "rounding")
    results = list(run_checks(("te_here",), quick=True, only=names))
    assert [(r.check, r.status, r.reason) for r in results] == [(name, "passed", "") for name in names]


def wrong_rows(engine: Any, *args: Any) -> Any:
    """What is quantized in one pass has the scales of its rows in another order."""
    orders = te_kernels.Engine.quantize(engine, *args)
    if orders.rows is None or args[3] is None:
        return orders
    return orders._replace(rows=orders.rows._replace(scales=jnp.roll(orders.rows.scales, 1, axis=1)))


@pytest.mark.slow
def test_a_fault_of_the_kernel_that_quantizes_in_one_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backend te then does without the kernel."""
    monkeypatch.setitem(backends.MODULES, "te_broken", "tests.support.te_here")
    engine = type("Broken", (te_kernels.Engine,), {"quantize": wrong_rows})
    monkeypatch.setattr(te_calls, "load", engine)
    pairs = run_one("pairs", "te_broken")
    assert pairs.status == "failed"
    assert "scales differ" in pairs.reason
    assert collect_failures([replace(pairs, backend="te")]) == {ONE_PASS: f"pairs: {pairs.reason}"}


@pytest.mark.slow
def test_a_wrong_scale_of_a_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(backend="cudnn", format="nvfp4", native=False, quick=True)
    assert [f.fault for f in check_groups(subject)] == [""] * 3
    wrong, right = CudnnGroups(), cudnn.BACKEND
    monkeypatch.setattr(wrong, "ragged_gemm", lambda *args: right.ragged_gemm(*args) * 1.01)
    load = backends.load
    monkeypatch.setattr(backends, "load", lambda name: wrong if name == "wrong" else load(name))
    faults = [f.fault for f in check_groups(replace(subject, backend="wrong"))]
    assert faults == ["differs from the emulation"] * 3


@pytest.mark.slow
def test_the_whole_test_passes_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot run here says what it needs. The page and the file have every result.

    The checks that no test above runs have one format here. The others only say that they ran, and so does every check
    of the emulation, which would be compared with itself.
    """
    formats = {"golden": "nvfp4", "extremes": "nvfp4", "block": "fp8", "devices": "fp8"}

    def run(check: Check, subject: Subject) -> Iterator[Finding]:
        is_run = check.name in formats and subject.backend != "emulate"
        return check.run(subject) if is_run else iter([Finding("it ran")])

    one_format = tuple(
        replace(check, formats=(formats.get(check.name, "nvfp4"),), run=partial(run, check))
        for check in CHECKS
    )
    monkeypatch.setattr(checks, "CHECKS", one_format)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = policyc("selftest", "--quick", "--folder", str(tmp_path / "out"))
    assert result.code == 0, result.out
    data = json.loads((tmp_path / "out" / "selftest.json").read_text())
    states = {(r["check"], r["backend"]): r["status"] for r in data["results"]}
    assert {check for check, _ in states} == {check.name for check in CHECKS}
    not_run = {key for key, state in states.items() if state == "not run"}
    assert not_run == {key for key in states if key[0] == "llama" or key[1] in ("te", "cudnn")}
    assert set(states.values()) == {"passed", "not run"}
    assert {backend for _, backend in states} == {"cudnn", "emulate", "te", "xla"}
    assert "needs a GPU" in result.out
    assert result.out.startswith(
        f"{len(states)} checks, of which {len(states) - len(not_run)} can run here. Native: "
    )
    assert f"{len(states)}/{len(states)} " in result.out
    assert "pip install" not in result.out  # for each check; the page has it once
    page = (tmp_path / "out" / "selftest.html").read_text()
    assert "Nothing failed" in page
    assert all(check.title.replace("'", "&#39;") in page for check in CHECKS)
    assert not (tmp_path / "cache").joinpath("policyc", "selftest").exists()


# ---- what reads the result


def nvfp4_query() -> GemmQuery:
    left, right = make_recipe("nvfp4").gemm_treatments(Gemm.FPROP)
    return GemmQuery(gemm=Gemm.FPROP, left=left, right=right, m=512, n=512, k=512)


def test_auto_avoids_what_failed_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.BACKEND, "find_missing_library", lambda: "")
    query, formats = nvfp4_query(), frozenset({"nvfp4"})
    assert choose("auto", query, Machine("b200", formats)).backend == "te"
    failed = Machine("b200", formats, failures={"te nvfp4": "random: 3 codes differ"})
    lowering = choose("auto", query, failed)
    assert (lowering.backend, lowering.native) == ("xla", True)
    assert lowering.obstacle is not None
    assert (
        "Transformer Engine failed the self-test on this machine (random: 3 codes differ)"
        in lowering.obstacle.reason
    )
    assert "--backend te" in lowering.obstacle.remedy
    both = replace(failed, failures={"te nvfp4": "a", "xla nvfp4": "b"})
    assert choose("auto", query, both).backend == "emulate"
    assert choose("te", query, both).backend == "te"
    assert choose("auto", query, replace(failed, failures={"te fp8": "a"})).backend == "te"


def test_the_record_is_that_of_this_gpu_and_these_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_failures("NVIDIA B200") == {}
    write_record("NVIDIA B200", {"failures": {"te nvfp4": "nan"}})
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA B200", compute_capability="10.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert machine_here().failures == {"te nvfp4": "nan"}
    assert read_failures("NVIDIA B300") == {}
    record_path("NVIDIA B200").write_text("{")
    assert machine_here().failures == {}


def test_estimate_takes_the_constants_of_the_machine(tmp_path: Path) -> None:
    """Twice the fraction of the peak in bf16, and nothing else: the time of bf16 GEMMs halves."""
    fraction = gemm_cost.peak_fraction(get_target("b200"), "bf16")
    file = tmp_path / "selftest.json"
    file.write_text(json.dumps({"target": "b200", "constants": {"gemm bf16": 2 * fraction}}))
    words = ("estimate", "bf16", "--config", "llama3_8b", "--target", "b200", "--format", "json")
    before, after = (
        json.loads(policyc(*words, *more).out)["estimates"][0] for more in ((), ("--measured", str(file)))
    )
    assert after["gemms"]["bf16"] == pytest.approx(before["gemms"]["bf16"] / 2, rel=0.01)
    assert after["parts"]["optimizer"] == before["parts"]["optimizer"]
    other = policyc(*words[:-4], "--target", "gb200", "--measured", str(file))
    assert other.code == 1
    assert "was measured on b200: use --target b200" in other.err


def test_measured_constants_replace_those_of_the_model() -> None:
    target = get_target("b200")
    treatment = make_recipe("nvfp4").treatments[0]
    for name, seconds in {
        "copy": lambda t: gemm_cost.copy_seconds(t, 1e9),
        "quantizer te": lambda t: gemm_cost.quantize_seconds(t, [treatment], 1e11, "te"),
        "gemm nvfp4": lambda t: gemm_cost.gemm_seconds(t, "nvfp4", 16384, 16384, 16384),
    }.items():
        half, whole = (seconds(replace(target, measured={name: value})) for value in (0.25, 0.5))
        assert max(half, whole) / min(half, whole) == pytest.approx(2, rel=0.01), name
    assert np.isclose(gemm_cost.copy_seconds(target, 8e12), 1 / gemm_cost.COPY_BANDWIDTH_FRACTION)


def test_a_file_without_timings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "selftest.json"
    file.write_text(json.dumps({"target": None, "constants": {}, "no_speed": "needs a GPU"}))
    with pytest.raises(ValueError, match="has no timings: needs a GPU"):
        report.read_constants(file, "b200")
