"""`policyc compile`: compiles a training step for GPUs that need not be present."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_USAGE,
    exit_with_message,
    load_policy,
    print_diagnostics,
    print_or_write,
    write_output,
)
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    backend_option,
    check_source,
    collect_options,
    format_option,
    multiple_losses_option,
    option_class,
    out_option,
    path_option,
    policy_argument,
    program_argument,
    require_native_option,
    step_options,
)
from policyc.cli.program import (
    check_order,
    exit_on_error,
    explain_early_exit,
    parse_execution,
    parse_program,
    program_name,
)

if TYPE_CHECKING:
    from policyc.compiler.matching.execution import ExecutionOptions
    from policyc.hardware.compile_report import CompileReport, ProductCheck
    from policyc.hardware.training_step import TrainingStep
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.policy import Policy


@option_class
class CompileOptions:
    """How a step is compiled and reported."""

    backend: str = backend_option
    require_native: bool = require_native_option
    multiple_losses: bool = multiple_losses_option
    dump_hlo: str | None = path_option(metavar="DIR", help="Write the optimized HLO into this folder.")
    output_format: str = format_option("table", "json")
    out: str | None = out_option()


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
@collect_options(CompileOptions, "options")
@policy_argument()
@program_argument(required=False)
def compile(policy: str, program: tuple[str, ...], step: StepOptions, options: CompileOptions) -> None:
    """Compile a training step for GPUs that need not be present.

    With --config, the whole step of the bundled Llama is compiled: forward, backward and optimizer. With a program,
    the first jitted function that differentiates a loss with a GEMM is compiled. The program builds its own mesh from
    jax.devices(), and --devices says how many devices it sees.

    The report lists the quantized products, memory, collectives and kernels of the compiled program. For the arrays
    that devices exchange, it says whether quantizers or GEMMs read them; the warning bf16-gathered names sites whose
    operand is gathered first and quantized afterwards. The command fails
    if a product that the plan says is native is not in the program, or if the step does not fit into the memory of a
    device. It needs the extra cuda13, but no GPU.
    """
    check_source(program, step.config)
    if program:
        check_order(policy, program)
    elif options.multiple_losses:
        raise click.UsageError("--multiple-losses is for programs: the bundled Llama has one loss")
    loaded = load_policy(policy)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX must not look for a GPU
    from policyc.base.text import escape_lines
    from policyc.hardware.deviceless import CannotCompile
    from policyc.language.diagnostics import PolicyError

    try:
        with exit_on_error():
            execution = parse_execution(options.backend, step.target, require_native=options.require_native)
            with stage(f"compiling for {step.devices} x {step.target}", prints=bool(program)):
                if step.config:
                    report, planned = _compile_config(loaded, step.config, execution, step)
                else:
                    report, planned = _compile_program(
                        loaded, program, execution, step, may_miss=options.multiple_losses
                    )
    except (CannotCompile, ImportError, NotImplementedError) as error:  # a backend raises the last two
        exit_with_message(str(error))
    title = f"{step.config or program_name(program)} under {policy}"
    if options.dump_hlo:
        _dump(options.dump_hlo, report, title)
    findings = _find_faults(report)
    if options.output_format == "json":
        text = _as_json(report, title, policy, findings)
    else:
        text = _as_table(report, title)
    print_or_write(escape_lines(text), options.out)
    if findings:
        print_diagnostics(PolicyError(findings))
    _warn_if_slower_than_fp8(planned, step)
    _fail_if_wrong(report)


def _compile_config(
    policy: Policy, config: str, execution: ExecutionOptions, options: StepOptions
) -> tuple[CompileReport, TrainingStep]:
    """Compiles the step of a configuration of the bundled Llama. Returns the report and the planned step."""
    from policyc.compiler.planning.plan_checks import check_plan
    from policyc.compiler.schedule import set_step
    from policyc.hardware import deviceless, llama_step

    assert execution.target is not None
    count = options.devices
    sizes, mesh = options.sizes(), options.mesh_shape()
    planned = llama_step.plan_step(policy, config, mesh, sizes, execution)
    check_plan(planned.plan, hint=f"'policyc diff POLICY --config {config}' lists the sites")
    devices = deviceless.make_devices(execution.target, count)
    step, arguments, run = llama_step.jit_step(config, mesh, sizes, devices)
    set_step(0, total=run.steps)
    report = deviceless.compile_step(
        step, arguments, policy, execution, devices=count, microbatches=run.accumulate
    )
    return report, planned


def _compile_program(
    policy: Policy,
    program: tuple[str, ...],
    execution: ExecutionOptions,
    options: StepOptions,
    *,
    may_miss: bool,
) -> tuple[CompileReport, TrainingStep]:
    """Compiles the step of a program, or only its loss if the program differentiates it outside jax.jit.

    With `may_miss`, a rule may match nothing, because it may be about another loss. Returns the report, and the planned
    loss as a step without microbatches.
    """
    from policyc.compiler.planning.plan_checks import check_plan
    from policyc.experiments import runner
    from policyc.hardware import deviceless
    from policyc.hardware.training_step import TrainingStep
    from policyc.jaxcore import versions

    assert execution.target is not None
    count = options.devices
    options.reject_for_program("batch", "sequence", "accumulate", "remat", "gather")
    if options.mesh:
        raise ValueError(
            "--mesh: a program makes its own mesh from jax.devices(); --devices says how many devices it sees"
        )
    deviceless.check_installed()
    if count > 1:
        versions.set_cpu_device_count(count)
    parsed = parse_program(program)
    with explain_early_exit(parsed):
        jitted, plans = runner.trace_first_step(parsed, policy, execution, multiple_losses=may_miss)
    if not plans:
        raise ValueError(
            "the program ended, and no loss that it differentiated in reverse mode (jax.grad, vjp, ...) has a GEMM"
        )
    if jitted is not None:
        return deviceless.compile_jitted(jitted, plans, execution, count), TrainingStep(plan=plans[0])
    if count > 1:
        raise ValueError(
            "the program differentiates its loss outside jax.jit, and such a loss is compiled for one device only: put "
            "the step into jax.jit, or use --devices 1"
        )
    check_plan(plans[0], may_miss=may_miss)
    report = deviceless.compile_loss(plans[0], *deviceless.make_devices(execution.target, 1))
    return report, TrainingStep(plan=plans[0])


# ---- output


def _dump(folder: str, report: CompileReport, title: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        exit_with_message(f"--dump-hlo: cannot create '{folder}': {error.strerror}", EXIT_USAGE)
    name = "".join(
        c if c.isalnum() or c in "-_." else "_" for c in f"{title}_{report.target}x{report.devices}"
    )
    write_output("--dump-hlo", str(Path(folder) / f"{name}.hlo.txt"), report.text)


def _as_json(report: CompileReport, title: str, policy: str, findings: Sequence[Diagnostic]) -> str:
    from policyc.cli.common import paint
    from policyc.linter.output import format_json

    data = {
        "step": title,
        "policy": policy,
        "target": report.target,
        "devices": report.devices,
        "products": [
            {
                "site": product.site,
                "layers": None if product.layers is None else [list(layer) for layer in product.layers],
                "gemm": product.gemm,
                "format": product.format,
                "backend": product.lowering.backend,
                "native": product.lowering.native,
                "call": product.call or None,
                "found": product.calls_found,
                "unproven": product.lowering.doubt or None,
                "reason": product.lowering.obstacle and product.lowering.obstacle.reason,
                "remedy": product.lowering.obstacle and product.lowering.obstacle.remedy,
            }
            for product in report.products
        ],
        "memory": {**report.memory, "needed": report.needed_memory, "device": report.device_memory},
        "collectives": [asdict(total) for total in report.collectives],
        "findings": json.loads(format_json(findings, paint)),
        "kernels": report.kernels,
        "kernel_bytes": report.kernel_bytes,
        "kernel_kinds": [asdict(total) for total in report.kernel_kinds],
        "repeated_gemms": report.repeated_gemms,
        "seconds": dict(report.seconds),
    }
    return json.dumps(data, indent=1) + "\n"


_REPEATED = (
    "  with XLA_FLAGS=--xla_gpu_enable_triton_gemm=false, {} GEMMs would run again, only to save a result that "
    "was already computed; --xla_gpu_enable_dynamic_slice_fusion=false avoids this"
)


def _as_table(report: CompileReport, title: str) -> str:
    from policyc.compiler.tables.plan_tables import align_columns

    rows = [["site", "layers", "product", "format", "runs", "found"]]
    for product in report.products:
        calls = f"{product.calls_found} x {product.call}" if product.call else "-"
        lowering = str(product.lowering)
        rows.append([product.site, _layers(product), product.gemm, product.format, lowering, calls])
    lowerings = [product.lowering for product in report.products]
    reasons = dict.fromkeys(
        f"{way.obstacle.reason}; {way.obstacle.remedy}" for way in lowerings if way.obstacle
    )
    gb = {name: size / 1e9 for name, size in report.memory.items()}
    sizes = ", ".join(f"{name} {gb[name]:.2f}" for name in ("arguments", "outputs", "temporaries", "code"))
    lines = [
        f"{title}, for {report.devices} x {report.target}",
        *align_columns(rows),
        *(f"not native: {reason}" for reason in reasons),
        *(f"unproven: {doubt}" for doubt in dict.fromkeys(way.doubt for way in lowerings if way.doubt)),
        f"memory per device (GB): {sizes}; {gb['shared']:.2f} of the outputs reuse the memory of arguments",
        f"  {report.needed_memory / 1e9:.2f} of {report.device_memory / 1e9:.2f}: {_memory_verdict(report)}",
        *_collectives(report),
        f"{report.kernels} kernels, which read and write {report.kernel_bytes / 1e9:.1f} GB",
        *(f"  {k.count} {k.kind}: {k.bytes / 1e9:.1f} GB" for k in report.kernel_kinds if k.count),
        *([_REPEATED.format(report.repeated_gemms)] if report.repeated_gemms else []),
        ", ".join(f"{name} took {seconds:.0f} s" for name, seconds in report.seconds.items()),
    ]
    return "".join(f"{line}\n" for line in lines)


def _collectives(report: CompileReport) -> Sequence[str]:
    from policyc.compiler.tables.plan_tables import align_columns

    if not report.collectives:
        return ()
    rows = [
        [c.kind, c.type, str(c.count), f"{c.bytes / 1e9:.3f}", ", ".join(c.readers)]
        for c in report.collectives
    ]
    return list(align_columns([["collective", "type", "arrays", "GB", "read by"], *rows]))


def _layers(product: ProductCheck) -> str:
    if product.layers is None:
        return "-"
    first, last = (".".join(map(str, layer)) for layer in product.layers)
    return first if first == last else f"{first}-{last}"


def _memory_verdict(report: CompileReport) -> str:
    from policyc.hardware.compile_report import DEFAULT_MEMORY_FRACTION

    if not report.fits_in_memory:
        return "does not fit"
    if report.memory_fraction <= DEFAULT_MEMORY_FRACTION:
        return "fits"
    return (
        f"fits with XLA_PYTHON_CLIENT_MEM_FRACTION={report.memory_fraction:.2f} or more (JAX's default is "
        f"{DEFAULT_MEMORY_FRACTION})"
    )


def _fail_if_wrong(report: CompileReport) -> None:
    """Exits with an error if a native product is missing, or if the step does not fit into memory."""
    from policyc.base.text import count_others

    missing = report.missing_products
    if missing:
        product = missing[0]
        others = f"{count_others(len(missing))}," if len(missing) > 1 else ""
        exit_with_message(
            f"{product.gemm} of '{product.site}'{others} should be native, but {product.call} occurs "
            f"{product.calls_found} times in the compiled program, not {product.calls_expected}: --dump-hlo DIR shows "
            "what is there instead"
        )
    if not report.fits_in_memory:
        exit_with_message(
            "the step does not fit into the memory of a device: use more devices, a smaller --batch, more "
            "microbatches (--accumulate), or --remat full"
        )


def _find_faults(report: CompileReport) -> list[Diagnostic]:
    """What the lint rules find in the collectives of the step."""
    from policyc.language.loader import LoadedPolicy
    from policyc.language.parser import read_statements
    from policyc.linter.api import lint_loaded

    found: dict[tuple[object, ...], Diagnostic] = {}  # several losses may have one policy
    for plan in report.plans:
        loaded = LoadedPolicy(plan.policy, read_statements(plan.policy.source)[0], ())
        for diagnostic in lint_loaded(loaded, {"bf16-gathered"}, plan, collectives=report.collectives):
            found[diagnostic.sort_key, diagnostic.sites] = diagnostic
    return list(found.values())


def _warn_if_slower_than_fp8(step: TrainingStep, options: StepOptions) -> None:
    """Prints a warning if a 4-bit policy is slower than fp8 according to the cost model."""
    from policyc.hardware.step_cost import ratio_to_fp8
    from policyc.hardware.training_step import count_backends
    from policyc.language.loader import load
    from policyc.numerics.backends import join_titles

    ratio = ratio_to_fp8(step, load("fp8"), options.mesh_shape())
    if ratio > 1:
        backends = join_titles(sorted(count_backends(step.plan)))
        click.echo(
            f"warning: the cost model predicts that the step takes {ratio:.2f} times as long as under fp8, on "
            f"{options.devices} x {options.target} with {backends}: 'policyc estimate --vs fp8' shows why",
            err=True,
        )
