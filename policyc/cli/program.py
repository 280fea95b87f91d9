"""For commands with a user's program: traces its plan, or runs it under a policy and reports the outcome."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from policyc.base.progress import stage
from policyc.base.text import count_noun
from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_USAGE,
    exit_with_diagnostics,
    exit_with_message,
    is_policy,
    load_jax,
    load_unless_recommended,
    print_diagnostics,
    print_note,
    usage_errors,
    write_output,
)
from policyc.cli.options import DEFAULT_TARGET, ProgramCommand, StepOptions, check_source

if TYPE_CHECKING:
    from policyc.cli.options import RunOptions
    from policyc.compiler.matching.execution import ExecutionOptions
    from policyc.compiler.pipeline import PlannedLoss
    from policyc.compiler.planning.plan import Plan
    from policyc.compiler.session import Session
    from policyc.experiments.live_telemetry import LiveTelemetry
    from policyc.experiments.program import Program
    from policyc.hardware.mesh import MeshShape
    from policyc.hardware.training_step import TrainingStep
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.policy import Policy

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # of JAX
_LEAST_SECONDS = 1  # of a compilation that is worth a line: others are of single operations

_TELEMETRY_EVERY = 100  # evaluations of a loss, unless --stats-every says otherwise

_PLACEHOLDER = re.compile(r"\{(seed|steps|out|variant)\}")  # of a sweep


def parse_program(words: Sequence[str]) -> Program:
    """Parses the program at the end of a command line. Raises a usage error if there is no such program.

    Prints a note if an argument of the program is an option of this command, which belongs before the program.
    """
    from policyc.experiments.program import BadProgram, Program

    with usage_errors(BadProgram):
        program = Program.from_words(words)
        program.check()
    if hint := misplaced_hint(program.args):
        print_note(hint)
    return program


def misplaced_hint(words: Sequence[str]) -> str:
    """A hint about options of this command that come after the program, and so are passed to it; empty if none do.

    An option whose value has a placeholder, such as `--out {out}`, is certainly meant for the program.
    """
    context = click.get_current_context(silent=True)
    if context is None or not isinstance(context.command, ProgramCommand):
        return ""  # its command line does not end with a program
    options = {name for o in context.command.params if isinstance(o, click.Option) for name in o.opts}
    names: dict[str, None] = {}
    for word, next_word in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name in options and not _PLACEHOLDER.search(value if equals else next_word):
            names[name] = None
    if not names:
        return ""
    verb, pronoun = ("comes", "it") if len(names) == 1 else ("come", "them")
    return (
        f"{' and '.join(map(repr, names))} {verb} after the program, so the program gets {pronoun}; options of policyc "
        "come before the program"
    )


def program_name(words: Sequence[str]) -> str:
    """The script, module or code that the words of a program name, without its arguments."""
    return words[1] if words[0] in ("-m", "-c") and len(words) > 1 else words[0]


def check_order(policy_name: str, words: Sequence[str]) -> None:
    """Raises a usage error if the policy and the program are swapped."""
    is_script = policy_name.endswith((".py", ".pyc"))
    if is_script and words and is_policy(words[0]):
        raise click.UsageError(
            f"'{policy_name}' is a program and '{words[0]}' a policy: the policy comes first, then the program"
        )
    if is_script:
        raise click.UsageError(f"'{policy_name}' is a program: the policy comes first, then the program")
    if words and is_policy(words[0]):
        raise click.UsageError(
            f"'{words[0]}' is a policy: 'diff' and 'estimate' compare two with --vs {words[0]}"
        )


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turns an error of a policy, a program or an option into a message and an exit code."""
    from policyc.experiments.program import BadProgram
    from policyc.language.diagnostics import PolicyError

    try:
        yield
    except PolicyError as error:
        exit_with_diagnostics(error)
    except BadProgram as error:
        exit_with_message(str(error), EXIT_USAGE)
    except ValueError as error:
        exit_with_message(str(error), getattr(error, "exit_code", EXIT_FAILURE))


_TRAIN_HINT = "give it the arguments that it trains with, and check that it trains without policyc"


