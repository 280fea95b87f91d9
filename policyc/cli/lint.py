"""`policyc lint`: faults in policies, alone or against a program."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    ExampleCommand,
    check_writable,
    paint,
    read_stdin,
    replace_file,
    suggest_code,
    use_color,
)
from policyc.cli.options import format_option
from policyc.cli.program import plan_program

if TYPE_CHECKING:
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.loader import LoadedPolicy
    from policyc.numerics.targets import Target


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc lint llama.policy                          every finding, with its place and a remedy
    policyc lint policies/*.policy --format concise    a line each
    policyc lint llama.policy --fix                    mend what can be mended without changing what it means
    policyc lint llama_nvfp4 --format sarif > out.sarif
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="POLICY...")
@format_option("full", "concise", "json", "github", "sarif")
@click.option("--select", multiple=True, metavar="CODES", help="Look for these codes only (comma-separated).")
@click.option("--ignore", multiple=True, metavar="CODES", help="Do not look for these codes.")
@click.option(
    "--against",
    metavar="PROGRAM",
    help="Also check what the policy does to a program: a script, or '-m MODULE', with its arguments in quotes.",
)
@click.option(
    "--target", "gpu", metavar="GPU", help="With --against: the GPU that speed is judged on (default: b200)."
)
@click.option("--fix", is_flag=True, help="Apply the safe fixes; the file is replaced in one go.")
@click.option(
    "--unsafe-fixes", is_flag=True, help="With --fix: also those that change what the policy means."
)
def lint(
    files: tuple[str, ...],
    output_format: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    against: str | None,
    gpu: str | None,
    fix: bool,
    unsafe_fixes: bool,
) -> None:
    """Check policies for errors and known risks.

    A finding is allowed on its line with '# allow: CODE -- reason'. 'policyc explain CODE' tells what a code
    means. Exits with 0 if there is no finding (notes are none), 1 if there are some, 2 if a file could not be read.
    """
    from policyc.language.diagnostics import PolicyError, Severity
    from policyc.lint import output
    from policyc.lint.engine import lint as check

    gc.disable()  # nothing here is garbage before the process ends, and looking for it takes a third of the time
    if unsafe_fixes and not fix:
        raise click.UsageError("--unsafe-fixes goes with --fix")
    if fix and "-" in files:
        raise click.UsageError("--fix needs a file to write to, and '-' is standard input")
    codes = _codes(select, ignore)
    if against == "-m" and len(files) > 1:  # written without quotes: --against -m MODULE
        files, against = files[:-1], f"-m {files[-1]}"
    if gpu is not None and against is None:
        raise click.UsageError("--target goes with --against")
    target = _target(gpu)
    if against is not None and len(files) != 1:
        raise click.UsageError("--against goes with one policy")
    found: list[Diagnostic] = []
    undecided, failed, mended = 0, False, 0
    for name in files:
        try:
            if fix:
                mended += _mend(name, codes, unsafe_fixes)
            loaded = _inspect(name)
            plan = (
                None
                if against is None or loaded.diagnostics
                else plan_program(loaded.policy, shlex.split(against))
            )
            findings = check(loaded, codes, plan, target)
        except PolicyError as error:
            failed = True
            found += error.diagnostics
            continue
        found += findings.diagnostics
        failed |= any(d.code == "unreadable-file" for d in findings.diagnostics)  # of an import
        undecided += findings.undecided
    click.echo(output.FORMS[output_format](found, paint), nl=False, color=use_color())
    if output_format in ("full", "concise"):
        if mended:
            click.echo(f"{mended} mended", err=True)
        click.echo(output.summary(found, len(files)), err=True)
    if undecided:
        note = f"{undecided} questions about which rules reach which sites were too hard: some findings may be missing"
        click.echo(f"note: {note}", err=True)
    faults = [d for d in found if d.severity is not Severity.NOTE]
    sys.exit(EXIT_USAGE if failed else EXIT_FAILURE if faults else EXIT_OK)


def _target(name: str | None) -> Target:
    from policyc.lint.context import DEFAULT_TARGET
    from policyc.numerics.targets import get_target

    try:
        return DEFAULT_TARGET if name is None else get_target(name)
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None


def _codes(select: Sequence[str], ignore: Sequence[str]) -> set[str]:
    from policyc.lint.engine import GRAPH, RULES

    known = [*RULES, *sorted(GRAPH)]

    def split(values: Sequence[str]) -> set[str]:
        names = {code.strip() for value in values for code in value.split(",") if code.strip()}
        for name in sorted(names - set(known)):
            raise click.UsageError(f"no rule has the code '{name}': {suggest_code(name, known)}")
        return names

    return (split(select) or set(known)) - split(ignore)


def _inspect(name: str) -> LoadedPolicy:
    from policyc.language.loader import locate, parse_with_diagnostics, read_policy_text

    if name == "-":
        return parse_with_diagnostics(read_stdin(), shown="<stdin>")
    path = locate(name)
    return parse_with_diagnostics(read_policy_text(path), path=path)


def _mend(name: str, codes: set[str], unsafe: bool) -> int:
    from policyc.language.loader import locate, parse_with_diagnostics, read_policy_text
    from policyc.lint.engine import lint as check
    from policyc.lint.fixes import mend

    path = check_writable(name, locate(name))
    text = read_policy_text(path)
    result = mend(
        text, lambda t: parse_with_diagnostics(t, path=path), lambda found: check(found, codes), unsafe=unsafe
    )
    if result.count:
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        replace_file(path, mark + result.text)
    return result.count
