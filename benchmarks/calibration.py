"""The two fitted constants of the cost model, and its errors, on figures it was fitted to and on those it was not.

    python -m benchmarks.calibration [--json FILE]

Twelve published throughputs, in pairs of FP8 and NVFP4. Fitted: the pairs of the first trainer on GB200. Held out: the
same trainer on GB300, and another trainer on both. And what was measured on an H200, of which the model was given the
copy, the quantizers and the forward fp8 product, but none of the lines below. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from policyc import load, parse
from policyc.compiler.plan import make_plan
from policyc.hardware import gemm_cost, llama_step
from policyc.hardware.step_cost import Busy, Mesh, Work, busy
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.numerics.targets import target

SEQUENCES = 2  # of a device at a time: how the published runs were divided is not known


@dataclass(frozen=True)
class Published:
    """TFLOP/s of a GPU, sequences of 8192 tokens."""

    trainer: str
    config: str
    gpu: str
    devices: int
    fp8: float
    nvfp4: float
    fitted: bool = False


PUBLISHED = (
    Published("first", "llama3_8b", "gb200", 8, 1497, 2017, fitted=True),
    Published("first", "llama3_405b", "gb200", 128, 1557, 2241, fitted=True),
    Published("first", "llama3_8b", "gb300", 8, 1759, 2301),
    Published("first", "llama3_405b", "gb300", 128, 2103, 3633),
    Published("second", "llama3_405b", "gb200", 256, 2129, 2944),
    Published("second", "llama3_405b", "gb300", 256, 2646, 3575),
)

POLICIES = {"fp8": "fp8", "nvfp4": "te_nvfp4"}  # every linear of every block


@cache
def traced(config: str, devices: int) -> Work:
    sizes = llama_step.Sizes(batch=SEQUENCES * devices, sequence=8192, accumulate=1, remat="none")
    return llama_step.work(Policy(), config, Mesh(fsdp=devices), sizes, "te")


@cache
def planned(config: str, devices: int, format: str) -> Work:
    work = traced(config, devices)
    return replace(work, plan=make_plan(load(POLICIES[format]), work.plan.sites))


@cache
def computed(case: Published, format: str) -> Busy:
    return busy(planned(case.config, case.devices, format), target(case.gpu), Mesh(fsdp=case.devices))


def predicted(
    case: Published, format: str, hidden: float = gemm_cost.HIDDEN, other: float = gemm_cost.OTHER
) -> float:
    return computed(case, format).estimate(hidden, other).tflops


def fit(cases: Sequence[Published] = tuple(c for c in PUBLISHED if c.fitted)) -> tuple[float, float]:
    """The constants with the least squared error of the logarithms, to two digits."""
    figures = [(case, f, getattr(case, f)) for case in cases for f in POLICIES]

    def error(constants: tuple[float, float]) -> float:
        return sum(math.log(predicted(c, f, *constants) / figure) ** 2 for c, f, figure in figures)

    grid = [(hidden / 20, other / 100) for hidden in range(20) for other in range(61)]
    return min(grid, key=error)


@dataclass(frozen=True)
class Row:
    case: Published
    fp8: float
    nvfp4: float

    @property
    def speed_up(self) -> float:
        return self.nvfp4 / self.fp8

    def errors(self) -> tuple[float, float, float]:
        case = self.case
        return (
            self.fp8 / case.fp8 - 1,
            self.nvfp4 / case.nvfp4 - 1,
            self.speed_up / (case.nvfp4 / case.fp8) - 1,
        )


def rows(hidden: float = gemm_cost.HIDDEN, other: float = gemm_cost.OTHER) -> list[Row]:
    return [Row(case, *(predicted(case, format, hidden, other) for format in POLICIES)) for case in PUBLISHED]


OTHER_FITS = {
    "8B, both GPUs": PUBLISHED[0:3:2],
    "405B, first trainer": PUBLISHED[1:4:2],
    "405B, second trainer": PUBLISHED[4:6],
    "GB300": PUBLISHED[2:4] + PUBLISHED[5:],
    "all": PUBLISHED,
}
"""What the errors would be had other rows been chosen."""


# ---- an H200, one linear of 16384 x 4096 x 14336: docs/numerics.md


def linear(text: str, products: frozenset[Gemm] = frozenset(Gemm)) -> float:
    """Seconds of a linear's products under a recipe, by the model."""
    sizes, gpu = (16384, 14336, 4096), target("h200")
    policy = parse(f"* -> {text}")
    meant = policy.resolver()(policy.rules[0].recipe)
    total = 0.0
    for gemm in products:
        format = gemm_cost.format_of(meant, gemm, "bf16")
        height, columns, contracted = gemm_cost.shape(gemm, *sizes)
        total += gemm_cost.gemm_seconds(gpu, format, height, columns, contracted)
        if not gpu.native(format):
            total += gemm_cost.emulation_seconds(gpu, contracted * (height + columns), height * columns)
    for role, sets in gemm_cost.code_sets(meant, products).items():
        total += gemm_cost.quantize_seconds(gpu, sets, gemm_cost.elements(role, *sizes), "xla")
    return total


