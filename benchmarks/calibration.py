"""Fits the two free constants of the cost model, and prints its errors on published and measured figures.

    python -m benchmarks.calibration [--json FILE]

There are sixteen published throughputs, in pairs of FP8 and NVFP4. The constants are fitted to the throughputs of
MaxText on GB200. One is the share of a step that is not modelled, and cancels in a speed-up; the other one is 0. So
nothing is fitted to the speed-ups. The measurements on an H200 follow. The model's constants come from the times of
the copy, of the quantizers and of the forward fp8 product there, and from none of the printed measurements. Needs no
GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser
from policyc import load, parse
from policyc.compiler.matching.execution import ExecutionOptions, execution_options
from policyc.hardware import gemm_cost, llama_step
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import Estimate, estimate
from policyc.hardware.training_step import TrainingStep
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.numerics.targets import get_target


@dataclass(frozen=True)
class Published:
    """Published TFLOP/s per GPU: one trainer, one Llama, one GPU.

    `sequences` of 8192 tokens are on each device at a time. `policy` is the NVFP4 recipe: like `fp8`, it quantizes
    every linear of every block.
    """

    trainer: str
    config: str
    gpu: str
    devices: int
    fp8: float
    nvfp4: float
    sequences: int = 2  # how the second trainer divided its batches is unknown
    policy: str = "te_nvfp4"


MAXTEXT = partial(Published, "MaxText", policy="te_nvfp4_no_rht")
"""Its public example runs this recipe, unrolled. Its FP8 baseline scales by maxima of earlier steps, and is modelled
with current ones."""
BRIDGE = partial(Published, "Megatron Bridge")

PUBLISHED = (
    MAXTEXT("llama3_8b", "gb200", 4, 1497, 2017, sequences=4),
    MAXTEXT("llama3_405b", "gb200", 128, 1557, 2241, sequences=1),
    MAXTEXT("llama3_8b", "gb300", 4, 1759, 2301, sequences=4),
    MAXTEXT("llama3_405b", "gb300", 128, 2103, 3633, sequences=1),
    BRIDGE("llama3_405b", "gb200", 256, 2129, 2944),
    BRIDGE("llama3_405b", "gb300", 256, 2646, 3575),
    BRIDGE("llama3_70b", "gb200", 64, 1892, 2202),
    BRIDGE("llama3_70b", "gb300", 64, 2348, 3253),
)
FITTED = PUBLISHED[:2]
FORMATS = ("fp8", "nvfp4")


@cache
def trace_step(config: str, devices: int, sequences: int) -> TrainingStep:
    sizes = llama_step.Sizes(
        batch=sequences * devices, sequence=8192, accumulate=1, remat="none", unrolled=True
    )
    return llama_step.plan_step(Policy(), config, MeshShape(fsdp=devices), sizes, ExecutionOptions())


@cache
def step_parts(case: Published, format: str, backend: str = "te") -> Estimate:
    """The step with Transformer Engine's kernels for NVFP4, as in the published runs, or those of another backend."""
    policy = load("fp8" if format == "fp8" else case.policy)
    step = trace_step(case.config, case.devices, case.sequences)
    step = step.under(policy, execution_options(backend, case.gpu))
    return estimate(step, get_target(case.gpu), MeshShape(fsdp=case.devices))


def predict(
    case: Published,
    format: str,
    hidden: float = gemm_cost.HIDDEN_FRACTION,
    other: float = gemm_cost.OTHER_FRACTION,
) -> float:
    """The model's TFLOP/s per GPU."""
    return replace(step_parts(case, format), hidden=hidden, other=other).tflops


def fit(cases: Sequence[Published] = FITTED) -> tuple[float, float]:
    """Returns the constants with the least squared error of the log throughputs, on a grid."""
    figures = [(case, f, getattr(case, f)) for case in cases for f in FORMATS]

    def error(constants: tuple[float, float]) -> float:
        return sum(math.log(predict(c, f, *constants) / figure) ** 2 for c, f, figure in figures)

    grid = [(hidden / 20, other / 100) for hidden in range(20) for other in range(61)]
    return min(grid, key=error)


@dataclass(frozen=True)
class Prediction:
    """The model's TFLOP/s for a published case."""

    case: Published
    fp8: float
    nvfp4: float

    @property
    def speed_up(self) -> float:
        return self.nvfp4 / self.fp8

    def errors(self) -> tuple[float, float, float]:
        """Relative errors of the two throughputs and of the speed-up."""
        case = self.case
        return (
            self.fp8 / case.fp8 - 1,
            self.nvfp4 / case.nvfp4 - 1,
            self.speed_up / (case.nvfp4 / case.fp8) - 1,
        )


