"""The table of checks, and `run_checks`, which runs them for each format of each backend."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import jax

from policyc.hardware.selftest import products, quantizers
from policyc.hardware.selftest.subject import CheckFunction, Subject
from policyc.language.formats import FORMATS
from policyc.language.recipes import make_recipe
from policyc.numerics import backends
from policyc.numerics.backends import te_one_pass
from policyc.numerics.backends.choice import machine_here
from policyc.numerics.backends.selftest_record import ONE_PASS

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A row of the table.

    Attributes:
      title: what is compared with what.
      formats: the formats that it is for.
      remedy: how to avoid the fault, other than with another backend.
      needs: what it requires: nothing, several devices, or a test that is not quick (`time`).
      is_fatal: whether `auto` avoids a backend that fails it.
      is_ragged: whether it is for backends of ragged groups, or for all other backends.
    """

    name: str
    title: str
    run: CheckFunction
    formats: tuple[str, ...] = tuple(quantizers.RECIPES)
    remedy: str = ""
    needs: Literal["", "devices", "time"] = ""
    is_fatal: bool = True
    is_ragged: bool = False


CHECKS = (
    # This check is the first: if it fails, the checks after it run without the faulty kernel.
    Check(
        name="pairs",
        title="operands quantized for two GEMMs at once, bit for bit against the reference",
        run=quantizers.check_pairs,
        formats=("nvfp4",),
        remedy=f"{te_one_pass.VARIABLE}=0, for Transformer Engine",
    ),
    Check(
        name="golden",
        title="quantizers, bit for bit against NVIDIA's reference vectors",
        run=partial(quantizers.check_golden, is_extreme=False),
        formats=("nvfp4",),
    ),
    Check(
        name="extremes",
        title="quantizers at the ends of the fp32 range, bit for bit against NVIDIA's reference vectors",
        run=partial(quantizers.check_golden, is_extreme=True),
        formats=("nvfp4",),
        remedy="keep operands between 1e-30 and 1e30, for instance with a smaller loss scale",
        is_fatal=False,
    ),
    Check(
        name="random",
        title="quantizers on random data, bit for bit against the reference",
        run=quantizers.check_random,
    ),
    Check(name="nan", title="NaN and infinities stay visible", run=quantizers.check_nan),
    Check(
        name="rounding",
        title="stochastic rounding is unbiased and fresh",
        run=quantizers.check_rounding,
        formats=tuple(name for name in quantizers.RECIPES if "sr" in FORMATS[name].options),
        remedy="sr=none in the recipe",
    ),
    Check(
        name="gemm",
        title="GEMMs against the emulation, within the error of fp32 sums",
        run=products.check_gemm,
        remedy="XLA_FLAGS=--xla_gpu_autotune_level=0, if a kernel that XLA chose is at fault",
    ),
    Check(
        name="block",
        title="gradients of a small Llama against the emulation",
        run=products.check_block,
        formats=tuple(products.POLICIES),
    ),
    Check(
        name="llama",
        title="losses of 20 steps of a small Llama against the emulation",
        run=products.check_llama,
        formats=tuple(products.POLICIES),
        needs="time",
    ),
    Check(
        name="devices",
        title="GEMMs divided over several devices, within the error of sums in bfloat16",
        run=products.check_devices,
        formats=tuple(products.POLICIES),
        remedy="CUDA_VISIBLE_DEVICES=0 trains on one device",
        needs="devices",
    ),
    Check(
        name="groups",
        title="GEMMs over ragged groups against the emulation, within the error of fp32 sums",
        run=products.check_groups,
        formats=("nvfp4",),
        is_ragged=True,
    ),
)

_MISSING = {"devices": "needs two devices", "time": "left out by --quick"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a check for one format of a backend. `details` has a line for each comparison."""

    check: str
    title: str
    backend: str
    format: str
    native: bool
    status: Status
    reason: str = ""
    remedy: str = ""
    details: tuple[str, ...] = ()
    is_fatal: bool = True
    seconds: float = 0.0

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def find_subjects(names: Sequence[str], *, quick: bool) -> Iterator[tuple[Subject, str]]:
    """Yields every format of these backends, and why it cannot be tested here; empty if it can."""
    machine = machine_here()
    is_gpu = jax.default_backend() == "gpu"
    for name in names:
        backend = backends.load(name)
        missing = backend.find_missing_library()
        for format in quantizers.RECIPES:
            native = format in machine.formats and not backend.emulates
            subject = Subject(backend=name, format=format, native=native, quick=quick)
            if not subject.takes(make_recipe(format).treatments[0]):
                continue
            reason = missing
            if not backend.runs_anywhere and not missing and not (is_gpu and native):
                reason = f"needs a GPU that multiplies {format}, which {machine.name} does not"
            yield subject, reason


Job = tuple[Check, Subject, str]
"""A check of a format of a backend, and why it cannot run here; empty if it can."""


def list_checks(names: Sequence[str], *, quick: bool = False, only: Sequence[str] = ()) -> list[Job]:
    """All checks, or those in `only`, for these backends."""
    subjects = list(find_subjects(names, quick=quick))
    return [
        (check, subject, reason or _find_missing(check, quick=quick))
        for check in CHECKS
        for subject, reason in subjects
        if check.is_ragged == subject.implementation.only_ragged and subject.format in check.formats
        if not only or check.name in only
    ]


def run_checks(names: Sequence[str], *, quick: bool = False, only: Sequence[str] = ()) -> Iterator[Result]:
    """Runs all checks, or those in `only`, for these backends."""
    return itertools.starmap(run_check, list_checks(names, quick=quick, only=only))


def _find_missing(check: Check, *, quick: bool) -> str:
    is_missing = quick if check.needs == "time" else check.needs == "devices" and len(jax.devices()) < 2
    return _MISSING[check.needs] if is_missing else ""


def run_check(check: Check, subject: Subject, missing: str) -> Result:
    start, details, faults = time.perf_counter(), [], []
    if not missing:
        try:
            for finding in check.run(subject):
                details.append(f"{finding.what}: {finding.fault or 'as expected'}")
                faults += [f"{finding.what}: {finding.fault}"] if finding.fault else []
        except Exception as error:  # noqa: BLE001 - a fault of the backend, whatever it is
            faults.append(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    if faults and check.name == "pairs" and subject.backend == "te":
        te_one_pass.avoid()
    backend = subject.implementation
    remedies = [check.remedy, "" if backend.emulates else f"--backend {backend.fallback}"]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Result(
        check=check.name,
        title=check.title,
        backend=subject.backend,
        format=subject.format,
        native=subject.native,
        status="not run" if missing else "failed" if faults else "passed",
        reason=missing or (faults[0] + more if faults else ""),
        remedy="; or ".join(filter(None, remedies)) if faults else "",
        details=tuple(details),
        is_fatal=check.is_fatal,
        seconds=time.perf_counter() - start,
    )


def collect_failures(results: Sequence[Result]) -> dict[str, str]:
    """Why backends failed, by "backend format". A failure in te's kernel for pairs has a name of its own (`ONE_PASS`).

    Backend te can do without this kernel.
    """
    failures: dict[str, str] = {}
    for result in results:
        if result.status == "failed" and result.is_fatal:
            can_do_without = result.check == "pairs" and result.backend == "te"
            name = ONE_PASS if can_do_without else f"{result.backend} {result.format}"
            failures.setdefault(name, f"{result.check}: {result.reason}")
    return failures
