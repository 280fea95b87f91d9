"""The command line. Each verb reads its arguments, calls one function below it, and prints.

The one trap: a verb imports what it needs when it runs, so that `--help` and `lint` start at once.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from policyc import __version__, commands
from policyc.commands import Examples
from policyc.files import whole

if TYPE_CHECKING:
    import numpy.typing as npt

    from policyc.diagnostics import Diagnostic, PolicyError
    from policyc.loader import Loaded
    from policyc.recipes import Recipe

CLEAN, FOUND, FAILED = 0, 1, 2  # exit codes

_STYLES = {
    "error": {"fg": "red", "bold": True}, "warning": {"fg": "yellow", "bold": True}, "path": {"bold": True},
    "gutter": {"fg": "blue"}, "caret": {"fg": "red"}, "help": {"fg": "cyan"}, "note": {"fg": "blue"},
}  # fmt: skip


def _paint(kind: str, text: str) -> str:
    return click.style(text, **_STYLES.get(kind, {}))  # type: ignore[arg-type]  # the table above holds style names


def _colour() -> bool | None:
    """None lets click look at the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="policyc")
def cli() -> None:
    """Precision policies for JAX training: write them, check them, look at them.

    A policy says, for every GEMM of a model, in which precision its three products run. Wherever a command takes a
    POLICY, the name of a bundled one does as well as a path: policyc show lists them.
    """


cli.add_command(commands.apply)
cli.add_command(commands.sites)


# ---- lint


