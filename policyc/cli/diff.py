"""`policyc diff`: shows what a policy changes in a program."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_USAGE,
    exit_with_message,
    load_policy,
    use_color,
    write_output,
)
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    backend_option,
    collect_options,
    group_options,
    make_step_options,
    path_option,
    program_argument,
)
from policyc.cli.program import check_order, exit_on_error, fail_if_refused, parse_execution, plan_program

if TYPE_CHECKING:
    from policyc.changes.model import DiffData
    from policyc.compiler.execution import ExecutionOptions
    from policyc.hardware.training_step import TrainingStep
    from policyc.language.policy import Policy

_MIN_WIDTH = 60  # of the text, in columns: names and figures need as much
_STYLES: dict[str, dict[str, Any]] = {
    "nvfp4": {"fg": "bright_red"}, "mxfp4": {"fg": "yellow"}, "mxfp8": {"fg": "blue"}, "fp8": {"fg": "cyan"},
    "fp4": {"fg": "bright_yellow"}, "bf16": {"fg": "white"}, "f32": {"fg": "white", "dim": True},
    "emulated": {"fg": "magenta"}, "added": {"fg": "green"}, "removed": {"fg": "red"}, "header": {"bold": True},
    "rule": {"fg": "cyan"}, "dim": {"dim": True},
}  # fmt: skip


def paint(kind: str, text: str) -> str:
    """Colors text by its kind: a format, or a kind of line. A `Paint` for the text of a diff."""
    return click.style(text, **_STYLES.get(kind, {}))


def is_policy(word: str) -> bool:
    """Does a word name a policy, or a variant of one (`llama.policy:no_rht`)?"""
    from policyc.language.bundled import POLICY_SUFFIX, bundled_policies

    name = split_variant(word)[0]
    return name.endswith(POLICY_SUFFIX) or name in bundled_policies()


def split_variant(word: str) -> tuple[str, str | None]:
    """The name of a policy, and the variant behind its colon."""
    name, colon, variant = word.rpartition(":")
    return (name, variant) if colon and name and not Path(word).exists() else (word, None)


class DiffCommand(ProgramCommand):
    """A command whose program may follow one policy or two."""

    def is_further_argument(self, word: str, arguments: Sequence[str]) -> bool:
        return len(arguments) == 1 and is_policy(word)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What is compared: the values of `compare_options`."""

    unrolled: bool
    backend: str
    grad: bool
    phase: int
    vs: str | None
    stats: str | None
    compiled: str | None