def predict_all(
    hidden: float = gemm_cost.HIDDEN_FRACTION, other: float = gemm_cost.OTHER_FRACTION
) -> list[Prediction]:
    return [
        Prediction(case, *(predict(case, format, hidden, other) for format in FORMATS)) for case in PUBLISHED
    ]


OTHER_FITS = {"MaxText": PUBLISHED[:4], "Megatron Bridge": PUBLISHED[4:], "all": PUBLISHED}
"""Other choices of rows to fit, to see what they would give."""


def rms(errors: Sequence[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))


ALWAYS = 1.39
"""The mean of the published speed-ups: what to say without a model."""


def speed_up_errors() -> dict[str, list[float]]:
    """Relative errors of the speed-ups: of both bounds of the model, and without one."""
    rows = predict_all()
    held, fixed = zip(*(gemm_cost.speed_up_bounds(row.speed_up) for row in rows), strict=True)
    published = [row.case.nvfp4 / row.case.fp8 for row in rows]
    predicted = {"its time stays": held, "its share stays": fixed, f"always {ALWAYS}x": [ALWAYS] * len(rows)}
    return {
        name: [p / actual - 1 for p, actual in zip(speed_ups, published, strict=True)]
        for name, speed_ups in predicted.items()
    }


# ---- one linear of 16384 x 4096 x 14336 on an H200: docs/explanation/speed.md


def linear_seconds(text: str, products: frozenset[Gemm] = frozenset(Gemm)) -> float:
    """The model's time for the products of a linear under a recipe."""
    m, n, k = 16384, 14336, 4096
    target = get_target("h200")
    policy = parse(f"* -> {text}")
    recipe = policy.resolver()(policy.rules[0].recipe)
    total = 0.0
    for gemm in products:
        format = gemm_cost.product_format(recipe, gemm, "bf16")
        rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
        total += gemm_cost.gemm_seconds(target, format, rows, columns, contracted)
        if not target.is_native(format):
            total += gemm_cost.emulation_seconds(target, gemm, rows, columns, contracted)
        else:
            total += gemm_cost.outer_scale_seconds(target, recipe.gemm_treatments(gemm), rows * columns)
    for role, treatments in gemm_cost.collect_quantizations(recipe, products):
        elements = gemm_cost.operand_size(role, m, n, k)
        total += gemm_cost.quantize_seconds(target, treatments, elements, "emulate", is_computed=False)
    return total


def predict_h200() -> list[tuple[str, float, float]]:
    """Name, measured value and predicted value of each measurement, in milliseconds or as a ratio to bf16."""
    forward, bf16 = frozenset({Gemm.FPROP}), linear_seconds("bf16")
    forward_only = "split(fprop=nvfp4(scale2d=weights), dgrad=bf16, wgrad=bf16)"
    full, no_rht = "nvfp4(rht=wgrad, sr=grad, scale2d=weights)", "nvfp4(sr=grad, scale2d=weights)"
    return [
        ("bf16 forward, ms", 2.69, 1e3 * linear_seconds("bf16", forward)),
        ("nvfp4 full recipe / bf16", 1.035, linear_seconds(full) / bf16),
        ("nvfp4 without the transform / bf16", 1.025, linear_seconds(no_rht) / bf16),
        ("nvfp4 forward only / bf16", 1.015, linear_seconds(forward_only) / bf16),
        ("mxfp8, emulated / bf16", 1.175, linear_seconds("mxfp8") / bf16),
        ("fp8 / bf16", 0.62, linear_seconds("fp8") / bf16),
        ("fp8, a scale per row / bf16", 0.715, linear_seconds("fp8(outer=row)") / bf16),
    ]


# ---- the linears of a layer of a 5B model on a B300: Transformer Engine's documentation, "GEMM profiling"

_TOKENS, _WIDTH, _HIDDEN = 15872, 4096, 16384
_LINEARS = ((_WIDTH, 3 * _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, _HIDDEN), (_HIDDEN, _WIDTH))  # inputs, outputs

PROFILE = {"bf16": (12.93, 12.93), "fp8": (6.812, 9.147), "mxfp8": (7.161, 8.984), "nvfp4": (3.764, 6.453)}
"""Milliseconds by format: of the 12 GEMMs alone, and with quantization. bf16 is the mean of two runs."""

