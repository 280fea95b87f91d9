"""Cost of the checksum in the keys of stochastic rounding: quantizers with and without it, in one run.

    python -m benchmarks.rounding_keys --json rounding_keys.json

Without the checksum, only the maximum of the tensor is folded into the key. The last row is the key of MS-EDEN's signs:
a checksum of all elements, compared with the maximum of their magnitudes. On a GPU the array is 16384 x 14336; on a
CPU it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.command_line import make_parser
from benchmarks.timing import save, time_interleaved
from policyc.language.recipes import Treatment
from policyc.numerics.quantize import Axes, Quantized, Request, make_key, quantize
from policyc.numerics.quantize.reference import mx, nvfp4
from policyc.numerics.quantize.reference.bits import abs_bits
from policyc.numerics.quantize.reference.hadamard import Method
from policyc.numerics.quantize.reference.layout import Layout
from policyc.numerics.quantize.reference.random import Key, checksum

ROWS, COLUMNS = Axes(axis=-1), Axes(axis=-2)
QUANTIZERS: dict[str, tuple[Treatment, Axes]] = {
    "nvfp4 1x16, rows": (Treatment(format="nvfp4", element="e2m1", rounding="sr"), ROWS),
    "nvfp4 1x16, columns, rotated": (Treatment(format="nvfp4", element="e2m1", rounding="sr", rht=16), COLUMNS),
    "nvfp4 1x16, rows, outer=row": (Treatment(format="nvfp4", element="e2m1", rounding="sr", outer="row"), ROWS),
    "mxfp4 1x32, rows": (Treatment(format="mxfp4", element="e2m1", rounding="sr"), ROWS),
}  # fmt: skip


def _key_of_maximum(block_max: jax.Array, amax: jax.Array, request: Request, layout: Layout) -> Key:
    del block_max, layout
    return request.rounding_key.fold(amax)


@contextmanager
def without_checksum() -> Iterator[None]:
    modules: list[Any] = [nvfp4, mx]
    saved = [module.tensor_key for module in modules]
    for module in modules:
        module.tensor_key = _key_of_maximum
    try:
        yield
    finally:
        for module, function in zip(modules, saved, strict=True):
            module.tensor_key = function


def make_quantizers(name: str) -> dict[str, Callable[[jax.Array], Quantized]]:
    treatment, axes = QUANTIZERS[name]
    method: Method = "kernels" if jax.default_backend() == "gpu" else "cpu"

    def after(x: jax.Array) -> Quantized:
        return quantize(x, treatment, axes, key=make_key(1), method=method)

    def before(x: jax.Array) -> Quantized:
        with without_checksum():
            return after(x)

    return {"before": before, "after": after}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    shape = (16384, 14336) if jax.default_backend() == "gpu" else (1024, 1024)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    signs = {
        "before": lambda x: jnp.max(jnp.abs(x)).astype(jnp.float32),
        "after": lambda x: checksum(abs_bits(x)),
    }
    results: dict[str, Any] = {}
    cases = {name: make_quantizers(name) for name in QUANTIZERS} | {"signs of MS-EDEN": signs}
    for name, functions in cases.items():
        times = time_interleaved(functions, x, rounds=args.rounds)
        ratios = {kind: times["after"][kind] / times["before"][kind] for kind in ("median", "wall", "cpu")}
        results[name] = {**times, "ratio": ratios}
        print(
            f"{name:30s} {times['before']['median'] * 1e3:8.3f} -> {times['after']['median'] * 1e3:8.3f} ms   "
            f"median {ratios['median']:.3f}, least {ratios['wall']:.3f}, processor {ratios['cpu']:.3f}"
        )
    save(args.json, results)


if __name__ == "__main__":
    main()
