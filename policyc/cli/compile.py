"""`policyc compile`: a training step, compiled for GPUs that need not be here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import exit_with_message, load_policy, write_output
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    backend_option,
    format_option,
    program_argument,
    require_native_option,
    step_options,
    variant_option,
)
from policyc.cli.program import exit_on_error, parse_program

if TYPE_CHECKING:
    from policyc.compiler.plan import ExecutionOptions
    from policyc.hardware.deviceless import Report
    from policyc.language.policy import Policy


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc compile llama_nvfp4 --config llama3_8b --target gb200 --devices 8
    policyc compile fp8 --config llama3_405b --target gb300 --devices 128 --mesh 'fsdp=32 tensor=4' --batch 128
    policyc compile llama_nvfp4 --config llama3_8b --target gb200 --devices 8 --dump-hlo hlo --format json
    policyc compile my.policy --target b200 --devices 8 --require-native train.py --steps 100
    """,
)
@step_options
@variant_option
@backend_option
@require_native_option
@click.option("--dump-hlo", metavar="DIR", help="Write the optimized HLO here.")
@format_option("table", "json")
@click.argument("policy")
@program_argument(required=False)
def compile(policy: str, program: tuple[str, ...], step: StepOptions, **options: Any) -> None:
    """Compile a training step for GPUs that are not here.

    Of a configuration, the whole step is compiled: forward, backward, optimizer. Of a program, the first jitted
    function that differentiates a loss with a GEMM, on the mesh that it makes of jax.devices(): --devices says how
    many it finds. Fails where a product that is claimed to be native is not in the compiled program, and where the
    step does not fit into the device's memory.
    """
    step.check_source(program)
    meant = load_policy(policy, options["variant"])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no GPU is looked for
    from policyc.compiler.pipeline import execution_options
    from policyc.hardware.deviceless import NotPossible

    try:
        with exit_on_error():
            execution = execution_options(options["backend"], step.target, options["require_native"])
            report = _compiled(meant, program, execution, step)
    except (NotPossible, ImportError, NotImplementedError) as error:  # the last two of a backend
        exit_with_message(str(error))
    title = f"{step.config or program[program[0] == '-m']} under {policy}"
    if options["dump_hlo"]:
        _dump(options["dump_hlo"], report, title)
    click.echo(
        _as_json(report, title) if options["output_format"] == "json" else _as_table(report, title), nl=False
    )
    _judge(report)


def _compiled(
    policy: Policy, program: tuple[str, ...], execution: ExecutionOptions, step: StepOptions
) -> Report:
    from policyc.compiler import pipeline
    from policyc.experiments import runner
    from policyc.hardware import deviceless, step_cost
    from policyc.jaxcore import define_primitive

    count = step.devices
    assert execution.target is not None
    if step.config:
        from policyc.hardware import llama_step

        sizes = llama_step.Sizes(
            batch=step.batch, sequence=step.sequence, accumulate=step.accumulate, remat=step.remat
        )
        mesh = step_cost.mesh_of(step.mesh or f"fsdp={count}", count)
        llama_step.check(step.config, mesh, sizes)
        devices = deviceless.devices_of(execution.target, count)
        jitted_step, arguments, run = llama_step.step(step.config, mesh, sizes, devices)
        pipeline.set_step(0, total=run.steps)
        return deviceless.compile_step(jitted_step, arguments, policy, execution, count, run.accumulate)
    step.reject_for_program("batch", "sequence", "accumulate", "remat")
    if step.mesh:
        raise ValueError(
            "--mesh: a program makes its own mesh, of jax.devices(); --devices says how many it finds"
        )
    deviceless.check_installed()
    if count > 1:
        define_primitive.host_devices(count)
    jitted, plans = runner.trace_first_step(parse_program(program), policy, execution)
    if not plans:
        raise ValueError("the program ended, and no loss that it differentiated has a GEMM")
    if jitted is not None:
        return deviceless.compile_jitted(jitted, plans, execution, count)
    if count > 1:
        raise ValueError(
            "the program differentiates its loss outside jax.jit, where no step of several devices is compiled: put "
            "the step into jax.jit, or --devices 1"
        )
    plans[0].check()
    return deviceless.compile_loss(plans[0], *deviceless.devices_of(execution.target, 1))


