"""`policyc quantize`: one array, to the bit as a policy would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import ExampleCommand, exit_with_diagnostics
from policyc.language.files import atomic_write

if TYPE_CHECKING:
    import numpy.typing as npt

    from policyc.language.recipes import Recipe


@click.command(
    cls=ExampleCommand,
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
    """Quantize an array exactly as a policy would, and print the error.

    OUT.npz holds codes (one a byte), packed (two nibbles a byte, the even one low), scales (raw bytes), amax (f32)
    and dequantized (f32), with the quantized axis last: enough to compare with any other implementation.
    """
    from policyc.language.diagnostics import PolicyError
    from policyc.language.recipes import OPERANDS, Gemm, Role

    if (Gemm(gemm), Role(role)) not in OPERANDS:
        roles = " and ".join(r for g, r in OPERANDS if g == gemm)
        raise click.UsageError(f"{gemm} has no {role}: its operands are {roles}")
    try:
        chosen = _recipe(recipe)
    except PolicyError as error:
        exit_with_diagnostics(error)
    values = _array(array)
    if not -values.ndim <= axis < values.ndim:
        raise click.UsageError(f"--axis {axis}: the array has {values.ndim} axes")

    from policyc.numerics.measure import measure_operand

    try:
        found = measure_operand(values, chosen, Gemm(gemm), Role(role), axis=axis, seed=seed)
    except ValueError as error:
        raise click.UsageError(f"--recipe: {error}") from None
    _save(Path(out), found.arrays())
    click.echo(str(found.stats))


def _recipe(text: str) -> Recipe:
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import parse_with_diagnostics

    loaded = parse_with_diagnostics(f"* -> {text}", shown="--recipe")
    if loaded.diagnostics:
        raise PolicyError(loaded.diagnostics)
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
        with atomic_write(path) as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # the stubs take the names for options
    except OSError as error:
        raise click.UsageError(f"cannot write '{path}': {error.strerror}") from None