compare_options = collect_options(
    CompareOptions,
    "compare",
    group_options(
        click.option("--unrolled", is_flag=True, help="Unroll the layers of a configuration."),
        backend_option,
        click.option("--grad", is_flag=True, help="Compare gradients, where dgrad and wgrad show."),
        click.option("--phase", metavar="N", type=click.IntRange(0), default=0, show_default=True,
                     help="The phase of the schedule, from 0."),
        path_option("--vs", "PLAN.JSON", "Compare with an earlier plan (apply --plan-out)."),
        path_option("--stats", "RUN", "Add the measured errors of a run: its folder."),
        path_option("--compiled", "FILE", "Add the calls found by 'policyc compile --format json'."),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed and written: the values of `output_options`."""

    stat: bool
    json: bool
    dot: bool
    svg: str | None
    out: str | None
    model_explorer: str | None
    exit_code: bool


output_options = collect_options(
    OutputOptions,
    "output",
    group_options(
        click.option("--stat", is_flag=True, help="Print one line per linear instead of the equations."),
        click.option("--json", is_flag=True, help="Print JSON; docs/diff.md describes it."),
        click.option("--dot", is_flag=True, help="Print the graph in Graphviz's language."),
        path_option("--svg", "FILE", "Write the heat map."),
        path_option("--out", "FILE.html", "Write a page: heat map, classes of layers, equations."),
        path_option("--model-explorer", "DIR", "Write graphs and node data for Google's Model Explorer."),
        click.option("--exit-code", is_flag=True, help="Exit with 1 if something differs."),
    ),
)


@click.command(
    cls=DiffCommand,
    examples="""
    policyc diff llama.policy train.py --steps 100           before against after
    policyc diff llama_nvfp4 fp8 --config llama3_8b          two policies
    policyc diff llama.policy llama.policy:no_rht train.py   a policy and one of its variants
    policyc diff llama.policy --vs plan.json train.py        against an earlier plan
    policyc diff te_nvfp4 --config llama3_405b --svg heat.svg --stat
    """,
)
@make_step_options("gb200")
@compare_options
@output_options
@click.argument("policy", metavar="POLICY [POLICY]")
@program_argument(required=False)
def diff(
    policy: str,
    program: tuple[str, ...],
    step: StepOptions,
    compare: CompareOptions,
    output: OutputOptions,
) -> None:
    """Show what a policy changes in a program.

    With two policies, show what the second does differently. The program runs until its first loss with a GEMM is
    traced, and stops there. Nothing is executed on a device. With --config, the loss of the bundled Llama is traced
    instead. Exits with 1 if 'policyc apply' would refuse a policy.
    """
    words = program
    names = [policy]
    if words and is_policy(words[0]):
        names, words = [policy, words[0]], words[1:]
    check_order(policy, program)
    step.check_source(words)
    policies = [load_policy(*split_variant(name)) for name in names]
    if compare.vs and len(names) > 1:
        raise click.UsageError("--vs compares a plan with one policy: leave out the other")
    if output.stat + output.json + output.dot > 1:
        raise click.UsageError("choose one of --stat, --json and --dot")
    folder = os.getcwd()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is executed, so JAX need not look for a GPU
    from policyc.changes.build import DiffRequest, build_diff
    from policyc.compiler.plan import make_plan

    with exit_on_error():
        execution = parse_execution(compare.backend, step.target)
        traced = _trace(policies[-1], words, step, execution, compare.unrolled)
        request = DiffRequest(
            step=traced,
            before=policies[0] if len(policies) > 1 else None,
            labels=(names[0], names[1]) if len(names) > 1 else ("no policy", names[0]),
            program=step.config or " ".join(words),
            target=execution.target,
            mesh=step.mesh_shape(),
            phase=compare.phase,
            is_gradient=compare.grad,
            earlier_plan=compare.vs,
            folder=folder,
        )
        data = _add_overlays(build_diff(request), compare)
    _write(data, output)
    fail_if_refused(*(make_plan(p, traced.plan.sites, execution) for p in policies))
    if output.exit_code and data.differs:
        sys.exit(EXIT_FAILURE)


def _trace(
    policy: Policy,
    words: tuple[str, ...],
    options: StepOptions,
    execution: ExecutionOptions,
    unrolled: bool,
) -> TrainingStep:
    """The training step of a configuration or of a program, planned for the target."""
    from policyc.hardware import llama_step
    from policyc.hardware.training_step import TrainingStep

    if options.config:
        sizes = dataclasses.replace(options.sizes(), unrolled=unrolled)
        return llama_step.plan_step(policy, options.config, options.mesh_shape(), sizes, execution)
    options.reject_for_program("batch", "sequence", "gather")
    if unrolled:
        raise ValueError("--unrolled is for --config: a program has its own layers")
    plan = plan_program(policy, words, execution)
    return TrainingStep(plan=plan, accumulate=options.accumulate or 1, remat=options.remat or "none")


def _add_overlays(data: DiffData, compare: CompareOptions) -> DiffData:
    """The diff with the measurements of a run, and the calls of a compiled step, if the options name them."""
    from policyc.changes.overlays import read_compiled, read_stats

    overlays: dict[str, Any] = {}
    if compare.stats:
        overlays["stats"] = read_stats(Path(compare.stats), data)
    if compare.compiled:
        overlays["compiled"] = read_compiled(Path(compare.compiled), data)
    return dataclasses.replace(data, overlays=overlays)


def _write(data: DiffData, output: OutputOptions) -> None:
    """Writes the files that are asked for, and prints what is asked for, or else the text."""
    from policyc.changes.data import as_json
    from policyc.changes.dot import as_dot
    from policyc.changes.model_explorer import write_model_explorer
    from policyc.changes.page import render_page
    from policyc.changes.svg import draw_heat_map
    from policyc.changes.terminal import render, render_stat

    if output.out:
        write_output("--out", output.out, render_page(data))
    if output.svg:
        write_output("--svg", output.svg, draw_heat_map(data))
    if output.model_explorer:
        try:
            write_model_explorer(data, Path(output.model_explorer))
        except OSError as error:
            exit_with_message(
                f"--model-explorer: '{output.model_explorer}' cannot be written: {error.strerror}", EXIT_USAGE
            )
    if output.json:
        click.echo(as_json(data), nl=False)
    elif output.dot:
        click.echo(as_dot(data), nl=False)
    elif "-" not in (output.svg, output.out):
        width = max(_MIN_WIDTH, shutil.get_terminal_size().columns)  # 80 if the output is no terminal
        text = render_stat(data, paint, width) if output.stat else render(data, paint, width)
        click.echo(text, nl=False, color=use_color())
