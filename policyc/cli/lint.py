"""`policyc lint`: checks policies, alone or together with a program."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    check_writable,
    expand_folders,
    paint,
    print_diagnostics,
    print_or_write,
    read_stdin,
    replace_file,
    unified_diff,
    usage_errors,
    use_color,
)
from policyc.cli.options import (
    DEFAULT_TARGET,
    ProgramCommand,
    collect_options,
    config_option,
    format_option,
    option,
    option_class,
    out_option,
    switch,
)
from policyc.cli.program import plan_source
from policyc.language.bundled import RECOMMENDED

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.language.diagnostics import Diagnostic
    from policyc.language.loader import LoadedPolicy
    from policyc.linter.fixes import FixedText
    from policyc.numerics.targets import Target
    from policyc.serving.servable import Server


@option_class
class LintOptions:
    """What is checked, and what happens to the findings."""

    select: tuple[str, ...] = option(
        multiple=True,
        metavar="CODES",
        show_default="ALL",
        help="Check only these codes: comma-separated, may be repeated.",
    )
    ignore: tuple[str, ...] = option(multiple=True, metavar="CODES", help="Do not check these codes.")
    config: str | None = config_option
    target: str | None = option(
        metavar="GPU",
        show_default=DEFAULT_TARGET,
        help="With a program: the GPU on which speed is judged.",
    )
    server: Server | None = option(
        "--for",
        type=click.Choice(["vllm", "sglang", "trtllm", "transformers"]),
        help="With a program: also report which of its sites this server could not run.",
    )
    fix: bool = switch(
        "Apply the fixes that keep the meaning of the policy. With '-', the fixed text goes to standard output "
        "and the findings go to standard error."
    )
    unsafe_fixes: bool = switch("With --fix or --diff: also apply fixes that change what the policy means.")
    diff: bool = switch(
        "Write nothing. Print what --fix would change, and exit with 1 if it would change anything."
    )
    exit_zero: bool = switch("Exit with 0 even if there are findings.")
    stdin_filename: str | None = option(
        metavar="FILE",
        help="The file name that '-' stands for: messages show it, and imports are relative to it.",
    )


def _starts_program(word: str) -> bool:
    return word in ("-m", "-c") or word.endswith((".py", ".pyc"))


class LintCommand(ProgramCommand):
    """A command whose program may follow any number of policies."""

    def is_argument(self, word: str, position: int) -> bool:
        del position
        return not _starts_program(word)


@click.command(
    cls=LintCommand,
    examples="""
    policyc lint                                       every policy in this folder and below it
    policyc lint llama.policy                          print every finding with its source line
    policyc lint llama.policy --fix                    apply the fixes that keep the meaning of the policy
    policyc lint llama.policy train.py --steps 1       also check what it does to a program
    policyc lint llama_nvfp4 --config llama3_8b        the same for the bundled Llama
    policyc lint llama_nvfp4 --config tiny --for vllm  what vLLM could not run of it
    policyc lint policies --format json --out lint.json
    """,
)
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[POLICY[:VARIANT]|FOLDER]... [SCRIPT|-m MODULE|-c CODE [ARGS]...]",
)
@format_option(
    "full",
    "concise",
    "json",
    "github",
    help="full: source line and notes. concise: one line per finding. The others are for tools.",
)
@out_option()
@collect_options(LintOptions, "options")
def lint(words: tuple[str, ...], output_format: str, out: str | None, options: LintOptions) -> None:
    """Check policies for errors and known risks.

    A folder stands for every '.policy' file in it or below it; the default is the current folder. The table
    [tool.policyc] of pyproject.toml may set select, ignore and target; only the command line names a program. The
    comment '# allow: CODE -- reason' suppresses a finding on its line. 'policyc explain CODE' describes a code. Exits
    with 0 if there are no findings other than notes, 1 if there are some, 2 if a file could not be read.
    """
    from policyc.language.diagnostics import Severity
    from policyc.linter.output import OUTPUT_FORMATS, summarize

    request = _make_request(words, options)
    if not request.has_program:  # a program needs the collector
        gc.disable()  # a short process has no garbage worth collecting, and collecting takes a third of the time
    if options.diff:
        sys.exit(_print_diffs(request, EXIT_OK if options.exit_zero else EXIT_FAILURE))
    results = [_lint_file(name, request) for name in request.files]
    diagnostics = [d for result in results for d in result.diagnostics]
    fixes_stdin = options.fix and "-" in request.files  # standard output is then the fixed text
    text = OUTPUT_FORMATS[output_format](diagnostics, paint)
    if fixes_stdin:
        click.echo(text, nl=False, err=True, color=use_color())
    else:
        print_or_write(text, out)
    if output_format in ("full", "concise"):
        if fix_count := sum(result.fix_count for result in results):
            click.echo(f"{fix_count} fixed", err=True)
        click.echo(summarize(diagnostics, len(results)), err=True)
    for line in (line for result in results for line in result.unchanged_products):
        click.echo(f"note: {line}", err=True)
    if any(result.is_unreadable for result in results):
        sys.exit(EXIT_USAGE)
    has_findings = any(d.severity is not Severity.NOTE for d in diagnostics)
    sys.exit(EXIT_FAILURE if has_findings and not options.exit_zero else EXIT_OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What one invocation checks, and its options."""

    files: tuple[str, ...]
    codes: frozenset[str]
    program: tuple[str, ...]
    config: str | None
    target: Target

    @property
    def has_program(self) -> bool:
        return bool(self.program or self.config)

    options: LintOptions