_OPERAND_BYTES = {
    "fp8": (5.0, 5.0),
    "mxfp8": (2 + 2 * 33 / 32, 2 + 33 / 32),
    "nvfp4": (4 + 2 * 9 / 16, 4 + 9 / 16),
}
"""Bytes moved per element of the first and of the second operand of a GEMM.

The tool calls the forward pass of a linear for each of the 12 GEMMs, so it quantizes 24 operands and not 12 tensors. It
writes codes along rows, and for the first operand of the block formats also along columns, as a backward pass would
read them. fp8 and nvfp4 read an operand twice, once for its maximum.
"""


def profile_shapes() -> list[tuple[float, float, float]]:
    """Rows, columns and contracted size of each GEMM."""
    return [gemm_cost.product_shape(gemm, _TOKENS, n, k) for k, n in _LINEARS for gemm in Gemm]


def profile_bandwidth(format: str) -> float:
    """Bytes per second of the quantizers of a format, according to the profile."""
    first, second = _OPERAND_BYTES[format]
    moved = sum(k * (m * first + n * second) for m, n, k in profile_shapes())
    alone, together = PROFILE[format]
    return moved / (together - alone) * 1e3


def profile_fraction(format: str) -> float:
    """Fraction of the peak that the GEMMs of a format reach, according to the profile."""
    flops = sum(2.0 * m * n * k for m, n, k in profile_shapes())
    return flops / (PROFILE[format][0] / 1e3 * get_target("b300").peak(format))


def profile_slowdown() -> float:
    """Time of Transformer Engine's NVFP4 quantizers, as a multiple of the time to copy as many bytes."""
    return (
        gemm_cost.COPY_BANDWIDTH_FRACTION * get_target("b300").memory_bandwidth / profile_bandwidth("nvfp4")
    )


# ---- output


def print_profile() -> None:
    """Prints the constants that follow from Transformer Engine's profile."""
    bandwidth = get_target("b300").memory_bandwidth
    print("\nB300, from Transformer Engine's profile of a layer:")
    for format in PROFILE:
        line = f"{format:8} GEMM at {profile_fraction(format):.2f} of the peak"
        if format in _OPERAND_BYTES:
            rate = profile_bandwidth(format)
            line += f", quantizers at {rate / 1e12:.1f} TB/s, {rate / bandwidth:.2f} of the bandwidth"
        print(line)
    print(f"NVFP4 quantizers of te take {profile_slowdown():.2f} times as long as a copy")


def print_published() -> list[dict[str, Any]]:
    """Prints the predictions next to the published figures, and returns them as data."""
    print(f"{'':42}{'fp8 TFLOP/s':>22}{'nvfp4 TFLOP/s':>22}{'speed-up':>22}")
    data = []
    for row in predict_all():
        case = row.case
        pairs = ((row.fp8, case.fp8), (row.nvfp4, case.nvfp4), (row.speed_up, case.nvfp4 / case.fp8))
        cells = [
            f"{predicted:{digits}} / {published:{digits}} {error:+4.0%}"
            for (predicted, published), error, digits in zip(
                pairs, row.errors(), (".0f", ".0f", ".2f"), strict=True
            )
        ]
        name = f"{case.trainer} {case.config} {case.devices} x {case.gpu}"
        print(f"{name:42}" + "".join(f"{cell:>22}" for cell in cells))
        data.append({"case": name, "predicted": [p for p, _ in pairs], "published": [p for _, p in pairs]})
    return data


def print_other_fits() -> None:
    print("\nroot mean square of the errors of the speed-ups:")
    for name, errors in speed_up_errors().items():
        print(f"{name:24} {rms(errors):.1%}, {min(errors):+.0%} to {max(errors):+.0%}")
    print("\nif other throughputs are fitted:")
    for name, cases in OTHER_FITS.items():
        hidden, other = fit(cases)
        print(f"{name:24} hidden {hidden:.2f}, other {other:.2f}")


def print_h200() -> list[dict[str, Any]]:
    """Prints the predictions next to the measurements on an H200, and returns them as data."""
    print()
    data = []
    for name, measured, predicted in predict_h200():
        print(f"H200, {name:42}{predicted:8.2f} / {measured:.2f} {predicted / measured - 1:+4.0%}")
        data.append({"case": f"H200, {name}", "predicted": [predicted], "published": [measured]})
    return data


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    path = parser.parse_args().json
    hidden, other = fit()
    code = f"{gemm_cost.HIDDEN_FRACTION:.2f}, {gemm_cost.OTHER_FRACTION:.2f}"
    print(f"fitted: hidden {hidden:.2f}, other {other:.2f}; in the code: {code}")
    rows = print_published()
    print_other_fits()
    print_profile()
    rows += print_h200()
    if path is not None:
        path.write_text(json.dumps({"hidden": hidden, "other": other, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
