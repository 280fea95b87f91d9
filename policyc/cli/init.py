"""`policyc init`: writes a first policy for a program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import (
    EXIT_USAGE,
    exit_with_message,
    is_policy,
    load_unless_recommended,
    print_diagnostics,
    print_or_write,
)
from policyc.cli.options import (
    DEFAULT_TARGET,
    ProgramCommand,
    config_option,
    option,
    out_option,
    program_argument,
)
from policyc.cli.program import plan_source, program_name
from policyc.language.bundled import RECOMMENDED

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.loader import LoadedPolicy


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc init train.py --steps 1                     print a first policy for this program
    policyc init --out my.policy train.py               write it to a file that does not exist yet
    policyc init --target h200 train.py                 for another GPU
    policyc init --like te_nvfp4 --config llama3_8b     with the rules of another policy, for the bundled Llama
    """,
)
@click.option(
    "--like",
    metavar="POLICY[:VARIANT]",
    default=RECOMMENDED,
    show_default=True,
    help="Take the rules of this policy that decide about sites of the program. 'recommended' is the bundled policy "
    "that reaches a loss soonest.",
)
@config_option
@option("--target", metavar="GPU", default=DEFAULT_TARGET, help="The GPU for which a policy is recommended.")
@out_option("Write to this file, which must not exist, instead of standard output.", ("policy",))
@program_argument(required=False)
def init(like: str, config: str | None, target: str, out: str | None, program: tuple[str, ...]) -> None:
    """Write a first policy for a program, from its real sites.

    Each rule has the number of sites that it must match ('expect') and a comment on what it decides. The program runs
    until its first loss with a GEMM is traced.
    """
    from policyc.compiler.planning.first_policy import NoRuleFits, write_first_policy
    from policyc.language.diagnostics import PolicyError

    if program and is_policy(program[0]):
        raise click.UsageError(f"'{program[0]}' is a policy: name it with --like {program[0]}")
    if out is not None and out != "-" and os.path.exists(out):
        raise click.UsageError(f"--out: '{out}' exists: remove it, or choose another name")
    plan = plan_source(load_unless_recommended(like), program, config, target)
    title = f"the bundled Llama {config}" if config is not None else f"'{Path(program_name(program)).name}'"
    try:
        text = write_first_policy(plan.policy, plan.sites, title)
    except NoRuleFits as error:
        exit_with_message(f"{error}: choose another with --like, or see 'policyc sites'", EXIT_USAGE)
    text, allowed, errors = _lint(text, plan)
    print_or_write(text, out)
    if allowed:
        click.echo(f"the policy allows {', '.join(allowed)}: see 'policyc explain {allowed[0]}'", err=True)
    if errors:
        print_diagnostics(PolicyError(errors))


def _lint(text: str, plan: Plan) -> tuple[str, tuple[str, ...], tuple[Diagnostic, ...]]:
    """Fixes a text. Returns it with comments that allow the remaining warnings, the codes of these, and the errors.

    The remaining warnings are about the sizes of the model or the GPU, not about the text. The fixes also remove
    suppressions that suppress nothing here.
    """
    from policyc.compiler.planning.first_policy import allow
    from policyc.compiler.planning.plan import make_plan
    from policyc.language.diagnostics import Severity
    from policyc.language.loader import parse_with_diagnostics
    from policyc.linter.api import Findings, lint_loaded
    from policyc.linter.fixes import apply_fixes

    def check(loaded: LoadedPolicy) -> Findings:
        return lint_loaded(loaded, plan=make_plan(loaded.policy, plan.sites))

    fixed = apply_fixes(text, parse_with_diagnostics, check).text
    found = check(parse_with_diagnostics(fixed))
    warnings = [d for d in found if d.severity is Severity.WARNING]
    errors = tuple(d for d in found if d.severity is Severity.ERROR)
    return allow(fixed, warnings), tuple(dict.fromkeys(d.code for d in warnings)), errors