def _make_request(words: tuple[str, ...], options: LintOptions) -> _Request:
    """Checks the options, and adds those of pyproject.toml. Raises a usage error if they do not fit together."""
    from policyc.linter.rules import choose_codes
    from policyc.linter.settings import read_settings
    from policyc.numerics.targets import get_target

    with usage_errors(), usage_errors(KeyError):
        settings = read_settings()
        codes = choose_codes(options.select or settings.select, options.ignore or settings.ignore)
        target = get_target(options.target or settings.target or DEFAULT_TARGET)
    count = next((i for i, word in enumerate(words) if _starts_program(word)), len(words))
    files, program = words[:count] or (".",), words[count:]
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise click.UsageError("--unsafe-fixes requires --fix or --diff")
    if options.fix and options.diff:
        raise click.UsageError("--diff writes nothing: leave out --fix")
    if options.fix and "-" in files and len(files) > 1:
        raise click.UsageError("--fix writes the text from '-' to standard output: name no other file")
    if options.stdin_filename is not None and "-" not in files:
        raise click.UsageError("--stdin-filename names standard input: it needs the file '-'")
    if program and options.config is not None:
        raise click.UsageError("name a program, or a configuration with --config, but not both")
    if options.target is not None and not (program or options.config):
        raise click.UsageError("--target requires a program or --config: speed depends on both")
    if options.server is not None and not (program or options.config):
        raise click.UsageError("--for requires a program or --config: which linears are fused depends on it")
    return _Request(
        files=tuple(dict.fromkeys(expand_folders(files))),
        codes=codes,
        program=program,
        config=options.config,
        target=target,
        options=options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileResult:
    diagnostics: tuple[Diagnostic, ...]
    fix_count: int = 0
    is_unreadable: bool = False
    unchanged_products: tuple[str, ...] = ()


def _lint_file(name: str, request: _Request) -> _FileResult:
    from policyc.language.diagnostics import PolicyError
    from policyc.linter.api import lint_loaded

    fix_count = 0
    if name == RECOMMENDED and request.has_program:
        name = plan_source(None, request.program, request.config, request.target.name).policy.name
    name, variant = _split_variant(name)
    try:
        source = _read_source(name, request)
        if request.options.fix:
            fixed = _write_fixes(name, source, request)
            source, fix_count = replace(source, text=fixed.text), fixed.count
        loaded = source.parse(source.text)
        if variant is not None:
            loaded = replace(loaded, policy=loaded.policy.variant(variant))
        plan = None
        if request.has_program and not loaded.diagnostics:
            plan = plan_source(loaded.policy, request.program, request.config)
        with stage(f"checking {source.shown}"):
            found = lint_loaded(loaded, request.codes, plan, request.target, request.options.server)
    except PolicyError as error:
        return _FileResult(diagnostics=error.diagnostics, fix_count=fix_count, is_unreadable=True)
    return _FileResult(
        diagnostics=found,
        fix_count=fix_count,
        is_unreadable=any(d.code == "unreadable-file" for d in found),  # an imported file
        unchanged_products=_describe_unchanged_products(plan),
    )


def _describe_unchanged_products(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ()
    from policyc.compiler.tables.plan_tables import unchanged_products

    return tuple(unchanged_products(plan))


def _split_variant(word: str) -> tuple[str, str | None]:
    from policyc.language.loader import split_variant

    name, variant = split_variant(word)
    return str(name), variant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The text of a policy, the file that its imports are relative to, and the path to print."""

    text: str
    path: Path | None
    shown: str

    def parse(self, text: str) -> LoadedPolicy:
        from policyc.language.loader import parse_with_diagnostics

        return parse_with_diagnostics(text, path=self.path, shown=self.shown)


def _read_source(name: str, request: _Request) -> _Source:
    """Reads a policy. Raises PolicyError if that fails."""
    from policyc.language.bundled import locate, read_policy_text

    if name == "-":
        shown = request.options.stdin_filename
        return _Source(text=read_stdin(), path=Path(shown) if shown else None, shown=shown or "<stdin>")
    path = locate(name)
    return _Source(text=read_policy_text(path), path=path, shown=str(path))


def _compute_fixes(source: _Source, request: _Request) -> FixedText:
    from policyc.linter.api import lint_loaded
    from policyc.linter.fixes import apply_fixes

    return apply_fixes(
        source.text,
        source.parse,
        lambda loaded: lint_loaded(loaded, request.codes),
        unsafe=request.options.unsafe_fixes,
    )


def _write_fixes(name: str, source: _Source, request: _Request) -> FixedText:
    """Applies the fixes to a file. The fixed text of standard input goes to standard output, changed or not."""
    byte_order_mark = "\ufeff" if source.text.startswith("\ufeff") else ""
    if name == "-":
        fixed = _compute_fixes(source, request)
        click.echo(byte_order_mark + fixed.text, nl=False)
        return fixed
    assert source.path is not None
    path = check_writable(name, source.path)
    fixed = _compute_fixes(source, request)
    if fixed.count:
        replace_file(path, byte_order_mark + fixed.text)
    return fixed


def _print_diffs(request: _Request, code_if_changed: int) -> int:
    """Prints what the fixes would change. Returns the exit code."""
    from policyc.language.diagnostics import PolicyError

    fix_count, is_unreadable = 0, False
    for name, _ in map(_split_variant, request.files):
        try:
            source = _read_source(name, request)
        except PolicyError as error:
            is_unreadable = True
            print_diagnostics(error)
            continue
        fixed = _compute_fixes(source, request)
        if fixed.count:
            fix_count += fixed.count
            before = source.text.removeprefix("\ufeff")
            click.echo(unified_diff(source.shown, before, fixed.text), nl=False, color=use_color())
    if fix_count:
        click.echo(f"{fix_count} would be fixed", err=True)
    return EXIT_USAGE if is_unreadable else code_if_changed if fix_count else EXIT_OK
