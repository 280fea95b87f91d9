"""The options of `policyc sweep`, and the code that runs a sweep or prints a dry run.

Import slow modules inside functions: `--help` loads this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_USAGE,
    exit_with_diagnostics,
    exit_with_message,
    print_note,
    usage_errors,
)
from policyc.cli.options import (
    ProgramCommand,
    backend_option,
    compile_cache_option,
    multiple_losses_option,
    number,
    option,
    option_class,
    require_native_option,
    switch,
)
from policyc.cli.program import misplaced_hint, parse_program, program_name
from policyc.cli.sweep_output import print_dry_run, print_omitted, write_page

if TYPE_CHECKING:
    from policyc.experiments.sweep.commands import SweepProgram
    from policyc.experiments.sweep.local import Executor
    from policyc.experiments.sweep.manifest import SweepDesign
    from policyc.experiments.sweep.progress import SweepResult, TrackedRun
    from policyc.experiments.sweep.slurm import SlurmOptions
    from policyc.experiments.sweep.variants import SweepVariant

EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
_DEFAULT_BASELINES = ("bf16", "fp8")


class SweepCommand(ProgramCommand):
    """With `--config`, options that the sweep does not know belong to the bundled trainer."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, _ = self._split(ctx, args)
        if not any(word.partition("=")[0] == "--config" for word in options):
            return super().parse_args(ctx, args)
        ctx.ignore_unknown_options = True  # they belong to the trainer, which checks them
        return click.Command.parse_args(self, ctx, args)


