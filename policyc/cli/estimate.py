"""`policyc estimate`: what a step would cost on a GPU that need not be here."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import exit_with_message, load_policy, use_color
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    format_option,
    program_argument,
    step_options,
    variant_option,
)
from policyc.cli.program import plan_program

if TYPE_CHECKING:
    from policyc.hardware.step_cost import Estimate, Mesh, Work
    from policyc.language.policy import Policy

ASSUMPTIONS = """\
A large GEMM reaches .73 (bf16), .72 (fp8; .60 on Hopper) or .60 (nvfp4) of the dense peak, or the memory's speed.
A copy reaches .62 of the memory's bandwidth. Between GEMMs, each input is written and each output read once a pass.
te: a tensor is read for its maximum and once more for all of its codes. xla: each set of codes in passes of its own,
as measured on an H200.
Attention reaches half of the bf16 peak, of its causal FLOPs in a configuration, of all of them in a program.
fsdp gathers weights twice in bf16 and scatters gradients in fp32, for each part of a batch.
Everything else is one part of every step. It, and how much communication is hidden, are fitted to four published
figures; docs/estimate.md has them, and the errors on eight others. Speed-ups are better known than times.
Memory is not looked at: what does not fit has an estimate too.
"""


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc estimate te_nvfp4 --config llama3_405b --target gb300 --devices 128
    policyc estimate te_nvfp4 --against fp8 --config llama3_8b --target gb200 --devices 8 --batch 128
    policyc estimate te_nvfp4 --config llama3_405b --target gb200 --devices 128 --mesh 'fsdp=32 tensor=4'
    policyc estimate llama.policy --target b200 train.py --steps 100       any program, from its traced loss
    """,
)
@step_options
@click.option("--against", metavar="POLICY", help="Another policy to compare with.")
@variant_option
@click.option(
    "--backend", type=click.Choice(["te", "xla"]), default="te", show_default=True, help="Whose quantizers."
)
@format_option("table", "json")
@click.option("--assumptions", is_flag=True, help="Also print what the model assumes.")
@click.argument("policy")
@program_argument(required=False)
def estimate(policy: str, program: tuple[str, ...], step: StepOptions, **options: Any) -> None:
    """Estimate the time of a training step on GPUs that are not here.

    The time is given part by part. A model of costs, not a measurement: see docs/estimate.md for what it is worth.
    """
    step.check_source(program)
    from policyc.compiler.plan import make_plan
    from policyc.hardware import step_cost
    from policyc.numerics.targets import target

    try:
        gpu = target(step.target)
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None
    first = load_policy(policy, options["variant"])
    meant = [(policy if options["variant"] is None else f"{policy} {options['variant']}", first)]
    if options["against"] is not None:
        meant.insert(0, (options["against"], load_policy(options["against"], None)))
    try:
        mesh = step_cost.mesh_of(step.mesh or f"fsdp={step.devices}", step.devices)
        work = _work(first, program, mesh, step, options["backend"])
    except ValueError as error:
        exit_with_message(str(error))
    found = [
        (name, step_cost.estimate(dataclasses.replace(work, plan=make_plan(of, work.plan.sites)), gpu, mesh))
        for name, of in meant
    ]
    if options["output_format"] == "json":
        click.echo(json.dumps(_as_data(found, gpu.name, mesh), indent=2))
    else:
        _table(found, f"{step.devices} x {gpu.name} ({mesh})")
        if options["assumptions"]:
            click.echo(ASSUMPTIONS, nl=False)


def _work(policy: Policy, program: tuple[str, ...], mesh: Mesh, step: StepOptions, backend: str) -> Work:
    from policyc.hardware import llama_step, step_cost

    if step.config:
        sizes = llama_step.Sizes(
            batch=step.batch, sequence=step.sequence, accumulate=step.accumulate, remat=step.remat
        )
        return llama_step.work(policy, step.config, mesh, sizes, backend)
    step.reject_for_program("batch", "sequence")
    if mesh.tensor * mesh.context > 1:
        raise ValueError(
            f"a program can be divided over data and fsdp only, not {mesh}: what a tensor axis moves is not known"
        )
    found = plan_program(policy, program)
    rows = max(site.batch * site.m for site in found.sites)
    if rows < mesh.rows:
        raise ValueError(
            f"{mesh.rows} devices are too many for {rows} rows of the largest GEMM: --devices {rows} at most"
        )
    return step_cost.Work(
        plan=found,
        accumulate=step.accumulate or 1,
        remat=step.remat or "none",
        backend=backend,
    )


Named = list[tuple[str, "Estimate"]]


def _as_data(found: Named, gpu: str, mesh: Mesh) -> dict[str, Any]:
    estimates = [
        {
            "policy": name,
            "seconds": of.seconds,
            "tflops_per_device": of.tflops,
            "parts": dict(of.parts),
            "gemms": dict(of.gemms),
        }
        for name, of in found
    ]
    data: dict[str, Any] = {"target": gpu, "devices": mesh.devices, "mesh": str(mesh), "estimates": estimates}
    return data if len(found) == 1 else data | {"speed_up": _speed_up(found)}


def _speed_up(found: Named) -> float:
    (_, before), (_, after) = found
    return before.seconds / after.seconds


def _table(found: Named, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column("seconds a step")
    for name, _ in found:
        grid.add_column(name, justify="right")
        grid.add_column("share", justify="right")

    def row(label: str, seconds: list[float], style: str | None = None) -> None:
        shares = [f"{part / of.seconds:.1%}" for part, (_, of) in zip(seconds, found, strict=True)]
        cells = (cell for pair in zip((f"{s:.4g}" for s in seconds), shares, strict=True) for cell in pair)
        grid.add_row(label, *cells, style=style)

    for part in found[0][1].parts:
        row(part, [of.parts[part] for _, of in found])
        if part == "gemms":
            for format in sorted({name for _, of in found for name in of.gemms}):
                row(f"  {format}", [of.gemms.get(format, 0.0) for _, of in found], "dim")
    grid.add_section()
    grid.add_row("step", *(cell for _, of in found for cell in (f"{of.seconds:.4g}", "")))
    grid.add_row("TFLOP/s a device", *(cell for _, of in found for cell in (f"{of.tflops:.0f}", "")))
    if len(found) == 2:
        grid.add_row("speed-up", "", "", f"{_speed_up(found):.2f}x", "")
    Console(force_terminal=use_color()).print(grid)
