"""`policyc diff`: shows what a policy changes in a program."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_FAILURE,
    load_policy,
    load_unless_recommended,
    paint,
    print_or_write,
)
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    check_source,
    collect_options,
    format_option,
    number,
    option,
    option_class,
    path_option,
    policy_argument,
    priced_backend_option,
    program_argument,
    step_options,
    switch,
)
from policyc.cli.program import check_order, exit_on_error, fail_if_refused, parse_execution, trace_step
from policyc.language.bundled import RECOMMENDED

if TYPE_CHECKING:
    from policyc.changes.model import DiffData
    from policyc.language.policy import Policy

_MIN_WIDTH = 60  # of the text, in columns: names and figures need that many


@option_class
class CompareOptions:
    """What is compared."""

    backend: str = priced_backend_option
    phase: int = number("The phase of the schedule, from 0.", least=0, default=0)
    vs: str | None = option(
        metavar="POLICY[:VARIANT]|PLAN.json|RUN",
        help="Compare with this policy, or with the policy of an earlier plan (apply --plan-out) or run.",
    )
    stats: str | None = path_option(
        metavar="RUN", help="Add the errors that the run in this folder measured (--stats-every)."
    )


@option_class
class OutputOptions:
    """What is printed or written."""

    output_format: str = format_option(
        "text",
        "html",
        "svg",
        "json",
        help="One line per change, a page, the heat map, or JSON.",
    )
    out: str | None = path_option(metavar="FILE", help="Write to this file.")
    equations: bool = switch("In the text, also show the equations that change.")
    exit_code: bool = switch("Exit with 1 if something differs.")


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc diff llama.policy train.py --steps 100                what the policy changes, one line per site
    policyc diff llama.policy --out diff.html train.py            a page: heat map, layers, equations
    policyc diff llama_nvfp4 --vs fp8 --config llama3_8b          what llama_nvfp4 does that fp8 does not
    policyc diff llama.policy:no_rht --vs llama.policy train.py   a variant against its policy
    policyc diff llama.policy --vs plan.json train.py             against an earlier plan
    policyc diff llama.policy --vs runs/a --config tiny           against the policy of a run
    """,
)
@step_options
@collect_options(CompareOptions, "compare")
@collect_options(OutputOptions, "output")
@policy_argument()
@program_argument(required=False)
def diff(
    policy: str,
    program: tuple[str, ...],
    step: StepOptions,
    compare: CompareOptions,
    output: OutputOptions,
) -> None:
    """Show what a policy changes in a program.

    With --vs, show what it does that the other policy does not. The program runs until its first loss with a GEMM is
    traced, and stops there. Nothing is executed on a device. With --config, the loss of the bundled Llama is traced
    instead. Exits with 1 if 'policyc apply' would refuse a policy.
    """
    check_order(policy, program)
    check_source(program, step.config)
    if compare.stats and output.output_format not in ("html", "json"):
        raise click.UsageError("--stats is for a page or JSON: add --out diff.html")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is executed, so JAX need not look for a GPU
    before, earlier_loss = _load_before(compare.vs)
    roots = (os.getcwd(), *(os.path.dirname(os.path.abspath(word)) for word in program[:1]), *sys.path)
    from policyc.changes.build import build_diff
    from policyc.changes.model import shorten_path
    from policyc.changes.overlays import read_stats
    from policyc.compiler.planning.plan import make_plan
    from policyc.numerics.targets import get_target

    with exit_on_error():
        execution = parse_execution(compare.backend, step.target)
        traced = trace_step(load_unless_recommended(policy), program, step, execution)
        loaded = traced.plan.policy
        with stage("comparing the equations"):
            data = build_diff(
                traced,
                before=before,
                labels=(
                    compare.vs or "no policy",
                    f"{policy} ({loaded.name})" if policy == RECOMMENDED else policy,
                ),
                program=step.config or " ".join(shorten_path(word, roots) for word in program),
                target=get_target(step.target),
                mesh=step.mesh_shape(),
                phase=compare.phase,
                roots=roots,
            )
        if earlier_loss not in (None, traced.plan.sites.hash):
            note = f"the program has changed since {compare.vs} was written: only the policy of that plan is used"
            data = dataclasses.replace(data, notes=(*data.notes, note))
        if compare.stats:
            data = dataclasses.replace(data, overlays={"stats": read_stats(Path(compare.stats), data)})
    print_or_write(_render(data, output), output.out)
    policies = [policy for policy in (before, loaded) if policy is not None]
    fail_if_refused(*(make_plan(policy, traced.plan.sites, execution) for policy in policies))
    if output.exit_code and data.differs:
        sys.exit(EXIT_FAILURE)


def _load_before(name: str | None) -> tuple[Policy | None, str | None]:
    """Loads the policy that `--vs` names, or that of a plan or run. For those, also returns the hash of the loss."""
    if name is None:
        return None, None
    plan = Path(name) / "plan.json"
    if not (name.endswith(".json") or plan.exists()):
        return load_policy(name), None
    from policyc.compiler.tables.plan_json import read_plan

    with exit_on_error():
        return read_plan(plan if plan.exists() else Path(name))


def _render(data: DiffData, output: OutputOptions) -> str:
    if output.output_format != "text":
        from policyc.changes.api import FILE_WRITERS

        return FILE_WRITERS[f".{output.output_format}"](data)
    from policyc.changes.terminal import render

    data = dataclasses.replace(data, refused=())  # they are printed as errors
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns)  # 80 unless the output is a terminal
    return render(data, paint, width, equations=output.equations)