@contextlib.contextmanager
def explain_early_exit(program: Program) -> Iterator[None]:
    """Explains why there is no result if a program exits before it differentiates a loss. Keeps its exit code."""
    try:
        yield
    except SystemExit as end:
        if not end.code:
            raise  # the program has printed its help, and the runner a note
        hint = "; ".join(filter(None, (_TRAIN_HINT, misplaced_hint(program.args))))
        code = _print_exit_text(end)
        print_note(f"the program exited with {code} before it differentiated a loss: {hint}", "error")
        raise SystemExit(code) from None


def _print_exit_text(end: SystemExit) -> int | None:
    """Prints the text that a program exits with, if any. Returns its exit code.

    Python would print such a text only when the process ends, after the messages that follow here.
    """
    if isinstance(end.code, str):
        click.echo(end.code, err=True)
        return 1
    return end.code


def parse_execution(
    backend: str, target: str | None = None, *, require_native: bool = False
) -> ExecutionOptions:
    """Parses how quantized products run. Raises a usage error if there is no such backend or target."""
    from policyc.compiler.matching.execution import execution_options

    with usage_errors():
        return execution_options(backend, target, require_native=require_native)


def plan_program(policy: Policy, words: Sequence[str], execution: ExecutionOptions | None = None) -> Plan:
    """Plans the first loss of a program, without checking the plan. Exits if the program has no loss with a GEMM."""
    program = parse_program(words)
    load_jax()
    from policyc.experiments import runner

    try:
        running = stage("running the program until its first loss", prints=True)
        with exit_on_error(), explain_early_exit(program), running:
            plan = runner.trace_first_plan(program, policy, execution)
    except runner.NoLoss as error:
        exit_with_message(f"the program ended, but it {explain_no_loss(error.saw_forward_mode)}")
    if not len(plan.sites):
        exit_with_message("no loss of the program has a GEMM")
    return plan


def trace_step(
    policy: Policy | None,
    words: Sequence[str],
    step: StepOptions,
    execution: ExecutionOptions,
) -> TrainingStep:
    """Plans the step of a configuration or of a program. Raises ValueError if the options do not fit it.

    None is the recommended policy, which is printed with the reasons.
    """
    load_jax()
    from policyc.hardware import llama_step
    from policyc.language.policy import Policy

    if step.config:
        sizes = step.sizes()
        with stage(f"planning {step.config}"):
            traced = llama_step.plan_step(
                policy or Policy(), step.config, step.mesh_shape(), sizes, execution
            )
    else:
        step.reject_for_program("batch", "sequence", "gather")
        traced = step.of_program(plan_program(policy or Policy(), words, execution))
    if policy is not None:
        return traced
    from policyc.experiments.recommend import recommend_for

    with stage("predicting policies"):
        recommendation = recommend_for(
            traced, step.target, step.mesh_shape(), sets_steps=bool(step.config) or None
        )
    click.echo(f"policyc: {recommendation}", err=True)
    return traced.under(recommendation.policy)


def trace_modelled_step(
    policy: Policy | None,
    program: tuple[str, ...],
    mesh: MeshShape,
    step: StepOptions,
    execution: ExecutionOptions,
) -> TrainingStep:
    """Plans a step for the cost model, and prints what that leaves out. Raises ValueError if it cannot be priced."""
    from policyc.compiler.tables.plan_tables import other_products, uncertain_repeats
    from policyc.hardware.mesh import check_modelled

    check_modelled(mesh)
    if not step.config and mesh.tensor * mesh.context > 1:
        raise ValueError(
            f"a program can use the axes data and fsdp only, not {mesh}: the traffic of other axes is not known"
        )
    traced = trace_step(policy, program, step, execution)
    if step.config:
        return traced
    for line in uncertain_repeats(traced.plan):
        click.echo(f"note: {line}", err=True)
    for line in other_products(traced.plan):
        click.echo(f"note: not in the estimate: {line}", err=True)
    rows = max(site.batch * site.m for site in traced.plan.sites)
    if rows < mesh.batch_shards:
        raise ValueError(
            f"{mesh.batch_shards} devices are too many for the {rows} rows of the largest site: use at most "
            f"--devices {rows}"
        )
    return traced


def fail_if_refused(*plans: Plan) -> None:
    """Prints what `apply` would say about plans that are only shown, and exits if it would refuse one of them."""
    from policyc.compiler.planning.plan_checks import check_plan
    from policyc.language.diagnostics import PolicyError

    diagnostics: list[Diagnostic] = []
    for plan in plans:
        try:
            diagnostics += check_plan(plan)
        except PolicyError as error:
            diagnostics += error.diagnostics
    if diagnostics:
        print_diagnostics(PolicyError(diagnostics))
    if any(d.severity == "error" for d in diagnostics):
        sys.exit(EXIT_FAILURE)