def h200() -> list[tuple[str, float, float]]:
    """What, measured, by the model: milliseconds, or ratios to bf16."""
    forward, bf16 = frozenset({Gemm.FPROP}), linear("bf16")
    kept = "split(fprop=nvfp4(scale2d=weights), dgrad=bf16, wgrad=bf16)"
    return [
        ("bf16 forward, ms", 2.69, 1e3 * linear("bf16", forward)),
        ("nvfp4 forward, emulated, ms", 3.02, 1e3 * linear("nvfp4", forward)),
        ("nvfp4 full recipe / bf16", 1.24, linear("nvfp4(rht=wgrad, sr=grad, scale2d=weights)") / bf16),
        ("nvfp4 without the transform / bf16", 1.205, linear("nvfp4(sr=grad, scale2d=weights)") / bf16),
        ("nvfp4 forward only / bf16", 1.06, linear(kept) / bf16),
        ("mxfp8, emulated / bf16", 1.27, linear("mxfp8") / bf16),
        ("fp8 / bf16", 0.765, linear("fp8") / bf16),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write it here too")
    where = parser.parse_args().json
    hidden, other = fit()
    print(
        f"fitted: hidden {hidden:.2f}, other {other:.2f}; in the code: {gemm_cost.HIDDEN:.2f}, {gemm_cost.OTHER:.2f}"
    )
    data: dict[str, object] = {"hidden": hidden, "other": other}
    print(f"{'':42}{'fp8 TFLOP/s':>22}{'nvfp4 TFLOP/s':>22}{'speed-up':>22}")
    found = []
    for row in rows():
        case, errors = row.case, row.errors()
        pairs = ((row.fp8, case.fp8), (row.nvfp4, case.nvfp4), (row.speed_up, case.nvfp4 / case.fp8))
        forms = (".0f", ".0f", ".2f")
        cells = [f"{a:{f}} / {b:{f}} {e:+4.0%}" for (a, b), e, f in zip(pairs, errors, forms, strict=True)]
        kind = "fitted" if case.fitted else "held out"
        name = f"{kind:9}{case.trainer:7} {case.config} {case.devices} x {case.gpu}"
        print(f"{name:42}" + "".join(f"{cell:>22}" for cell in cells))
        found.append({"case": name, "predicted": [p for p, _ in pairs], "published": [p for _, p in pairs]})
    print("\nerrors of the speed-ups, in that order, fitted to other rows:")
    for name, cases in OTHER_FITS.items():
        constants = fit(cases)
        errors = " ".join(f"{row.errors()[2]:+4.0%}" for row in rows(*constants))
        print(f"{name:24} hidden {constants[0]:.2f}, other {constants[1]:.2f}:  {errors}")
    print()
    for what, measured, by_model in h200():
        print(f"H200, {what:42}{by_model:8.2f} / {measured:.2f} {by_model / measured - 1:+4.0%}")
        found.append({"case": f"H200, {what}", "predicted": [by_model], "published": [measured]})
    if where is not None:
        where.write_text(json.dumps(data | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
