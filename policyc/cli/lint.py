"""`policyc lint`: checks policies, alone or together with a program."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
from policyc.cli.options import collect_options, format_option, group_options
from policyc.cli.program import plan_program

if TYPE_CHECKING:
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.loader import LoadedPolicy
    from policyc.numerics.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class LintOptions:
    """The values of `lint_options`."""

    select: tuple[str, ...]
    ignore: tuple[str, ...]
    against: str | None
    target: str | None
    fix: bool
    unsafe_fixes: bool


lint_options = collect_options(
    LintOptions,
    "options",
    group_options(
        click.option("--select", multiple=True, metavar="CODES", help="Check only these codes (comma-separated)."),
        click.option("--ignore", multiple=True, metavar="CODES", help="Do not check these codes."),
        click.option(
            "--against",
            metavar="PROGRAM",
            help="Also check what the policy does to a program: a script or '-m MODULE', quoted with its arguments.",
        ),
        click.option(
            "--target", metavar="GPU", show_default="b200",
            help="With --against: the GPU on which speed is judged.",
        ),
        click.option("--fix", is_flag=True, help="Apply the safe fixes. The file is replaced atomically."),
        click.option(
            "--unsafe-fixes", is_flag=True, help="With --fix: also apply fixes that change what the policy means."
        ),
    ),
)  # fmt: skip


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc lint llama.policy                          print every finding with its source line
    policyc lint policies/*.policy --format concise    print one line per finding
    policyc lint llama.policy --fix                    apply the fixes that keep the meaning of the policy
    policyc lint llama_nvfp4 --format sarif > out.sarif
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="POLICY...")
@format_option("full", "concise", "json", "github", "sarif")
@lint_options
def lint(files: tuple[str, ...], output_format: str, options: LintOptions) -> None:
    """Check policies for errors and known risks.

    The comment '# allow: CODE -- reason' suppresses a finding on its line. 'policyc explain CODE' describes a code.
    Exits with 0 if there are no findings other than notes, 1 if there are some, 2 if a file could not be read.
    """
    from policyc.language.diagnostics import Severity
    from policyc.lint.output import OUTPUT_FORMATS, summarize

    gc.disable()  # a short process creates no garbage worth collecting, and collecting takes a third of the time
    request = _make_request(files, options)
    results = [_lint_file(name, request) for name in request.files]
    diagnostics = [d for result in results for d in result.diagnostics]
    click.echo(OUTPUT_FORMATS[output_format](diagnostics, paint), nl=False, color=use_color())
    if output_format in ("full", "concise"):
        if fix_count := sum(result.fix_count for result in results):
            click.echo(f"{fix_count} fixed", err=True)
        click.echo(summarize(diagnostics, len(results)), err=True)
    if undecided := sum(result.undecided for result in results):
        note = f"{undecided} questions about the reach of rules exceeded their limits: some findings may be missing"
        click.echo(f"note: {note}", err=True)
    if any(result.is_unreadable for result in results):
        sys.exit(EXIT_USAGE)
    sys.exit(EXIT_FAILURE if any(d.severity is not Severity.NOTE for d in diagnostics) else EXIT_OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The files and the checked options of one call."""

    files: tuple[str, ...]
    codes: frozenset[str]
    program: tuple[str, ...] | None
    target: Target
    fix: bool
    unsafe_fixes: bool


def _make_request(files: tuple[str, ...], options: LintOptions) -> _Request:
    """Checks the options. Raises a usage error if they do not fit together."""
    if options.unsafe_fixes and not options.fix:
        raise click.UsageError("--unsafe-fixes requires --fix")
    if options.fix and "-" in files:
        raise click.UsageError("--fix needs a file to write, and '-' is standard input")
    codes = _parse_codes(options)
    against = options.against
    if against == "-m" and len(files) > 1:  # written without quotes: --against -m MODULE
        files, against = files[:-1], f"-m {files[-1]}"
    if options.target is not None and against is None:
        raise click.UsageError("--target requires --against")
    target = _find_target(options.target)
    if against is not None and len(files) != 1:
        raise click.UsageError("--against takes one policy")
    return _Request(
        files=files,
        codes=codes,
        program=None if against is None else tuple(shlex.split(against)),
        target=target,
        fix=options.fix,
        unsafe_fixes=options.unsafe_fixes,
    )


def _find_target(name: str | None) -> Target:
    from policyc.lint.context import DEFAULT_TARGET
    from policyc.numerics.targets import get_target

    try:
        return DEFAULT_TARGET if name is None else get_target(name)
    except KeyError as unknown:
        raise click.UsageError(str(unknown.args[0])) from None


def _parse_codes(options: LintOptions) -> frozenset[str]:
    from policyc.lint.rules import ALL_CODES

    def split(values: Sequence[str]) -> frozenset[str]:
        codes = frozenset(code.strip() for value in values for code in value.split(",") if code.strip())
        for code in sorted(codes.difference(ALL_CODES)):
            raise click.UsageError(f"no rule has the code '{code}': {suggest_code(code, ALL_CODES)}")
        return codes

    return (split(options.select) or frozenset(ALL_CODES)) - split(options.ignore)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileResult:
    diagnostics: tuple[Diagnostic, ...]
    fix_count: int = 0
    undecided: int = 0
    is_unreadable: bool = False


def _lint_file(name: str, request: _Request) -> _FileResult:
    from policyc.language.diagnostics import PolicyError
    from policyc.lint.engine import lint as run_lint

    fix_count = 0
    try:
        if request.fix:
            fix_count = _fix_file(name, request)
        loaded = _load(name)
        plan = None
        if request.program is not None and not loaded.diagnostics:
            plan = plan_program(loaded.policy, request.program)
        result = run_lint(loaded, request.codes, plan, request.target)
    except PolicyError as error:
        return _FileResult(diagnostics=error.diagnostics, fix_count=fix_count, is_unreadable=True)
    return _FileResult(
        diagnostics=result.diagnostics,
        fix_count=fix_count,
        undecided=result.undecided,
        is_unreadable=any(d.code == "unreadable-file" for d in result.diagnostics),  # an imported file
    )


def _load(name: str) -> LoadedPolicy:
    from policyc.language.loader import locate, parse_with_diagnostics, read_policy_text

    if name == "-":
        return parse_with_diagnostics(read_stdin(), shown="<stdin>")
    path = locate(name)
    return parse_with_diagnostics(read_policy_text(path), path=path)


def _fix_file(name: str, request: _Request) -> int:
    """Applies the fixes to a file. Returns their number."""
    from policyc.language.loader import locate, parse_with_diagnostics, read_policy_text
    from policyc.lint.engine import lint as run_lint
    from policyc.lint.fixes import apply_fixes

    path = check_writable(name, locate(name))
    text = read_policy_text(path)
    fixed = apply_fixes(
        text,
        lambda changed: parse_with_diagnostics(changed, path=path),
        lambda loaded: run_lint(loaded, request.codes),
        unsafe=request.unsafe_fixes,
    )
    if fixed.count:
        byte_order_mark = "\ufeff" if text.startswith("\ufeff") else ""
        replace_file(path, byte_order_mark + fixed.text)
    return fixed.count