def plan_source(
    policy: Policy | None, words: Sequence[str], config: str | None, target: str = DEFAULT_TARGET
) -> Plan:
    """Plans the loss of a program, or of a configuration of the bundled Llama.

    None is the recommended policy for the target.
    """
    check_source(words, config)
    with exit_on_error():
        return trace_step(
            policy, words, StepOptions(config=config, target=target), parse_execution("auto")
        ).plan


def run_under_policy(program: Program, policy_name: str, options: RunOptions) -> None:
    """Runs a program under a policy, and prints what the policy did. Exits if the policy was not applied."""
    from policyc.language.diagnostics import PolicyError
    from policyc.language.policy import Policy

    chosen = load_unless_recommended(policy_name)
    policy = chosen or Policy()
    if options.rounding_seed is not None:
        policy = policy.with_seed(options.rounding_seed)
    is_idle = chosen is not None and policy.changes_nothing and options.plan_out is None
    if options.compile_cache is not None or chosen is None or not policy.changes_nothing:
        from policyc.base.compile_cache import use_compile_cache

        use_compile_cache(options.compile_cache)
    from policyc.experiments import runner

    execution = parse_execution(options.backend, require_native=options.require_native)
    printer = _PlanPrinter(options)
    choose = runner.PolicyChooser(quiet=options.quiet, seed=options.rounding_seed)
    if is_idle:
        _print_unless_quiet(
            options,
            "this policy keeps every site: the program runs as it does without policyc, and is not planned",
        )
    with exit_on_error(), printer.listening(), _LazyTelemetry(options) as telemetry:
        result = runner.run(
            program,
            policy,
            execution,
            printer,
            multiple_losses=options.multiple_losses,
            stats_every=0 if options.telemetry else options.stats_every,
            compile=telemetry.compile if options.telemetry else None,
            plans_always=not is_idle,
            choose=choose if chosen is None else None,
        )
    session = result.session
    if is_idle:
        _write_report_of(session, options)
        return
    if session is None or not session.plans:
        if not result.children:
            reason = explain_no_loss(result.saw_forward_mode)
            exit_with_message(f"'{policy_name}' was not applied: the program {reason}")
        _print_unless_quiet(
            options,
            "this process differentiated nothing in reverse mode; the processes it started ran under the policy",
        )
        return
    if not session.matched:
        exit_with_message(_explain_no_match(session.plans, policy_name))
    if session.unmet:
        exit_with_diagnostics(PolicyError(session.unmet))
    if options.stats_every and not session.recorders and not options.telemetry:
        print_note(
            "--stats-every measured nothing: the program did not call policyc.observe at any of these steps"
        )
    _write_report_of(session, options)


class _LazyTelemetry(contextlib.ExitStack):
    """The telemetry of a run, which starts with the first loss: JAX must not be imported before that."""

    def __init__(self, options: RunOptions) -> None:
        super().__init__()
        self._options = options
        self._live: LiveTelemetry | None = None
        if options.telemetry and (extra := _missing_extra(options.telemetry)):
            exit_with_message(f"--telemetry needs a package: pip install 'policyc[{extra}]'", EXIT_USAGE)

    def compile(self, planned: PlannedLoss) -> Callable[..., Any]:
        from policyc.experiments.live_telemetry import LiveTelemetry

        if self._live is None:
            where = self._options.telemetry or ""
            self._live = LiveTelemetry(where, self._options.stats_every or _TELEMETRY_EVERY)
            self.callback(self._print_count, self._live, where)
            self.enter_context(self._live)
        return self._live.compile(planned)

    def _print_count(self, live: LiveTelemetry, where: str) -> None:
        text = f"{count_noun(live.measured, 'evaluation')} measured, in {where}"
        _print_unless_quiet(self._options, text, "telemetry")


def _missing_extra(where: str) -> str:
    """The extra that must be installed to report to a place; empty if nothing is missing."""
    package, extra = ("wandb", "wandb") if where == "wandb" else ("tensorboardX", "train")
    return "" if find_spec(package) else extra


def _print_unless_quiet(options: RunOptions, text: str, label: str = "note") -> None:
    if not options.quiet:
        print_note(text, label)


