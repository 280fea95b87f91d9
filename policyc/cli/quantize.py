"""`policyc quantize`: quantizes one array exactly as a policy would."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from policyc.base.files import is_standard_output, open_output
from policyc.base.progress import stage
from policyc.cli.common import ExampleCommand, exit_with_diagnostics

if TYPE_CHECKING:
    import numpy.typing as npt

    from policyc.language.diagnostics import Diagnostic
    from policyc.language.recipes import Gemm, Recipe, Role

_RULE_START = "* -> "  # turns a recipe into a policy


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc quantize x.npy --recipe nvfp4 --role activation --product fprop --out q.npz
    policyc quantize dy.npy --recipe 'nvfp4(rht=wgrad, sr=grad)' --role gradient --product wgrad --axis 0 --out q.npz
    policyc quantize w.npy --recipe 'nvfp4(scale2d=weights)' --role weight --product fprop --axis 0 --out q.npz
    """,
)
@click.argument("array", metavar="IN.npy")
@click.option("--recipe", required=True, help="The recipe, written as in a policy.")
@click.option(
    "--role",
    "role_name",
    required=True,
    type=click.Choice(["weight", "activation", "gradient"]),
    help="What the array is.",
)
@click.option(
    "--product",
    "gemm_name",
    required=True,
    type=click.Choice(["fprop", "dgrad", "wgrad"]),
    help="The product that the array is an operand of.",
)
@click.option("--axis", type=int, default=-1, show_default=True, help="The contracted axis.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of stochastic rounding.")
@click.option("--out", metavar="FILE", help="Also write the codes to this file; '-' is standard output.")
def quantize(
    array: str, recipe: str, role_name: str, gemm_name: str, out: str | None, **options: int
) -> None:
    """Quantize an array exactly as a policy would.

    Prints the error. The file of --out (.npz) holds codes (one per byte), packed (two codes per byte, the even one in
    the low half), scales (raw bytes), amax (f32) and dequantized (f32), with the quantized axis last. That is enough to
    compare with any other implementation.
    """
    from policyc.language.diagnostics import PolicyError
    from policyc.language.recipes import Gemm, Role

    gemm, role = Gemm(gemm_name), Role(role_name)
    _check_operand(gemm, role)
    try:
        parsed_recipe = _parse_recipe(recipe)
    except PolicyError as error:
        exit_with_diagnostics(error)
    values = _load_array(array)
    if not -values.ndim <= options["axis"] < values.ndim:
        raise click.UsageError(f"--axis {options['axis']}: the array has {values.ndim} axes")

    try:
        with stage(f"quantizing {values.size:,} values"):
            from policyc.numerics.measure import measure_operand

            operand = measure_operand(values, parsed_recipe, gemm, role, **options)
    except ValueError as error:
        raise click.UsageError(f"--recipe: {error}") from None
    if out is not None:
        with stage(f"writing {out}"):
            _save_arrays(out, operand.arrays())
    click.echo(str(operand.stats), err=out is not None and is_standard_output(out))


def _check_operand(gemm: Gemm, role: Role) -> None:
    """Raises a usage error if a product has no operand of this role."""
    from policyc.language.recipes import OPERANDS

    if (gemm, role) not in OPERANDS:
        roles = " and ".join(r for g, r in OPERANDS if g == gemm)
        raise click.UsageError(f"{gemm} has no {role}: its operands are {roles}")


def _parse_recipe(text: str) -> Recipe:
    """Parses the recipe of a rule. Raises PolicyError if it does not parse."""
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import parse_with_diagnostics

    loaded = parse_with_diagnostics(f"{_RULE_START}{text}", shown="--recipe")
    if loaded.diagnostics:
        raise PolicyError([_point_at_recipe(diagnostic, text) for diagnostic in loaded.diagnostics])
    rules = loaded.policy.rules
    if len(rules) != 1 or str(rules[0].selectors[0]) != "*" or rules[0].expect is not None:
        raise click.UsageError("--recipe takes one recipe")
    return loaded.policy.resolver()(rules[0].recipe)


def _point_at_recipe(diagnostic: Diagnostic, text: str) -> Diagnostic:
    """Makes a diagnostic of the rule point at the recipe alone. A fix would edit a file, so it is left out."""
    from policyc.language.diagnostics import SourceText, Span

    source = SourceText(text, "--recipe")

    def move(span: Span) -> Span:
        return Span(source, max(0, span.start - len(_RULE_START)), max(0, span.end - len(_RULE_START)))

    notes = tuple(replace(note, span=move(note.span)) for note in diagnostic.notes)
    return replace(diagnostic, span=move(diagnostic.span), notes=notes, fix=None)


def _load_array(name: str) -> npt.NDArray[Any]:
    """Loads a floating-point array. An npy file cannot name bfloat16, so two-byte voids are read as bfloat16."""
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
    dtypes = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
    if array.dtype not in dtypes or array.ndim == 0 or array.size == 0:
        raise click.UsageError(
            f"'{name}' holds {array.dtype} {array.shape}: it must be a non-empty array of floats with at least one axis"
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _save_arrays(path: str, arrays: dict[str, Any]) -> None:
    """Writes an npz file atomically, or to standard output."""
    import numpy as np

    archive = io.BytesIO()  # zip needs to seek, which a device only pretends to do
    np.savez(archive, **arrays)
    try:
        with open_output(path) as stream:
            stream.write(archive.getbuffer())
    except OSError as error:
        raise click.UsageError(f"cannot write '{path}': {error.strerror}") from None
