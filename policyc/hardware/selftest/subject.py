"""The subject of a check (a format of a backend on the devices here), the reference on the CPU, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from policyc.language.loader import parse
from policyc.language.recipes import Gemm, Recipe, Treatment
from policyc.numerics import backends
from policyc.numerics.backends import Backend, GemmQuery

SIZE = 512
"""Rows, columns and contracted size of the GEMM that backends are asked about: all kernels take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A format of a backend. `native` says whether the matrix units here multiply it."""

    backend: str
    format: str
    native: bool
    quick: bool

    @property
    def implementation(self) -> Backend:
        return backends.load(self.backend)

    def takes(self, treatment: Treatment, gemm: Gemm = Gemm.WGRAD) -> bool:
        """Whether the backend runs a GEMM whose operands are treated like this."""
        ragged = self.implementation.only_ragged
        query = GemmQuery(gemm=gemm, left=treatment, right=treatment, m=SIZE, n=SIZE, k=SIZE, ragged=ragged)
        return self.implementation.obstacle(query) is None


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison: what was compared, and the fault that was found; empty if there is none."""

    what: str
    fault: str = ""


CheckFunction = Callable[[Subject], Iterator[Finding]]


def reference_device() -> jax.Device:
    """The device of the reference: a CPU, unless JAX may not use it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not name it
        return jax.devices()[0]


def run_on(device: jax.Device, f: Callable[..., Any], *args: Any) -> Any:
    """The result of a jitted function on a device, in host memory."""
    return jax.device_get(jax.jit(f)(*jax.device_put(args, device)))


def read_recipe(text: str) -> Recipe:
    """Parses a recipe in the policy language."""
    policy = parse(f"* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


def make_tensor(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers in bfloat16, with some large ones. Their magnitude changes every 16 rows.

    Within 16 rows, magnitudes span 15 binades. So fp32 sums of 16 are exact, and a rotation gives the same bits on all
    devices.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)).clip(-4, 4)
    x = np.where(rng.random(x.shape) < 0.001, 8 * x, x)
    x = np.where(np.abs(x) < 2**-10, 0, x) * np.exp2(np.arange(rows) // 16 % 5)[:, None]
    return x.astype(jax.numpy.bfloat16)


def relative_error(a: Any, b: Any) -> float:
    """The norm of the difference of two trees of arrays, relative to the norm of the second."""
    one, other = (
        np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])
        for tree in (a, b)
    )
    return float(np.linalg.norm(one - other)) / max(float(np.linalg.norm(other)), 1e-30)


def three_products(f: Callable[..., Any], x: Any, w: Any, dy: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result of `f(x, w)`, and the cotangents of x and w for `dy`."""
    y, vjp = jax.vjp(f, x, w)
    return (y, *vjp(dy.astype(y.dtype)))
