"""`policyc init`: writes a first policy for a program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import (
    EXIT_USAGE,
    exit_with_message,
    is_policy,
    load_policy,
    print_diagnostics,
    print_or_write,
)
from policyc.cli.options import ProgramCommand, config_option, out_option, program_argument
from policyc.cli.program import plan_source, program_name

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.loader import LoadedPolicy


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc init train.py --steps 1                     print a first policy for this program
    policyc init --out my.policy train.py               write it to a file that does not exist yet
    policyc init --like te_nvfp4 --config llama3_8b     with the rules of another policy, for the bundled Llama
    """,
)
@click.option(
    "--like",
    default="llama_nvfp4",
    show_default=True,
    metavar="POLICY[:VARIANT]",
    help="Take the rules of this policy that decide about sites of the program.",
)
@config_option
@out_option("Write to this file, which must not exist, instead of standard output.")
@program_argument(required=False)
def init(like: str, config: str | None, out: str | None, program: tuple[str, ...]) -> None:
    """Write a first policy for a program, from its real sites.

    It has the rules of another policy that decide about these sites, each with the number of sites that it must match
    ('expect') and a comment on what it takes. The program runs until its first loss with a GEMM is traced.
    """
    from policyc.compiler.first_policy import NoRuleFits, write_first_policy
    from policyc.compiler.plan_tables import as_json
    from policyc.compiler.site_lists import SiteList
    from policyc.language.diagnostics import PolicyError
    from policyc.language.policy import Policy

    if program and is_policy(program[0]):
        raise click.UsageError(f"'{program[0]}' is a policy: name it with --like {program[0]}")
    if out is not None and out != "-" and Path(out).exists():
        raise click.UsageError(f"--out: '{out}' exists: remove it, or choose another name")
    policy = load_policy(like)
    plan = plan_source(Policy(), program, config)
    title = f"the bundled Llama {config}" if config is not None else f"'{Path(program_name(program)).name}'"
    try:
        text = write_first_policy(policy, SiteList.from_json(as_json(plan)), title)
    except NoRuleFits as error:
        exit_with_message(f"{error}: choose another with --like, or see 'policyc sites'", EXIT_USAGE)
    text, diagnostics = _lint(text, plan)
    print_or_write(text, out)
    if diagnostics:
        print_diagnostics(PolicyError(diagnostics))


def _lint(text: str, plan: Plan) -> tuple[str, tuple[Diagnostic, ...]]:
    """The text without suppressions that suppress nothing here, and what the linter says of it on this program."""
    from policyc.compiler.plan import make_plan
    from policyc.language.diagnostics import Severity
    from policyc.language.loader import parse_with_diagnostics
    from policyc.linter import engine
    from policyc.linter.fixes import apply_fixes
    from policyc.linter.rules import ALL_CODES

    def check(loaded: LoadedPolicy) -> engine.LintResult:
        # Which format is fastest on some GPU is a question about `--like`, not about what was written.
        codes = set(ALL_CODES) - {"slower-than-fp8"}
        return engine.lint(loaded, codes, make_plan(loaded.policy, plan.sites))

    fixed = apply_fixes(text, parse_with_diagnostics, check).text
    found = check(parse_with_diagnostics(fixed)).diagnostics
    return fixed, tuple(d for d in found if d.severity is not Severity.NOTE)
