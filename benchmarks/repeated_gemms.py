"""Time of a scanned step in bf16 with and without XLA's dynamic-slice fusion, and with it but without Triton GEMMs.

    python -m benchmarks.repeated_gemms --json repeated_gemms.json

The fusion lets a cuBLAS GEMM write its result into a stack of saved activations. If the program also has another use of
the result, JAX 0.11.2 runs such a GEMM twice. By default no GEMM is a cuBLAS call yet when XLA makes these fusions;
without Triton GEMMs all are, as in `policyc compile`. The steps run in turn in one process, on one training state.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import jax

from benchmarks.command_line import make_parser
from benchmarks.llama_step import Benchmark, Layout
from benchmarks.timing import describe_machine, save
from policyc.hardware import hlo
from policyc.hardware.compile_report import find_repeated_gemms, kernel_kind
from policyc.models.llama import train_step
from policyc.models.llama.configs import CONFIGS

STEPS = {
    "as compiled": {},
    "without the fusion": {"xla_gpu_enable_dynamic_slice_fusion": False},
    "without Triton GEMMs": {"xla_gpu_enable_triton_gemm": False},
}
"""XLA options of each step."""


def compile_step(bench: Benchmark, options: dict[str, Any]) -> Any:
    step = train_step.make_train_step(bench.config, bench.run, bench.mesh)
    return step.lower(bench.state_shapes, bench.next_batch()).compile(compiler_options=options)


def count_gemms(compiled: Any) -> tuple[int, int]:
    """The number of cuBLAS GEMMs in a step, and how many of them repeat another one."""
    module = hlo.parse_module(compiled.as_text())
    gemms = sum(e.times for e in module.executions if e.is_kernel and kernel_kind(e) == "GEMMs")
    return gemms, sum(gemm.times for gemm in find_repeated_gemms(module))


def main() -> None:
    on_gpu = jax.default_backend() == "gpu"
    parser = make_parser(__doc__)
    parser.add_argument(
        "--config", default="1b" if on_gpu else "tiny", help="default: 1b on a GPU, else tiny"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (default: 4)")
    parser.add_argument("--remat", default="dots", choices=("none", "full", "dots"), help="default: dots")
    parser.add_argument("--rounds", type=int, default=8, help="runs of each step (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    config, run = CONFIGS[options.config]
    run = dataclasses.replace(run, steps=10**6, accumulate=1)
    bench = Benchmark(config, run, Layout(options.batch, options.remat, scan=True, loss_chunks=4))
    steps = {name: compile_step(bench, settings) for name, settings in STEPS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(bench.time_step(step, 2))
    print(describe_machine())
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    results = {}
    for name, seconds in medians.items():
        gemms, repeated = count_gemms(steps[name])
        ratio = seconds / medians["as compiled"]
        print(f"{name:20s} {seconds * 1e3:8.2f} ms  {ratio:5.3f}  {repeated} of {gemms} GEMMs run again")
        results[name] = {"ms": seconds * 1e3, "gemms": gemms, "repeated": repeated}
    save(options.json, results)


if __name__ == "__main__":
    main()