# ---- telling


def _dump(folder: str, report: Report, title: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        exit_with_message(f"--dump-hlo: '{folder}' cannot be made: {error.strerror}")
    name = "".join(
        c if c.isalnum() or c in "-_." else "_" for c in f"{title}_{report.target}x{report.devices}"
    )
    write_output("--dump-hlo", str(Path(folder) / f"{name}.hlo.txt"), report.text)


def _as_json(report: Report, title: str) -> str:
    data = {
        "step": title,
        "target": report.target,
        "devices": report.devices,
        "products": [
            {
                "site": row.site,
                "layers": None if row.layers is None else [list(end) for end in row.layers],
                "gemm": row.gemm,
                "format": row.format,
                "backend": row.backend,
                "native": row.native,
                "call": row.call or None,
                "found": row.found,
                "reason": row.reason or None,
                "remedy": row.remedy or None,
            }
            for row in report.rows
        ],
        "memory": {**report.memory, "needed": report.needed, "device": report.device_memory},
        "collectives": [
            {"kind": m.kind, "type": m.type, "count": m.count, "bytes": m.bytes} for m in report.collectives
        ],
        "kernels": report.kernels,
        "kernel_bytes": report.kernel_bytes,
        "seconds": dict(report.seconds),
    }
    return json.dumps(data, indent=1) + "\n"


def _as_table(report: Report, title: str) -> str:
    from policyc.compiler.plan_tables import columns

    def layers(row: Any) -> str:
        if row.layers is None:
            return "-"
        first, last = (".".join(map(str, end)) for end in row.layers)
        return first if first == last else f"{first}-{last}"

    rows = [["site", "layers", "product", "format", "runs", "found"]]
    for row in report.rows:
        lowering = f"{row.backend}, {'native' if row.native else 'emulated'}"
        found = f"{row.found} x {row.call}" if row.call else "-"
        rows.append([row.site, layers(row), row.gemm, row.format, lowering, found])
    reasons = dict.fromkeys(f"{row.reason}; {row.remedy}" for row in report.rows if row.reason)
    m, gb = report.memory, 1e9
    lines = [f"{title}, for {report.devices} x {report.target}", *columns(rows)]
    lines += [f"not native: {reason}" for reason in reasons]
    lines += [
        "memory of a device (GB): " + ", ".join(
            f"{name} {m[name] / gb:.2f}" for name in ("arguments", "outputs", "temporaries", "code")
        ) + f"; {m['shared'] / gb:.2f} of the outputs lie where arguments lay",
        f"  {report.needed / gb:.2f} of {report.device_memory / gb:.2f}: {_fits(report)}",
    ]  # fmt: skip
    lines += [f"{c.count} x {c.kind} of {c.type}: {c.bytes / gb:.3f} GB" for c in report.collectives]
    lines += [
        f"{report.kernels} kernels, which read and write {report.kernel_bytes / gb:.1f} GB",
        ", ".join(f"{name} took {value:.0f} s" for name, value in report.seconds.items()),
    ]
    return "".join(f"{line}\n" for line in lines)


def _fits(report: Report) -> str:
    from policyc.hardware.deviceless import TAKEN

    if not report.fits:
        return "does not fit"
    if report.fraction <= TAKEN:
        return "fits"
    return f"fits, with XLA_PYTHON_CLIENT_MEM_FRACTION={report.fraction:.2f} or more (JAX takes {TAKEN} by itself)"


def _judge(report: Report) -> None:
    missing = report.missing
    if missing:
        row = missing[0]
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        exit_with_message(
            f"{row.gemm} of '{row.site}' was to be native{more}, and {row.call} is in the compiled program "
            f"{row.found} times, not {row.expected}: --dump-hlo DIR shows what is there instead"
        )
    if not report.fits:
        exit_with_message(
            "the step does not fit into the device's memory: more devices, a smaller --batch in more parts "
            "(--accumulate), or --remat full"
        )