class _PlanPrinter:
    """Prints the plan of every loss with a GEMM. Writes to `--plan-out` the plan that matches the most sites."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.most_matches: int | None = None
        self.losses = 0
        self.is_listening = False
        self.is_compiling = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Stops listening to JAX at the end. It starts with the first plan: JAX must not be imported before that."""
        try:
            yield
        finally:
            if self.is_listening:
                import jax.monitoring

                jax.monitoring.unregister_event_duration_listener(self.listen)

    def listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Prints how long XLA took to compile a program after a plan."""
        if event == _COMPILE_EVENT and self.is_compiling and duration_secs > _LEAST_SECONDS:
            self.is_compiling = False
            click.echo(f"policyc: compiled in {duration_secs:.1f} s", err=True)

    def _print_seconds(self, plan: Plan) -> None:
        import jax.monitoring

        traced, planned = plan.seconds
        click.echo(f"policyc: traced in {traced:.1f} s, planned in {planned:.1f} s", err=True)
        self.is_compiling = True
        if not self.is_listening:
            jax.monitoring.register_event_duration_secs_listener(self.listen)
            self.is_listening = True

    def __call__(self, plan: Plan) -> None:
        from policyc.compiler.tables.plan_json import as_json
        from policyc.compiler.tables.plan_tables import summary
        from policyc.experiments.runner import is_first_process

        if not len(plan.sites):
            return
        matches = sum(plan.counts)
        self.losses += 1
        if is_first_process():
            title = f"policyc: loss {self.losses}:\n" if self.losses > 1 else ""
            if not self.options.quiet:
                click.echo(title + summary(plan), err=True, nl=False)
                self._print_seconds(plan)
            if self.losses == 1:
                self._print_warnings(plan)
                _print_unless_quiet(
                    self.options,
                    "only what is differentiated runs under the policy: evaluation outside jax.grad is not quantized",
                )
        if self.most_matches is None or matches > self.most_matches:
            self.most_matches = matches
            if self.options.plan_out is not None:
                write_output("--plan-out", self.options.plan_out, as_json(plan))

    def _print_warnings(self, plan: Plan) -> None:
        """Prints warnings about rules that do nothing in the first loss. The session reports those that are errors."""
        from policyc.compiler.planning.idle_rules import idle_rules
        from policyc.language.diagnostics import PolicyError

        idle = () if self.options.multiple_losses else [d for d in idle_rules(plan) if d.severity != "error"]
        if idle:
            print_diagnostics(PolicyError(idle))


def _write_report_of(session: Session | None, options: RunOptions) -> None:
    """Writes the report of a run, if the program named its output folder. A run that recorded nothing has no report."""
    from policyc.experiments.runner import is_first_process

    if session is None or session.output_dir is None or not is_first_process():
        return
    folder = session.output_dir
    from policyc.experiments.report.build import build_report
    from policyc.experiments.report.page import write_report
    from policyc.experiments.report.sweeps import ReportError

    try:
        _print_unless_quiet(options, str(write_report(build_report([folder]))), "report")
    except ReportError as error:
        _print_unless_quiet(options, str(error), "no report")


def explain_no_loss(saw_forward_mode: bool) -> str:
    """Completes the sentence "the program ..." for a program that differentiated nothing in reverse mode."""
    if saw_forward_mode:
        return (
            "took derivatives in forward mode only (jax.jvp, jacfwd): policyc only rewrites what is differentiated "
            "in reverse mode (jax.grad, vjp, ...)"
        )
    return f"differentiated nothing (jax.grad, vjp, ...): {_TRAIN_HINT}"


def _explain_no_match(plans: Sequence[Plan], policy_name: str) -> str:
    """Explains why a policy matched nothing in any loss of a run."""
    from policyc.compiler.planning.idle_rules import all_names, suggest_names
    from policyc.compiler.tables.plan_tables import other_products

    plan = next((plan for plan in plans if len(plan.sites)), None)
    if plan is None:
        lines = [f"'{policy_name}' was not applied: no loss of the program has a GEMM"]
        lines += dict.fromkeys(line for plan in plans for line in other_products(plan))
        return "; ".join(lines)
    if not plan.policy.rules:
        return f"'{policy_name}' has no rules"
    help = suggest_names(plan, plan.policy.rules[-1], all_names(plan))
    return f"'{policy_name}' matched none of the {len(plan.sites)} sites: {help}"
