"""`policyc estimate`: estimates the time of a training step on GPUs that need not be present."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.base.progress import stage
from policyc.cli.common import load_policy, load_unless_recommended, print_or_write, use_color
from policyc.cli.options import (
    FiniteRange,
    ProgramCommand,
    StepOptions,
    check_source,
    collect_options,
    format_option,
    option,
    option_class,
    out_option,
    path_option,
    policy_argument,
    priced_backend_option,
    program_argument,
    step_options,
    vs_option,
)
from policyc.cli.program import exit_on_error, fail_if_refused, parse_execution, trace_modelled_step

if TYPE_CHECKING:
    from policyc.compiler.matching.execution import ExecutionOptions
    from policyc.hardware.compile_report import CompiledStep
    from policyc.hardware.mesh import MeshShape
    from policyc.hardware.step_cost import Estimate
    from policyc.hardware.training_step import TrainingStep

EVERYTHING_ELSE = (
    "everything else: waits, gaps and low clocks, a fixed share of the step, fitted to published runs "
    "(docs/explanation/speed.md)"
)


@option_class
class EstimateOptions:
    """What is estimated and printed."""

    vs: str | None = vs_option
    backend: str = priced_backend_option
    compiled: tuple[str, ...] = option(
        metavar="FILE",
        multiple=True,
        help="Take bytes, kernels and collectives from a step that 'compile --format json' wrote. May be given "
        "once per policy.",
    )
    measured: str | None = path_option(
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help="Take the speeds of GEMMs, quantizers and copies from a selftest.json of the same GPU.",
    )
    store_bandwidth: float | None = option(
        type=FiniteRange(min=0, min_open=True),
        metavar="GB/S",
        help="Also estimate checkpoints, in a store that all hosts together write and read at this speed. "
        "Configurations only.",
    )
    output_format: str = format_option("table", "json")
    out: str | None = out_option()


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc estimate te_nvfp4 --config llama3_405b --target gb300 --devices 128
    policyc estimate te_nvfp4 --vs fp8 --config llama3_8b --devices 8 --batch 128
    policyc estimate te_nvfp4 --config llama3_405b --target gb200 --devices 128 --mesh 'fsdp=32 tensor=4'
    policyc estimate fp8 --config llama3_8b --target gb200 --devices 8 --compiled fp8.json
    policyc estimate fp8 --config llama3_405b --target gb200 --devices 1024 --store-bandwidth 200
    policyc estimate te_nvfp4 --vs fp8 --config llama3_8b --target b200 --measured selftest.json
    policyc estimate llama.policy --target b200 train.py --steps 100       any program, from its traced loss
    """,
)
@step_options
@collect_options(EstimateOptions, "options")
@policy_argument()
@program_argument(required=False)
def estimate(policy: str, program: tuple[str, ...], step: StepOptions, options: EstimateOptions) -> None:
    """Estimate the time of a step on GPUs that need not be present.

    The step is that of a configuration of the bundled Llama (--config) or of a program. A program's loss is traced, but
    not run. The estimate comes from a cost model, not from a measurement: docs/explanation/speed.md says how
    accurate it is.
    """
    check_source(program, step.config)
    execution = parse_execution(options.backend, step.target)
    names = [policy] if options.vs is None else [options.vs, policy]
    policies = [(name, load_policy(name)) for name in names[:-1]] + [
        (policy, load_unless_recommended(policy))
    ]
    with exit_on_error():
        mesh = step.mesh_shape()
        execution = _use_measured(execution, options.measured)
        compiled = _read_compiled(options.compiled, [name for name, _ in policies], step)
        traced = trace_modelled_step(policies[-1][1], program, mesh, step, execution)
        checkpoint = _estimate_checkpoint(step, mesh, options.store_bandwidth)
    chosen = traced.plan.policy
    if policies[-1][1] is None:
        policies[-1] = f"{policy} ({chosen.name})", chosen
    with stage("estimating the step"):
        steps = {name: traced.under(loaded or chosen, execution) for name, loaded in policies}
        estimates = [_estimate(name, under, mesh, compiled.get(name)) for name, under in steps.items()]
    if options.output_format == "json":
        text = json.dumps(_as_data(estimates, step.target, mesh) | checkpoint, indent=2) + "\n"
    else:
        text = _as_table(estimates, f"{step.devices} {step.target.upper()} ({mesh}){_describe_batch(traced)}")
        if options.store_bandwidth is not None:
            text += _describe_checkpoint(checkpoint["checkpoint"], options.store_bandwidth)
    print_or_write(text, options.out)
    fail_if_refused(*(under.plan for under in steps.values()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedEstimate:
    """The estimate of a policy, the quantized products that each backend runs, and the other backend's seconds."""

    policy: str
    backends: dict[str, int]
    estimate: Estimate
    is_compiled: bool
    is_emulated: bool
    other_backend: str
    other_seconds: float


def _estimate(name: str, step: TrainingStep, mesh: MeshShape, compiled: CompiledStep | None) -> NamedEstimate:
    from policyc.hardware import step_cost
    from policyc.hardware.compile_report import with_compiled
    from policyc.hardware.training_step import count_backends
    from policyc.numerics.backends import load

    estimate = step_cost.estimate(step, step.target, mesh)
    other = step.with_other_backend()
    other_seconds = step_cost.estimate(other, step.target, mesh).seconds
    if compiled is not None:  # its program has one backend
        estimate = with_compiled(estimate, compiled, step.target, mesh)
        other_seconds = estimate.seconds
    counts = count_backends(step.plan)
    return NamedEstimate(
        policy=name,
        backends=counts,
        is_emulated=any(load(backend).emulates for backend in counts),
        estimate=estimate,
        is_compiled=compiled is not None,
        other_backend="" if other_seconds == estimate.seconds else other.plan.execution.backend,
        other_seconds=other_seconds,
    )


def _use_measured(execution: ExecutionOptions, path: str | None) -> ExecutionOptions:
    """Gives the target the constants that a self-test measured. Raises ValueError if they are for another GPU."""
    if path is None or execution.target is None:
        return execution
    from policyc.hardware.selftest.report import read_constants

    constants = read_constants(Path(path), execution.target.name)
    return dataclasses.replace(execution, target=dataclasses.replace(execution.target, measured=constants))


def _read_compiled(
    paths: Sequence[str], policies: Sequence[str], step: StepOptions
) -> dict[str, CompiledStep]:
    """Reads compiled steps, by policy. Raises ValueError if one is for another policy, GPU or number of devices."""
    from policyc.hardware.compile_report import read_compiled_step

    compiled = {}
    for path in paths:
        report = read_compiled_step(Path(path))
        if report.policy not in policies:
            raise ValueError(
                f"'{path}' was compiled under {report.policy}, not {' or '.join(policies)}: compile the step again"
            )
        if (report.target, report.devices) != (step.target, step.devices):
            raise ValueError(
                f"'{path}' is for {report.devices} x {report.target}, not for {step.devices} x {step.target}: compile "
                f"the step again for these, or use --target {report.target} --devices {report.devices}"
            )
        compiled[report.policy] = report
    return compiled


def _estimate_checkpoint(
    step: StepOptions, mesh: MeshShape, gigabytes_per_second: float | None
) -> dict[str, Any]:
    """Estimates checkpoints in a store. Empty without a store. Raises ValueError for a program."""
    from policyc.hardware import llama_step
    from policyc.numerics.targets import get_target

    if gigabytes_per_second is None:
        return {}
    if not step.config:
        raise ValueError("--store-bandwidth needs --config: it is not known what a program saves")
    target, bandwidth = get_target(step.target), 1e9 * gigabytes_per_second
    return {"checkpoint": llama_step.checkpoint_cost(step.config, mesh, step.sizes(), target, bandwidth)}


# ---- output

NamedEstimates = Sequence[NamedEstimate]


def _as_data(estimates: NamedEstimates, target: str, mesh: MeshShape) -> dict[str, Any]:
    rows = [
        {
            "policy": named.policy,
            "backends": _list_backends(named.backends),
            "compiled": named.is_compiled,
            "seconds": named.estimate.seconds,
            "tflops_per_device": named.estimate.tflops,
            "parts": dict(named.estimate.parts),
            "gemms": dict(named.estimate.gemms),
            "other_backend": {named.other_backend: named.other_seconds} if named.other_backend else {},
        }
        for named in estimates
    ]
    data: dict[str, Any] = {"target": target, "devices": mesh.devices, "mesh": str(mesh), "estimates": rows}
    if len(estimates) == 1:
        return data
    from policyc.hardware.gemm_cost import speed_up_bounds

    return data | {
        "speed_up": _speed_up(estimates),
        "speed_up_bounds": speed_up_bounds(_speed_up(estimates)),
        "speed_up_range": _speed_up_range(estimates),
        "other_speed_up": _other_speed_up(estimates) if _other_backends(estimates) else None,
    }


def _speed_up(estimates: NamedEstimates) -> float:
    before, after = (named.estimate.seconds for named in estimates)
    return before / after


def _list_backends(counts: Mapping[str, int]) -> str:
    return ", ".join(
        name if len(counts) == 1 else f"{name} ({count} products)" for name, count in counts.items()
    )


def _other_backends(estimates: NamedEstimates) -> str:
    """The other backends that change an estimate; empty if none does."""
    from policyc.numerics.backends import title

    return " or ".join(
        dict.fromkeys(title(named.other_backend) for named in estimates if named.other_backend)
    )


def _other_speed_up(estimates: NamedEstimates) -> float:
    """The speed-up with the other backends."""
    before, after = (named.other_seconds for named in estimates)
    return before / after


def _speed_up_range(estimates: NamedEstimates) -> tuple[float, float] | None:
    """The range of the speed-up, from the model's errors on published runs; None if no run compares such policies."""
    from policyc.hardware.gemm_cost import speed_up_range

    return speed_up_range(_speed_up(estimates), estimates[1].backends) if _is_published(estimates) else None


def _is_published(estimates: NamedEstimates) -> bool:
    """Whether published runs compare policies in such formats."""
    before, after = (named.estimate.gemms for named in estimates)
    is_emulated = any(named.is_emulated for named in estimates)
    return "fp8" in before and "nvfp4" in after and "nvfp4" not in before and not is_emulated


def _describe_error(estimates: NamedEstimates) -> str:
    limits = _speed_up_range(estimates)
    if limits is not None:
        return f"{limits[0]:.2f}x to {limits[1]:.2f}x, by the errors on published runs"
    if _is_published(estimates):
        return "not known: all published runs are on Transformer Engine"
    return "not known: published runs compare only nvfp4 with fp8"


def _describe_batch(step: TrainingStep) -> str:
    """The tokens of a step; empty for a program, whose tokens are unknown."""
    if step.sequences is None or step.sequence is None:
        return ""
    tokens = step.sequences * step.sequence
    return f", {step.sequences:,} x {step.sequence:,} = {tokens:,} tokens per step"


def _describe_checkpoint(checkpoint: dict[str, Any], gigabytes_per_second: float) -> str:
    gb = {name: f"{checkpoint[name] / 1e9:.4g} GB" for name in ("bytes", "bytes_per_device", "host_memory")}
    return (
        f"checkpoint: {gb['bytes']}, {gb['bytes_per_device']} of it on each device; a host with "
        f"{checkpoint['devices_per_host']} devices needs {gb['host_memory']} of memory to write it\n"
        f"at {gigabytes_per_second:g} GB/s: written in {checkpoint['write_seconds']:.4g} s; restored in "
        f"{checkpoint['restore_seconds']:.4g} s: every device reads its shards, "
        f"{checkpoint['restored_bytes'] / 1e9:.4g} GB in all\n"
    )


def _as_table(named: NamedEstimates, title: str) -> str:
    from rich.console import Console
    from rich.table import Table

    from policyc.base.text import format_change, format_ratio, format_seconds
    from policyc.hardware.gemm_cost import speed_up_bounds
    from policyc.language.policy_tables import literal
    from policyc.numerics import backends

    estimates = [n.estimate for n in named]
    table = Table()
    table.add_column("time per step")
    for n in named:
        table.add_column(literal(n.policy), justify="right")
        table.add_column("share", justify="right")

    def add_row(label: str, seconds: list[float | None], style: str | None = None) -> None:
        cells = [
            cell
            for part, estimate in zip(seconds, estimates, strict=True)
            for cell in ((format_seconds(part), f"{part / estimate.seconds:.1%}") if part else ("-", ""))
        ]
        table.add_row(literal(label), *cells, style=style)

    for part in dict.fromkeys(part for estimate in estimates for part in estimate.parts):
        add_row(part, [estimate.parts.get(part) for estimate in estimates])
        if part == "gemms":
            for format in sorted({format for estimate in estimates for format in estimate.gemms}):
                add_row(f"  {format}", [estimate.gemms.get(format) for estimate in estimates], "dim")
    table.add_section()

    def add_values(label: str, values: Iterable[str]) -> None:
        table.add_row(label, *(cell for value in values for cell in (value, "")))

    add_values("step", (format_seconds(e.seconds) for e in estimates))
    others = _other_backends(named)
    if others:
        add_values(f"  with {others}", (format_seconds(n.other_seconds) for n in named))
    add_values("TFLOP/s per device", (f"{e.tflops:.0f}" for e in estimates))
    add_values(
        "backend",
        (_list_backends({backends.title(b): count for b, count in n.backends.items()}) or "-" for n in named),
    )
    add_values("bytes from", ("the compiled step" if n.is_compiled else "the cost model" for n in named))
    if len(named) == 2:
        bounds = speed_up_bounds(_speed_up(named))
        add_values("step time", ("", format_change(*(1 / bound - 1 for bound in bounds))))
        add_values("speed-up", ("", format_ratio(*bounds)))
        if others:
            add_values(f"  with {others}", ("", format_ratio(*speed_up_bounds(_other_speed_up(named)))))
    console = Console(force_terminal=use_color())
    with console.capture() as capture:
        console.print(literal(title), style="bold")
        console.print(table)
        if len(named) == 2:
            console.print(f"error of the speed-up: {_describe_error(named)}")
        console.print(EVERYTHING_ELSE, style="dim")
        if len(named) == 2:
            note = (
                f"of two figures, the first is for its time under {named[0].policy}, the second for its share"
            )
            console.print(literal(note), style="dim")
    return capture.get()
