"""Runs the whole self-test, and writes its result as data and as a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import policyc
from policyc.base.files import explain_unreadable, read_json
from policyc.base.web_page import read_assets, render_template
from policyc.hardware.selftest import speed
from policyc.hardware.selftest.checks import Result, collect_failures, list_checks, run_check
from policyc.jaxcore.versions import find_cuda_versions
from policyc.numerics import backends
from policyc.numerics.backends import emulate
from policyc.numerics.backends.choice import machine_here
from policyc.numerics.backends.selftest_record import find_versions, read_failures, write_record
from policyc.numerics.targets import Target, find_by_device_kind

_PACKAGE = "policyc.hardware.selftest"

Data = dict[str, Any]

_NATIVE = "Native: the hardware multiplies the format. Not native: it is decoded first, which tests bits, not speed."


def run_selftest(names: Sequence[str], *, quick: bool, say: Callable[[str], None]) -> Data:
    """Runs the checks, then the timings, and returns everything as data. `say` gets a line about each of them.

    On a GPU, the failures are recorded for `auto`, with earlier ones of backends that were not tested this time.
    """
    machine = describe_machine()
    results: list[Result] = []
    jobs = list_checks(("emulate", *names), quick=quick)
    runnable, done, begin = sum(not missing for _, _, missing in jobs), 0, time.monotonic()
    say(f"{len(jobs)} checks, of which {runnable} can run here. {_NATIVE}")
    for number, job in enumerate(jobs, 1):
        result = run_check(*job)
        done += not job[2]
        minutes = (time.monotonic() - begin) / max(done, 1) * (runnable - done) / 60
        rest = f"; about {minutes:.0f} min left" if not job[2] and minutes >= 1 else ""
        say(f"{number:>3}/{len(jobs)} {describe_result(result)}{rest}")
        results.append(result)
    failures = collect_failures(results)
    target = find_by_device_kind(machine["device"])
    is_gpu = machine["platform"] == "gpu"
    times: list[speed.Timing] = []
    if target is not None and is_gpu and not quick:
        able = [name for name in names if not backends.load(name).find_missing_library()]
        for timing in speed.time_all(target, able):
            say(describe_timing(timing))
            times.append(timing)
    data = {
        "policyc": policyc.__version__,
        "machine": machine,
        "target": target.name if target else None,
        "quick": quick,
        "results": [result.as_data() for result in results],
        "failures": failures,
        "speed": [
            {"what": t.what, "measured_seconds": t.measured, "predicted_seconds": t.predicted} for t in times
        ],
        "constants": {t.constant: t.value for t in times if t.constant},
        "no_speed": "" if times else _why_no_speed(target, is_gpu=is_gpu),
    }
    if is_gpu:
        tested = {"emulate", *names}
        kept = {k: v for k, v in read_failures(machine["device"]).items() if k.split()[0] not in tested}
        write_record(machine["device"], data | {"failures": kept | failures})
    return data


def _why_no_speed(target: Target | None, *, is_gpu: bool) -> str:
    would = "would time a copy, the GEMM and the quantizers of each native format, and a block of Llama 3 8B"
    if not is_gpu:
        return f"{would}: needs a GPU"
    return f"{would}: left out by --quick" if target else f"{would}: this GPU is not in the table of targets"


def describe_machine() -> Data:
    """The devices, the versions of everything that a backend runs on, and what can be used here."""
    devices, machine = jax.devices(), machine_here()
    missing = {name: backends.load(name).find_missing_library() for name in backends.MODULES}
    return {
        "device": str(devices[0].device_kind),
        "platform": str(devices[0].platform),
        "devices": len(devices),
        "compute_capability": str(getattr(devices[0], "compute_capability", "")),
        "versions": dict(find_versions()) | find_cuda_versions(),
        "native_formats": sorted(machine.formats - {"keep"}),
        "kernels": [
            f for f in ("nvfp4", "fp8") if devices[0].platform == "gpu" and emulate.can_build_kernels(f)
        ],
        "backends": {name: reason or "can be used" for name, reason in missing.items()},
    }


def describe_result(result: Result) -> str:
    """Formats a result as one line."""
    kind = "native" if result.native else "not native"
    name = f"{result.status:8}{result.check:10}{backends.title(result.backend):19}{result.format:7}{kind:11}"
    if result.status == "failed":
        return f"{name}{result.reason}; to avoid it: {result.remedy or 'no way is known'}"
    if result.status == "not run":
        return f"{name}{result.reason.partition('. ')[0]}"  # how to install a library is on the page, once
    return f"{name}{len(result.details)} comparisons, {result.seconds:.1f} s"


def describe_timing(timing: speed.Timing) -> str:
    """Formats a timing as one line."""
    ratio = timing.measured / timing.predicted
    return (
        f"timed   {timing.what:36}{timing.measured * 1e3:9.3f} ms, predicted {timing.predicted * 1e3:9.3f} ms "
        f"({ratio:.2f}x)"
    )


def render_page(data: Mapping[str, Any]) -> str:
    """Renders the HTML page of a self-test."""
    return render_template(_PACKAGE, "selftest.html", **data, style=read_assets(_PACKAGE, "page.css"))


def read_constants(path: Path, target: str) -> dict[str, float]:
    """Reads the cost model's constants from a self-test's JSON file. Raises ValueError if it has none for `target`."""
    with explain_unreadable(path, "policyc selftest"):
        data = read_json(path)
        measured_on, constants = data["target"], data["constants"]
    if not constants:
        raise ValueError(f"'{path}' has no timings: {data.get('no_speed', 'run it without --quick')}")
    if measured_on != target:
        raise ValueError(f"'{path}' was measured on {measured_on}: use --target {measured_on}")
    return {str(name): float(value) for name, value in constants.items()}
