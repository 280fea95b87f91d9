"""`policyc estimate`: estimates the time of a training step on GPUs that need not be present."""

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
    from policyc.hardware.step_cost import Estimate, MeshShape, TrainingStep
    from policyc.language.policy import Policy

ASSUMPTIONS = """\
A large GEMM reaches .73 (bf16), .72 (fp8; .60 on Hopper) or .60 (nvfp4) of the dense peak, or is bound by memory.
A copy reaches .62 of the memory bandwidth. Between GEMMs, each input is written and each output read once per pass.
te: a tensor is read for its maximum, and once more for all of its codes.
xla: each quantization of a tensor runs in passes of its own, as measured on an H200.
Attention reaches half of the bf16 peak. A configuration counts causal FLOPs, a program all of them.
fsdp gathers weights twice in bf16 and scatters gradients in fp32, for each microbatch.
"Everything else" is a fixed fraction of every step. This fraction, and how much communication overlaps with
computation, are fitted to four published figures. docs/estimate.md has them, and the errors on eight others.
Speed-ups are better known than times.
Memory is not checked: a step that does not fit has an estimate too.
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
    "--backend",
    type=click.Choice(["te", "xla"]),
    default="te",
    show_default=True,
    help="Whose quantizers to assume: Transformer Engine's or XLA's.",
)
@format_option("table", "json")
@click.option("--assumptions", is_flag=True, help="Also print the assumptions of the cost model.")
@click.argument("policy")
@program_argument(required=False)
def estimate(policy: str, program: tuple[str, ...], step: StepOptions, **options: Any) -> None:
    """Estimate the time of a step on GPUs that need not be present.

    The step is that of a configuration of the bundled Llama (--config) or of a program, whose loss is traced and not
    run. The estimate comes from a cost model, not from a measurement. docs/estimate.md says how accurate it is.
    """
    step.check_source(program)
    from policyc.hardware import step_cost
    from policyc.numerics.targets import get_target

    try:
        target = get_target(step.target)
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None
    policies = _load_policies(policy, options["variant"], options["against"])
    try:
        mesh = step.mesh_shape()
        traced = _trace_step(policies[-1][1], program, mesh, step, options["backend"])
    except ValueError as error:
        exit_with_message(str(error))
    estimates = [
        (name, step_cost.estimate(_under(traced, loaded), target, mesh)) for name, loaded in policies
    ]
    if options["output_format"] == "json":
        click.echo(json.dumps(_as_data(estimates, target.name, mesh), indent=2))
    else:
        _print_table(estimates, f"{step.devices} x {target.name} ({mesh})")
        if options["assumptions"]:
            click.echo(ASSUMPTIONS, nl=False)


def _load_policies(policy: str, variant: str | None, against: str | None) -> list[tuple[str, Policy]]:
    """The policies to compare, with their names: that of --against first, if there is one."""
    policies = [(policy if variant is None else f"{policy} {variant}", load_policy(policy, variant))]
    return policies if against is None else [(against, load_policy(against, None)), *policies]


def _under(step: TrainingStep, policy: Policy) -> TrainingStep:
    """The same step under another policy."""
    from policyc.compiler.plan import make_plan

    return dataclasses.replace(step, plan=make_plan(policy, step.plan.sites))


def _trace_step(
    policy: Policy, program: tuple[str, ...], mesh: MeshShape, step: StepOptions, backend: str
) -> TrainingStep:
    """Traces the step of a configuration or of a program. Raises ValueError if the options do not fit it."""
    from policyc.hardware import llama_step, step_cost

    if step.config:
        return llama_step.plan_step(policy, step.config, mesh, step.sizes(), backend)
    step.reject_for_program("batch", "sequence")
    if mesh.tensor * mesh.context > 1:
        raise ValueError(
            f"a program can use the axes data and fsdp only, not {mesh}: the traffic of other axes is not known"
        )
    from policyc.compiler.plan_tables import other_products

    plan = plan_program(policy, program)
    for line in other_products(plan):
        click.echo(f"note: not in the estimate: {line}", err=True)
    rows = max(site.batch * site.m for site in plan.sites)
    if rows < mesh.batch_shards:
        raise ValueError(
            f"{mesh.batch_shards} devices are too many for the {rows} rows of the largest GEMM: use at most "
            f"--devices {rows}"
        )
    return step_cost.TrainingStep(
        plan=plan, accumulate=step.accumulate or 1, remat=step.remat or "none", backend=backend
    )


# ---- output

NamedEstimates = list[tuple[str, "Estimate"]]


def _as_data(estimates: NamedEstimates, target: str, mesh: MeshShape) -> dict[str, Any]:
    rows = [
        {
            "policy": name,
            "seconds": estimate.seconds,
            "tflops_per_device": estimate.tflops,
            "parts": dict(estimate.parts),
            "gemms": dict(estimate.gemms),
        }
        for name, estimate in estimates
    ]
    data: dict[str, Any] = {"target": target, "devices": mesh.devices, "mesh": str(mesh), "estimates": rows}
    return data if len(estimates) == 1 else data | {"speed_up": _speed_up(estimates)}


def _speed_up(estimates: NamedEstimates) -> float:
    (_, before), (_, after) = estimates
    return before.seconds / after.seconds


def _print_table(named: NamedEstimates, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from policyc.language.policy_tables import literal

    estimates = [estimate for _, estimate in named]
    table = Table(title=literal(title), title_justify="left", title_style="bold")
    table.add_column("seconds per step")
    for name, _ in named:
        table.add_column(literal(name), justify="right")
        table.add_column("share", justify="right")

    def add_row(label: str, seconds: list[float], style: str | None = None) -> None:
        cells = [
            cell
            for part, estimate in zip(seconds, estimates, strict=True)
            for cell in (f"{part:.4g}", f"{part / estimate.seconds:.1%}")
        ]
        table.add_row(literal(label), *cells, style=style)

    for part in estimates[0].parts:
        add_row(part, [estimate.parts[part] for estimate in estimates])
        if part == "gemms":
            for format in sorted({format for estimate in estimates for format in estimate.gemms}):
                add_row(f"  {format}", [estimate.gemms.get(format, 0.0) for estimate in estimates], "dim")
    table.add_section()
    table.add_row("step", *(cell for e in estimates for cell in (f"{e.seconds:.4g}", "")))
    table.add_row("TFLOP/s per device", *(cell for e in estimates for cell in (f"{e.tflops:.0f}", "")))
    if len(named) == 2:
        table.add_row("speed-up", "", "", f"{_speed_up(named):.2f}x", "")
    Console(force_terminal=use_color()).print(table)
