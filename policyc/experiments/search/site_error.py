"""Measures the error of a recipe at one site, where the site runs: a plain GEMM with a tap for error sums.

The forward pass is the plain one, so all sites are measured at once and their errors do not mix. The backward pass
computes the recipe's three products in addition to the plain ones. It returns the plain gradient of the activation, and
the recipe's gradient of the weight, whose error reaches the gradient of the parameter and no other site.

A probe, a random tangent z of all parameters, measures the effect of an error on their gradient g. The derivative L' of
the loss along z is <z, g>, so an error e in a result changes <z, g> by <dL'/dY, e>, and an error in the gradient of an
activation x by <dx/dz, e>. The mean square of either over random z is the squared norm of the change of g. Reverse-mode
differentiation of L' gives dL/dY as the cotangent of the tangent of Y, and dL'/dY as the cotangent of Y.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from policyc.compiler.planning.plan import Decision
from policyc.compiler.rewriting.rewrite import SiteInputs, SiteTemplate
from policyc.compiler.sites.site import Site
from policyc.experiments.taps import TapRewriter
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.numerics.dimensions import as_dimension_numbers, free_dims
from policyc.numerics.gemm import GemmOptions, quantized_dot_general

ERROR_SUMS = (
    "not_finite", "loss_squared", "loss_probe", "output_error", "output", "output_signal",
    "dgrad_probe", "dgrad_error", "dgrad", "dgrad_signal",
)  # fmt: skip
"""What a site measures, in this order: the number of results that are not finite although the operands are; the squares
of <dL/dY, e> and of <dL'/dY, e>, summed over rows, with e the error of the result; the squared norms of e and of the
result, and their inner product; the squares of <dx/dz, e>, summed over rows, with e the error of the activation's
gradient; and the same three sums for that gradient."""


@dataclass(frozen=True, eq=False)
class ScoredSite:
    """A site and the recipe whose error is measured."""

    site: Site
    eqn: JaxprEqn
    decision: Decision

    @property
    def dims(self) -> Any:
        return as_dimension_numbers(self.eqn.params["dimension_numbers"])

    def plain(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.asarray(jaxprs.bind(self.eqn, lhs, rhs)[0])

    def exact(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The plain product with its result in fp32, not rounded to the output type."""
        precision = self.eqn.params["precision"]
        return lax.dot_general(lhs, rhs, self.dims, precision=precision, preferred_element_type=jnp.float32)

    def quantized(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        options = GemmOptions(weight=self.site.weight, site=self.site.id, preferred_element_type=jnp.float32)
        return quantized_dot_general(lhs, rhs, self.dims, self.decision.applied_recipe, options)

    def with_tangent(self, lhs: Any, rhs: Any, d_lhs: Any, d_rhs: Any) -> tuple[Any, Any]:
        """The plain result and its tangent."""
        return jax.jvp(self.plain, (lhs, rhs), (d_lhs, d_rhs))

    def measure(
        self, operands: tuple[Any, Any], tangent: Any, cotangent: Any, probe: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradient of the weight under the recipe, and the error sums.

        `tangent` is that of the activation, `cotangent` is dL/dY, and `probe` is dL'/dY.
        """
        lhs, rhs = operands
        is_lhs_weight = self.site.weight == "lhs"
        dy = _wide(cotangent)
        y, y_vjp = jax.vjp(self.exact, lhs, rhs)
        q, q_vjp = jax.vjp(self.quantized, lhs, rhs)
        (lc, rc), (lb, rb) = self.dims
        free = len(free_dims(lhs.ndim, lc, lb)), len(free_dims(rhs.ndim, rc, rb))
        first = len(lb) + (0 if is_lhs_weight else free[0])  # the dimensions of y that come from the weight
        columns = tuple(range(first, first + free[0 if is_lhs_weight else 1]))
        x, w, contracted = (1, 0, rc) if is_lhs_weight else (0, 1, lc)
        gradients = q_vjp(dy)
        dx, dx_q = y_vjp(dy)[x], gradients[x]
        are_finite = jnp.all(jnp.isfinite(lhs)) & jnp.all(jnp.isfinite(rhs))
        sums = [
            jnp.sum(~jnp.isfinite(y)) * are_finite,
            _sum_squares(jnp.sum(dy * (q - y), columns)),
            _sum_squares(jnp.sum(_wide(probe) * (q - y), columns)),
            *_compare(y, q),
            _sum_squares(jnp.sum(_wide(tangent) * (_wide(dx_q) - _wide(dx)), contracted)),
            *_compare(dx, dx_q),
        ]
        return gradients[w], jnp.stack([s.astype(jnp.float32) for s in sums])

    def replace_weight(self, gradients: Sequence[Any], of_weight: Any) -> tuple[Any, Any]:
        """The gradients of lhs and rhs, with that of the weight replaced."""
        lhs, rhs = gradients
        return (of_weight, rhs) if self.site.weight == "lhs" else (lhs, of_weight)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _sum_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x * x)


def _compare(exact: jax.Array, rounded: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    a, error = _wide(exact), _wide(rounded) - _wide(exact)
    return _sum_squares(error), _sum_squares(a), jnp.sum(a * error)


# ---- with a probe


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_pair(scored: ScoredSite, primals: Any, tangents: Any, tap: Any) -> Any:
    del tap
    return scored.with_tangent(*primals, *tangents)


def _run_pair_fwd(scored: ScoredSite, primals: Any, tangents: Any, tap: Any) -> tuple[Any, Any]:
    return _run_pair(scored, primals, tangents, tap), (primals, tangents)


def _run_pair_bwd(scored: ScoredSite, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    primals, tangents = residuals
    _, vjp = jax.vjp(scored.with_tangent, *primals, *tangents)
    *of_primals, d_lhs, d_rhs = vjp(cotangents)
    tangent = tangents[1 if scored.site.weight == "lhs" else 0]
    of_weight, sums = scored.measure(primals, tangent, cotangents[1], cotangents[0])
    return tuple(of_primals), scored.replace_weight((d_lhs, d_rhs), of_weight), sums


_run_pair.defvjp(_run_pair_fwd, _run_pair_bwd)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_probed(scored: ScoredSite, lhs: Any, rhs: Any, tap: Any) -> Any:
    del tap
    return scored.plain(lhs, rhs)


@_run_probed.defjvp
def _run_probed_jvp(scored: ScoredSite, primals: Any, tangents: Any) -> Any:
    return _run_pair(scored, primals[:2], tuple(tangents[:2]), primals[2])


# ---- without a probe


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_unprobed(scored: ScoredSite, lhs: Any, rhs: Any, tap: Any) -> Any:
    del tap
    return scored.plain(lhs, rhs)


def _run_unprobed_fwd(scored: ScoredSite, lhs: Any, rhs: Any, tap: Any) -> tuple[Any, Any]:
    return _run_unprobed(scored, lhs, rhs, tap), (lhs, rhs)


def _run_unprobed_bwd(scored: ScoredSite, operands: Any, dy: Any) -> tuple[Any, ...]:
    _, vjp = jax.vjp(scored.plain, *operands)
    x = operands[1 if scored.site.weight == "lhs" else 0]
    of_weight, sums = scored.measure(operands, jnp.zeros_like(x), dy, jnp.zeros_like(dy))
    return *scored.replace_weight(vjp(dy), of_weight), sums


_run_unprobed.defvjp(_run_unprobed_fwd, _run_unprobed_bwd)


class ScoreRewriter(TapRewriter):
    """Replaces sites with scored ones, for a loss that is differentiated in forward mode (the probe), then reverse."""

    tap_shape: tuple[int, ...] = (len(ERROR_SUMS),)
    probes = True

    def make_template(self, site: Site, decision: Decision, inputs: SiteInputs) -> SiteTemplate:
        if not self.is_measured(site):
            raise AssertionError("only sites that can be measured are decided about")
        del inputs
        scored = ScoredSite(site, self.equations[site.address].eqn, decision)
        return self.tap(site, partial(_run_probed if self.probes else _run_unprobed, scored))


class UnprobedRewriter(ScoreRewriter):
    """Like `ScoreRewriter`, for a loss without a forward-mode derivative. The sums that need a probe are zero."""

    probes = False