def _parse_slurm(
    _ctx: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> SlurmOptions | None:
    if not texts:
        return None
    from policyc.experiments.sweep.slurm import parse_slurm_options

    with usage_errors():
        return parse_slurm_options(texts)


@option_class
class SweepOptions:
    """How a sweep runs."""

    vs: str | None = option(
        metavar="A,B",
        show_default="bf16, and fp8 if it fits the program",
        help="Policies to compare with, by name or path; 'none' for none.",
    )
    seeds: int = number("Number of seeds. All variants use the same seeds.", default=5)
    first_seed: int = number("The first seed; the others follow it.", least=0, default=0)
    steps: int | None = number(
        "Steps of a run. A run that ends earlier counts as failed.", show_default="from the configuration"
    )
    folder: str | None = option(
        metavar="DIR",
        type=click.Path(file_okay=False),
        show_default="sweeps/POLICY",
        help="Folder of the sweep.",
    )
    margin: str = option(
        default="0.5%",
        metavar="NATS|%",
        help="Largest difference of loss that counts as parity, fixed before the sweep runs.",
    )
    jobs: int | None = number(
        "Runs at a time. If there are more runs than GPUs, they share the GPUs.",
        show_default="one per GPU; 1 without GPUs; 100 with --slurm",
    )
    gpus_per_run: int = number("GPUs of this machine that each run gets.", default=1)
    slurm: SlurmOptions | None = option(
        multiple=True,
        metavar="NAME=VALUE,...",
        callback=_parse_slurm,
        help="Submit each run as a Slurm job with these resources, such as 'partition=long,gpus=8,nodes=16,time=1440' "
        "(time in minutes).",
    )
    metrics: str | None = option(
        metavar="KIND=PATH",
        help="Read the metrics of a trainer that does not write metrics.jsonl: 'maxtext={out}/metrics.txt'.",
    )
    no_plan: bool = switch(
        "Do not trace the program before anything runs. By default it is traced once: policies that do not "
        "fit it are errors, and of several edits with the same effect only one is run."
    )
    dry_run: bool = switch("Print the runs and the edits as diffs. Start nothing.")
    stats_every: int = number(
        "Measure the error of quantization every N steps. 0: never.", least=0, default=0
    )
    backend: str = backend_option
    require_native: bool = require_native_option
    multiple_losses: bool = multiple_losses_option
    compile_cache: str | None = compile_cache_option


def split_names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run_sweep(
    policies: Sequence[SweepVariant],
    edits: Sequence[SweepVariant],
    program: Sequence[str],
    config: str | None,
    options: SweepOptions,
    out: Path,
) -> None:
    """Runs a sweep to its end, or prints what it would run. Exits unless all runs finished."""
    from policyc.experiments.sweep.commands import make_runs
    from policyc.experiments.sweep.locks import FolderBusy, hold_lock
    from policyc.experiments.sweep.manifest import ChangedSweep, check_sweep, open_sweep
    from policyc.experiments.sweep.progress import track_runs

    out = out.absolute()
    design = _design_sweep(policies, edits, _make_program(program, config, options), options, out)
    names = [variant.name for variant in design.policies.variants]
    runs = make_runs(design.program, names, design.seeds, out, options.compile_cache)
    print_omitted(design.policies)
    try:
        if options.dry_run:
            for note in check_sweep(out, design)[1]:
                print_note(note)
            print_dry_run(design, track_runs(runs))
            return
        executor = _make_executor(options, out)
        out.mkdir(parents=True, exist_ok=True)
        with hold_lock(out, "sweep", lambda text: print_note(text, "warning")):
            for note in open_sweep(out, design):
                print_note(note)
            # Under the lock: no other sweep changes the states of the runs.
            result = _run(design, track_runs(runs), executor)
    except (ChangedSweep, FolderBusy, ValueError) as error:
        exit_with_message(str(error), EXIT_USAGE)
    except OSError as error:
        full = "; the same command continues the sweep when there is space" if error.errno == ENOSPC else ""
        exit_with_message(f"{out}: {error}{full}", EXIT_USAGE)
    _finish(result, out)


def _make_program(words: Sequence[str], config: str | None, options: SweepOptions) -> SweepProgram:
    """The program that is swept. Raises a usage error if the sweep cannot run it."""
    from policyc.experiments.sweep.commands import SweepProgram
    from policyc.experiments.sweep.slurm import check_program

    if config is None and words[:1] == ("-",):
        raise click.UsageError(
            "a sweep starts its program once for each run: give it a file, not standard input"
        )
    if config is None and "--dry-run" in parse_program(words).args:
        raise click.UsageError(
            f"'--dry-run' comes after the program, so the sweep would start: write it before {program_name(words)}"
        )
    program = SweepProgram(
        words=tuple(words),
        config=config,
        steps=options.steps,
        backend=options.backend,
        require_native=options.require_native,
        multiple_losses=options.multiple_losses,
        stats_every=options.stats_every,
        metrics_source=options.metrics,
    )
    with usage_errors():
        program.check()
        if options.slurm:
            check_program(options.slurm, config, words)
            if options.gpus_per_run > 1:
                raise click.UsageError("--gpus-per-run is for this machine: with --slurm, give gpus=N")
    return program


def _design_sweep(
    policies: Sequence[SweepVariant],
    edits: Sequence[SweepVariant],
    program: SweepProgram,
    options: SweepOptions,
    out: Path,
) -> SweepDesign:
    """Chooses the policies to run. Of policies that do the same, only one runs. Exits if one cannot be used."""
    from policyc.experiments.statistics import parse_margin
    from policyc.experiments.sweep.manifest import ChangedSweep, SweepDesign, reuse_plans
    from policyc.experiments.sweep.planning import PlanningFailed, plan_policies
    from policyc.experiments.sweep.variants import collect_variants, drop_equal_plans, load_baseline
    from policyc.language.diagnostics import PolicyError

    names = _baseline_names(options)
    optional = _DEFAULT_BASELINES[1:] if options.vs is None else ()
    seeds = tuple(range(options.first_seed, options.first_seed + options.seeds))
    try:
        parse_margin(options.margin)
        baselines = [load_baseline(name) for name in names]
        listed = collect_variants(baselines, policies, edits)
        earlier = reuse_plans(out, program, listed)
        if earlier is not None:
            listed = earlier
        elif not options.no_plan and not _has_several_processes(options):
            click.echo("planning the policies for the program, up to its first loss ...", err=True)
            with stage(f"planning {len(listed.variants)} policies"):
                planned = plan_policies(program, seeds[0], {v.name: v.policy for v in listed.variants})
            for variant in listed.variants:
                if variant.role == "policy" and planned[variant.name].warnings:
                    click.echo(planned[variant.name].warnings, err=True)
            listed = drop_equal_plans(listed, planned, optional)
    except PolicyError as error:
        exit_with_diagnostics(error)
    except ChangedSweep as error:
        exit_with_message(str(error), EXIT_USAGE)
    except PlanningFailed as error:
        hint = misplaced_hint(program.words)
        exit_with_message(f"{error}\n  {hint}" if hint else str(error))
    except OSError as error:
        exit_with_message(f"{out}: {error}", EXIT_USAGE)
    except ValueError as error:
        exit_with_message(str(error))
    except KeyboardInterrupt:
        click.echo("stopped: no run was started", err=True)
        sys.exit(EXIT_INTERRUPTED)
    return SweepDesign(program=program, policies=listed, seeds=seeds, margin=options.margin)


def _baseline_names(options: SweepOptions) -> tuple[str, ...]:
    if options.vs is None:
        return _DEFAULT_BASELINES
    return () if options.vs == "none" else split_names(options.vs)


def _has_several_processes(options: SweepOptions) -> bool:
    """Whether a run has several processes. One process alone cannot be traced: it would wait for the others."""
    if options.slurm is None or options.slurm.processes == 1:
        return False
    print_note(f"a run has {options.slurm.processes} processes, so it is not traced before it runs")
    return True


def _make_executor(options: SweepOptions, out: Path) -> Executor:
    """Makes the executor of the runs, for Slurm or this machine. Raises ValueError or OSError."""
    if options.slurm:
        from policyc.experiments.sweep.slurm import SlurmExecutor

        return SlurmExecutor(out, options.slurm, options.jobs)
    from policyc.experiments.sweep.local import LocalExecutor, find_gpus, group_gpus

    groups = group_gpus(find_gpus(), options.gpus_per_run)
    return LocalExecutor(out, options.jobs or max(1, len(groups)), groups)


def _run(design: SweepDesign, tracked: Sequence[TrackedRun], executor: Executor) -> SweepResult:
    """Runs everything. Shows a live table in a terminal, and prints lines otherwise."""
    from rich.console import Console

    from policyc.experiments.sweep.engine import Engine
    from policyc.experiments.sweep.live import SweepDisplay

    with SweepDisplay(Console(highlight=False, markup=False), tracked, design.policies.baselines) as display:
        result = Engine(tracked, executor, display).run()
    display.print_result(result)
    return result


def _finish(result: SweepResult, out: Path) -> None:
    """Writes the page of a sweep that ended. Exits unless all runs finished."""
    if result.stopped == "interrupted":
        click.echo(f"stopped: the same command continues the sweep in {out}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    if result.stopped:
        click.echo("stopped: several runs in a row failed before their first step", err=True)
    write_page(out)
    if result.failed or result.unfinished:
        click.echo("the same command runs failed runs again, except those that diverged", err=True)
        sys.exit(EXIT_FAILURE)