@cli.command(
    cls=Examples,
    examples="""
    policyc lint llama.policy                          every finding, with its place and a remedy
    policyc lint policies/*.policy --format concise    a line each
    policyc lint llama.policy --fix                    mend what can be mended without changing what it means
    policyc lint llama_nvfp4 --format sarif > out.sarif
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="POLICY...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["full", "concise", "json", "github", "sarif"]),
    default="full",
    show_default=True,
    help="How findings are printed.",
)
@click.option("--select", multiple=True, metavar="CODES", help="Look for these codes only (comma-separated).")
@click.option("--ignore", multiple=True, metavar="CODES", help="Do not look for these codes.")
@click.option(
    "--against",
    metavar="PROGRAM",
    help="Also check what the policy does to a program: a script, or '-m MODULE', with its arguments in quotes.",
)
@click.option("--fix", is_flag=True, help="Apply the safe fixes; the file is replaced in one go.")
@click.option(
    "--unsafe-fixes", is_flag=True, help="With --fix: also those that change what the policy means."
)
def lint(
    files: tuple[str, ...],
    form: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    against: str | None,
    fix: bool,
    unsafe_fixes: bool,
) -> None:
    """Check policies for faults and for what costs people runs.

    A finding is allowed on its line with '# allow: CODE -- reason'. 'policyc explain CODE' tells what a code
    means. Exits with 0 if there is no finding, 1 if there are some, 2 if a file could not be read.
    """
    from policyc import report
    from policyc.diagnostics import PolicyError
    from policyc.lint import lint as check

    gc.disable()  # nothing here is garbage before the process ends, and looking for it takes a third of the time
    if unsafe_fixes and not fix:
        raise click.UsageError("--unsafe-fixes goes with --fix")
    if fix and "-" in files:
        raise click.UsageError("--fix needs a file to write to, and '-' is standard input")
    codes = _codes(select, ignore)
    if against == "-m" and len(files) > 1:  # written without quotes: --against -m MODULE
        files, against = files[:-1], f"-m {files[-1]}"
    if against is not None and len(files) != 1:
        raise click.UsageError("--against goes with one policy")
    found: list[Diagnostic] = []
    undecided, failed, mended = 0, False, 0
    for name in files:
        try:
            if fix:
                mended += _mend(name, codes, unsafe_fixes)
            loaded = _inspect(name)
            plan = None if against is None or loaded.found else commands.plan_of(loaded.policy, against)
            findings = check(loaded, codes, plan)
        except PolicyError as error:
            failed = True
            found += error.diagnostics
            continue
        found += findings.diagnostics
        failed |= any(d.code == "unreadable-file" for d in findings.diagnostics)  # of an import
        undecided += findings.undecided
    click.echo(report.FORMS[form](found, _paint), nl=False, color=_colour())
    if form in ("full", "concise"):
        if mended:
            click.echo(f"{mended} mended", err=True)
        click.echo(report.summary(found, len(files)), err=True)
    if undecided:
        note = f"{undecided} questions about which rules reach which sites were too hard: some findings may be missing"
        click.echo(f"note: {note}", err=True)
    sys.exit(FAILED if failed else FOUND if found else CLEAN)


def _codes(select: Sequence[str], ignore: Sequence[str]) -> set[str]:
    from policyc.lint import GRAPH, RULES

    known = [*RULES, *sorted(GRAPH)]

    def split(values: Sequence[str]) -> set[str]:
        names = {code.strip() for value in values for code in value.split(",") if code.strip()}
        for name in sorted(names - set(known)):
            raise click.UsageError(f"no rule has the code '{name}': {_near(name, known)}")
        return names

    return (split(select) or set(known)) - split(ignore)


def _near(code: str, known: Iterable[str]) -> str:
    from policyc.diagnostics import did_you_mean

    return did_you_mean(code, known) or "'policyc explain' lists them all"


def _inspect(name: str) -> Loaded:
    from policyc.loader import inspect, locate, read_text

    if name == "-":
        return inspect(_stdin(), shown="<stdin>")
    path = locate(name)
    return inspect(read_text(path), path=path)


def _stdin() -> str:
    from policyc.loader import unreadable

    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise unreadable("<stdin>", f"byte {error.start} is not UTF-8") from None


def _mend(name: str, codes: set[str], unsafe: bool) -> int:
    from policyc.lint import lint as check
    from policyc.lint.fixes import mend
    from policyc.loader import inspect, locate, read_text

    path = _writable(name, locate(name))
    text = read_text(path)
    result = mend(text, lambda t: inspect(t, path=path), lambda found: check(found, codes), unsafe=unsafe)
    if result.count:
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        _replace(path, mark + result.text)
    return result.count


def _writable(name: str, path: Path) -> Path:
    """Bundled policies belong to the installation: a copy may be changed, not they."""
    from policyc.loader import unreadable

    if not path.exists() or Path(name).exists():
        return path
    help = f"copy it: policyc show {name} --format text > my_{name}.policy"
    raise unreadable(name, "this is a bundled policy, and not yours to change", help)


def _replace(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it sees the old text or the new one. Links and line ends stay."""
    from policyc.loader import unreadable

    target = path.resolve()
    try:
        mode = target.stat().st_mode
        if b"\r\n" in target.read_bytes():
            text = text.replace("\n", "\r\n")
        with whole(target, mode & 0o7777) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        raise unreadable(str(path), f"cannot be written: {error.strerror}") from None


# ---- fmt


@cli.command(
    cls=Examples,
    examples="""
    policyc fmt llama.policy            lay it out, in place
    policyc fmt --diff *.policy         show what would change
    policyc fmt - < a.policy            from standard input to standard output
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not laid out.")
@click.option(
    "--diff", is_flag=True, help="Write nothing; print what would change; exit with 1 if anything would."
)
def fmt(files: tuple[str, ...], check: bool, diff: bool) -> None:
    """Lay policies out in the one way: arrows aligned, blocks indented, comments kept."""
    from policyc.diagnostics import PolicyError, render

    changed, failed = [], False
    for name in files:
        try:
            before, after = _formatted(name)
            if name == "-" and not (check or diff):
                click.echo(after, nl=False)
            elif before != after:
                if diff:
                    click.echo(_difference(name, before, after), nl=False, color=_colour())
                elif not check:
                    _replace(Path(name), after)
                changed.append(name)
        except PolicyError as error:
            failed = True
            click.echo("\n".join(render(d, _paint) for d in error.diagnostics), err=True, color=_colour())
    for name in changed:
        click.echo(f"{name}: {'would be changed' if check or diff else 'changed'}", err=True)
    sys.exit(FAILED if failed else FOUND if changed and (check or diff) else CLEAN)


def _formatted(name: str) -> tuple[str, str]:
    from policyc.diagnostics import PolicyError, Source
    from policyc.formatter import format_file
    from policyc.loader import locate, read_text
    from policyc.parser import read

    if name != "-":
        path = locate(name)
        text = read_text(_writable(name, path))
    else:
        text = _stdin()
    file, found = read(Source(text.removeprefix("\ufeff"), "<stdin>" if name == "-" else name))
    if found:
        raise PolicyError(found)
    return text, format_file(file)


def _difference(name: str, before: str, after: str) -> str:
    import difflib

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return "".join(click.style(line, fg=colours.get(line[:1])) + "\n" for line in lines)


# ---- explain


@cli.command(
    cls=Examples,
    examples="""
    policyc explain                     every code, a line each
    policyc explain shadowed-rule       what it means, why it is bad, a bad and a good example
    policyc explain --markdown          all pages as one document
    """,
)
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@click.option(
    "--markdown", is_flag=True, help="Print the pages as Markdown, all of them if no code is given."
)
def explain(codes: tuple[str, ...], markdown: bool) -> None:
    """Print the page of a lint code."""
    from policyc.lint import GRAPH, graph_rules
    from policyc.lint import RULES as READ

    rules = READ | graph_rules() if not codes or any(c in GRAPH for c in codes) else READ
    for code in codes:
        if code not in rules:
            raise click.UsageError(f"no rule has the code '{code}': {_near(code, [*READ, *sorted(GRAPH)])}")
    if not codes and not markdown:
        width = max(map(len, rules))
        for rule in rules.values():
            code = _paint(rule.severity, f"{rule.code:<{width}}")
            click.echo(f"{code}  {rule.title}", color=_colour())
        return
    pages = [f"# {c} ({rules[c].severity})\n\n{rules[c].page.rstrip()}\n" for c in codes or rules]
    text = "\n".join(pages)
    if markdown or not sys.stdout.isatty():
        click.echo(text, nl=False)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(force_terminal=_colour()).print(Markdown(text))


# ---- show


@cli.command(
    cls=Examples,
    examples="""
    policyc show                                the bundled policies
    policyc show llama_nvfp4                    what each of its rules does to each operand
    policyc show llama_nvfp4 --variant no_rht   the same under a variant
    policyc show te_nvfp4_no_rht --format text  as one policy, imports expanded
    """,
)
@click.argument("policy", required=False)
@click.option("--variant", metavar="NAME", help="Show the policy under one of its variants.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "text", "json"]),
    default="table",
    show_default=True,
    help="How it is printed.",
)
def show(policy: str | None, variant: str | None, form: str) -> None:
    """Show what a policy does: its rules, and each recipe operand by operand."""
    from policyc import view
    from policyc.diagnostics import PolicyError
    from policyc.loader import load

    if policy is None:
        click.echo(view.bundled(_paint), nl=False, color=_colour())
        return
    try:
        loaded = load(policy)
    except PolicyError as error:
        _fail(error)
    if variant is not None:
        try:
            loaded = loaded.variant(variant)
        except KeyError as missing:
            raise click.UsageError(str(missing.args[0])) from None
    if form == "text":
        click.echo(str(loaded), nl=False)
    elif form == "json":
        click.echo(view.as_json(loaded), nl=False)
    else:
        view.table(loaded, policy if variant is None else f"{policy}, variant {variant}", _colour())


# ---- quantize


@cli.command(
    cls=Examples,
    examples="""
    policyc quantize x.npy --recipe nvfp4 --role activation --gemm fprop --out q.npz
    policyc quantize dy.npy --recipe 'nvfp4(rht=wgrad, sr=grad)' --role gradient --gemm wgrad --axis 0 --out q.npz
    policyc quantize w.npy --recipe 'nvfp4(scale2d=weights)' --role weight --gemm fprop --axis 0 --out q.npz
    """,
)
@click.argument("array", metavar="IN.npy")
@click.option("--recipe", required=True, help="A recipe as a policy spells it.")
@click.option(
    "--role", required=True, type=click.Choice(["weight", "activation", "gradient"]), help="What IN is."
)
@click.option(
    "--gemm", required=True, type=click.Choice(["fprop", "dgrad", "wgrad"]), help="Where it is used."
)
@click.option("--axis", type=int, default=-1, show_default=True, help="The contracted axis.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of stochastic rounding.")
@click.option("--out", required=True, metavar="OUT.npz", help="Codes, packed codes, scales, amax, values.")
def quantize(array: str, recipe: str, role: str, gemm: str, axis: int, seed: int, out: str) -> None:
    """Quantize an array, to the bit as a policy would, and print what it loses.

    OUT.npz holds codes (one a byte), packed (two nibbles a byte, the even one low), scales (raw bytes), amax (f32)
    and dequantized (f32), with the quantized axis last: enough to compare with any other implementation.
    """
    from policyc.diagnostics import PolicyError
    from policyc.recipes import OPERANDS, Gemm, Role

    if (Gemm(gemm), Role(role)) not in OPERANDS:
        roles = " and ".join(r for g, r in OPERANDS if g == gemm)
        raise click.UsageError(f"{gemm} has no {role}: its operands are {roles}")
    try:
        chosen = _recipe(recipe)
    except PolicyError as error:
        _fail(error)
    values = _array(array)
    if not -values.ndim <= axis < values.ndim:
        raise click.UsageError(f"--axis {axis}: the array has {values.ndim} axes")

    from policyc.measure import measure_operand

    try:
        found = measure_operand(values, chosen, Gemm(gemm), Role(role), axis=axis, seed=seed)
    except ValueError as error:
        raise click.UsageError(f"--recipe: {error}") from None
    _save(Path(out), found.arrays())
    click.echo(str(found.stats))


def _recipe(text: str) -> Recipe:
    from policyc.diagnostics import PolicyError
    from policyc.loader import inspect

    loaded = inspect(f"* -> {text}", shown="--recipe")
    if loaded.found:
        raise PolicyError(loaded.found)
    rules = loaded.policy.rules
    if len(rules) != 1 or str(rules[0].selectors[0]) != "*" or rules[0].expect is not None:
        raise click.UsageError("--recipe takes one recipe")
    return loaded.policy.resolver()(rules[0].recipe)


def _array(name: str) -> npt.NDArray[Any]:
    """A floating-point array from an npy file; bfloat16, which npy cannot name, is read from two-byte voids."""
    import ml_dtypes
    import numpy as np

    try:
        array: npt.NDArray[Any] = np.load(name, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise click.UsageError(f"cannot read '{name}': {error}") from None
    if not hasattr(array, "dtype"):
        raise click.UsageError(f"'{name}' is not one array: save it with numpy.save")
    if array.dtype == np.dtype("V2"):
        array = array.view(ml_dtypes.bfloat16)
    kinds = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
    if array.dtype not in kinds or array.ndim == 0 or array.size == 0:
        raise click.UsageError(
            f"'{name}' holds {array.dtype} {array.shape}: give floats with one axis or more"
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _save(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Write an npz in one go: a file that is there is whole."""
    import numpy as np

    try:
        with whole(path) as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # the stubs take the names for options
    except OSError as error:
        raise click.UsageError(f"cannot write '{path}': {error.strerror}") from None


def _fail(error: PolicyError) -> NoReturn:
    from policyc.diagnostics import render

    click.echo("\n".join(render(d, _paint) for d in error.diagnostics), err=True, color=_colour())
    unread = any(d.code == "unreadable-file" for d in error.diagnostics)
    sys.exit(FAILED if unread else FOUND)


def main() -> None:
    """The `policyc` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show '…' shows '?'
    cli.main(prog_name="policyc")


if __name__ == "__main__":
    main()
