"""How much reduce-scatter time a compiled step can hide behind other kernels.

These are figures of docs/reference/status.md.

    policyc compile fp8 --config llama3_8b --target gb200 --devices 8 --dump-hlo DIR
    python -m benchmarks.scatter_overlap DIR/*.hlo.txt [--target gb200] [--devices 8]

Kernels scheduled between the start and the end of a scatter can run in parallel with it. The cost model gives the times
of kernels and scatters from the bytes they move. A scatter is hidden for as long as the kernels run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command_line import make_parser, print_header, print_row
from policyc.hardware import gemm_cost, hlo
from policyc.hardware.mesh import exchange_seconds
from policyc.numerics.targets import Target, get_target


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """A reduce-scatter: its executions, its bytes, and the kernels between its start and its end with their bytes."""

    times: int
    bytes: int
    kernels: int
    kernel_bytes: int


def find_scatters(module: hlo.Module) -> Iterator[Scatter]:
    for execution in module.executions:
        if not execution.is_kernel or not execution.instruction.opcode.startswith("reduce-scatter"):
            continue
        computation = module.computations[execution.computation]
        kernels = list(_kernels_until_end(module, execution))
        yield Scatter(
            times=execution.times,
            bytes=sum(computation[name].bytes for name in execution.instruction.operands),
            kernels=len(kernels),
            kernel_bytes=sum(k.bytes_read + k.bytes_written for k in kernels),
        )


def _kernels_until_end(module: hlo.Module, start: hlo.Execution) -> Iterator[hlo.Execution]:
    """The kernels between the start and the end of a scatter. A synchronous scatter has none."""
    computation, name = module.computations[start.computation], start.instruction.name
    ends = [i.name for i in computation.values() if i.opcode == "reduce-scatter-done" and name in i.operands]
    if not ends:
        return
    names = list(computation)
    between = set(names[names.index(name) + 1 : names.index(ends[0])])
    called = {c for n in between if computation[n].opcode == "call" for c in computation[n].called}
    for execution in module.executions:
        runs = execution.instruction.name in between and execution.computation == start.computation
        is_collective = execution.instruction.opcode.startswith(hlo.COLLECTIVES)
        if execution.is_kernel and not is_collective and (runs or execution.computation in called):
            yield execution


def hidden_seconds(scatter: Scatter, target: Target, devices: int) -> tuple[float, float]:
    """The seconds that all executions of a scatter take, and how many of these seconds are hidden."""
    seconds = exchange_seconds(target, scatter.bytes, devices, 1)
    beside = gemm_cost.copy_seconds(target, scatter.kernel_bytes)
    return scatter.times * seconds, scatter.times * min(seconds, beside)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("hlo", type=Path, nargs="+", help="optimized HLO")
    parser.add_argument("--target", default="gb200", help="the GPU (default: gb200)")
    parser.add_argument("--devices", type=int, default=8, help="number of devices (default: 8)")
    options = parser.parse_args()
    print_header(("step", "scatters", "bytes", "seconds", "hidden", "kernels beside them", "their bytes"))
    for path in options.hlo:
        scatters = list(find_scatters(hlo.parse_module(path.read_text())))
        pairs = [hidden_seconds(s, get_target(options.target), options.devices) for s in scatters]
        total, hidden = (sum(pair[i] for pair in pairs) for i in range(2))
        print_row([
            path.name.removesuffix(".hlo.txt"),
            str(sum(s.times for s in scatters)),
            f"{sum(s.times * s.bytes for s in scatters) / 1e9:.0f} GB",
            f"{total:.2f} s",
            f"{hidden:.2f} s",
            f"{sum(s.times * s.kernels for s in scatters) / 1e3:.0f} k",
            f"{sum(s.times * s.kernel_bytes for s in scatters) / 1e12:.2f} TB",
        ])  # fmt: skip


if __name__ == "__main__":
    main()
