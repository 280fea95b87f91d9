"""Signal-to-quantization-noise ratios of the formats in dB, on three distributions, for docs/reference/recipes.md.

    python -m benchmarks.sqnr [--samples 20]

Runs on any machine. The recipes are those of a forward operand, rounded to nearest.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import make_parser, print_header, print_row
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, dequantize, quantize
from policyc.numerics.quantize.reference.hadamard import rotate

TREATMENTS = {
    "`outer=tensor`": Treatment(format="nvfp4", element="e2m1"),
    "16x16, `outer=tensor`": Treatment(format="nvfp4", element="e2m1", tile2d=True),
    "rotated, `outer=tensor`": Treatment(format="nvfp4", element="e2m1", rht=16),
    "rotated, `outer=bound`": Treatment(format="nvfp4", element="e2m1", rht=16, outer="bound"),
    "`mxfp4`": Treatment(format="mxfp4", element="e2m1"),
    "`fp4`": Treatment(format="fp4", element="e2m1"),
}
SCALES = np.exp2(np.linspace(0, 1, 8, endpoint=False))
"""Power-of-two scales are rounded up by a factor of 1 to 2, so ratios are averaged over these sizes of a tensor."""


def sqnr(x: np.ndarray, treatment: Treatment) -> float:
    """The mean ratio over tensors of all `SCALES`, in dB."""
    run = jax.jit(lambda x: dequantize(quantize(x, treatment, Axes(axis=-1, tile=-2))))
    ratios = []
    for scale in SCALES:
        scaled = jnp.asarray((x * scale).astype(np.float32))
        exact = np.asarray(rotate(scaled, -1, treatment.rht) if treatment.rht else scaled, np.float64)
        noise = np.asarray(run(scaled), np.float64) - exact
        ratios.append(10 * np.log10(np.mean(exact**2) / np.mean(noise**2)))
    return float(np.mean(ratios))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=20, help="base-2 logarithm of their number")
    shape = (2 ** (parser.parse_args().samples - 10), 1024)
    generator = np.random.default_rng(0)
    draws = {
        "N(0,1)": generator.standard_normal(shape),
        "Laplace": generator.laplace(size=shape),
        "Student t(3)": generator.standard_t(3, shape),
    }
    print_header(["", *draws])
    for name, treatment in TREATMENTS.items():
        print_row([name, *(f"{sqnr(x, treatment):.2f}" for x in draws.values())])


if __name__ == "__main__":
    main()
