"""The table of primitives: every primitive of the installed JAX is in it, or was reviewed and needs no row.

The oracle of the rules is JAX: it runs the operation on integers, and on the numbers of elements.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from policyc.compiler.weights.provenance.integers import LoopIterations, carried_integers, constant_value
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import CONTAINERS, OPAQUE
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES, rule_of
from policyc.jaxcore.primitives.regions import Move

LOST = """
    after_all approx_top_k axis_index bitcast_convert_type cholesky cholesky_update complex create_token cumlogsumexp
    custom_linear_solve dce_sink eig eigh empty empty2 eq_to eval_jaxpr fft from_edtype geqp3 geqrf hessenberg
    householder_product igamma_grad_a le_to lt_to lu lu_pivots_to_permutation ormqr platform_index qr reduce
    reduce_window reduce_window_max reduce_window_min reduce_window_sum rng_bit_generator rng_uniform schur
    select_and_gather_add select_and_scatter select_and_scatter_add stage svd symmetric_product tie top_k
    triangular_solve tridiagonal tridiagonal_solve
"""
"""What these compute from parameters alone is lost, with their names, and none of them computes indices."""

COLLECTIVES = """
    all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start pbroadcast_done
    pbroadcast_dynamic pbroadcast_start ppermute_done ppermute_start precv psend psum_done psum_invariant_start
    psum_start ragged_all_to_all reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin unreduced_psum
    unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
"""
"""Collectives that lose a weight, with their names."""

CALLS = "composite program_order"
"""These contain a jaxpr that is not entered: what they compute from parameters is lost, and their GEMMs are opaque."""

REVIEWED = {*LOST.split(), *COLLECTIVES.split(), *CALLS.split()}


def lax_modules() -> Iterator[ModuleType]:
    package = importlib.import_module("jax._src.lax")
    yield lax
    for module in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{module.name}")


def test_every_primitive_of_lax_has_a_row_or_was_reviewed() -> None:
    """A new release of JAX fails here. Give each name a row in `PRIMITIVES`, or list it above."""
    names = {v.name for m in lax_modules() for v in vars(m).values() if isinstance(v, Primitive)}
    assert {"add", "scan", "sort"} <= names
    assert sorted(names - PRIMITIVES.keys() - CONTAINERS.keys() - OPAQUE.keys() - REVIEWED) == []


def test_what_is_reviewed_has_no_row() -> None:
    assert sorted(REVIEWED & PRIMITIVES.keys()) == []


# ---- integers

A = np.array([[5, -7, 0, 3], [2, 2, -1, 127], [-128, 9, 4, 6]])
B = np.array([[2, 3, -5, 0], [1, -2, 7, 4], [3, 3, 2, -6]])
TABLE = np.array([3, 1, 4, 1, 5, 9, 2, 6])
OPERATIONS: dict[str, Callable[..., Any]] = {
    name: partial(getattr(lax, name))
    for name in ("add", "sub", "mul", "max", "min", "rem", "eq", "ne", "lt", "le", "gt", "ge")
} | {
    "div": lambda a, b: lax.div(a, jnp.where(b == 0, 1, b)),
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "not": lambda a, _: lax.bitwise_not(a),
    "shift_left": lambda a, b: lax.shift_left(a, b & 3),
    "shift_right_arithmetic": lambda a, b: lax.shift_right_arithmetic(a, b & 3),
    "neg": lambda a, _: -a,
    "abs": lambda a, _: jnp.abs(a),
    "sign": lambda a, _: jnp.sign(a),
    "integer_pow": lambda a, _: lax.integer_pow(a, 3),
    "square": lambda a, _: lax.square(a),
    "clamp": lambda a, b: lax.clamp(jnp.full_like(a, -2), a, b),
    "select_n": lambda a, b: lax.select_n(a > b, a, b),
    "copy": lambda a, _: jnp.copy(a),
    "name": lambda a, _: checkpoint_name(a, "x"),
    "stop_gradient": lambda a, _: lax.stop_gradient(a),
    "convert_element_type": lambda a, _: lax.convert_element_type(a, jnp.int16),
    "reshape": lambda a, _: a.reshape(2, 6),
    "squeeze": lambda a, _: lax.squeeze(a[:, :1], (1,)),
    "broadcast_in_dim": lambda a, _: lax.broadcast_in_dim(a, (3, 2, 4), (0, 2)),
    "transpose": lambda a, _: a.T,
    "concatenate": lambda a, b: jnp.concatenate([a, b], 1),
    "stack": lambda a, b: jnp.stack([a, b], 1),
    "tile": lambda a, _: jnp.tile(a, (2, 3)),
    "rev": lambda a, _: a[::-1],
    "slice": lambda a, _: lax.slice(a, (0, 1), (3, 4), (2, 1)),
    "dynamic_slice": lambda a, b: lax.dynamic_slice(a, (b[0, 0], b[0, 1]), (2, 2)),
    "gather": lambda a, b: jnp.asarray(TABLE)[b & 7] + jnp.asarray(a)[:, b[0] & 3],
    "iota": lambda a, _: lax.broadcasted_iota(jnp.int32, (3, 4), 1) + a,
    "sort": lambda a, _: jnp.sort(a, 1),
    "argmax": lambda a, _: jnp.argmax(a, 1),
    "argmin": lambda a, b: jnp.argmin(b == a[0, 3], 0),
    "cumsum": lambda a, _: lax.cumsum(a, 1, reverse=True),
    "cumprod": lambda a, _: lax.cumprod(a, 0),
    "cummax": lambda a, _: lax.cummax(a, 1),
    "cummin": lambda a, _: lax.cummin(a, 1, reverse=True),
    "reduce_sum": lambda a, _: a.sum(1),
    "reduce_prod": lambda a, _: a.prod(),
    "reduce_max": lambda a, _: a.max(0),
    "reduce_min": lambda a, _: a.min(),
    "reduce_and": lambda a, b: (a > b).all(0),
    "reduce_or": lambda a, b: (a > b).any(1),
    "reduce_xor": lambda a, _: lax.reduce_xor(a, (0,)),
}


SIGNED = {"abs", "sign", "neg"}
"""JAX has these for signed integers only, or gives them another meaning."""


@cache
def results_of_jax(dtype: str) -> dict[str, Any]:
    """All operations in one compiled function."""
    operations = {n: f for n, f in OPERATIONS.items() if dtype != "uint8" or n not in SIGNED}
    compute = jax.jit(lambda a, b: {name: operation(a, b) for name, operation in operations.items()})
    return compute(A.astype(dtype), B.astype(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in OPERATIONS for d in ("int8", "int32", "uint8") if d != "uint8" or n not in SIGNED],
)
def test_integers_are_those_of_jax(name: str, dtype: str) -> None:
    """Evaluated as the carry of a loop of two iterations, in which the second repeats the first."""
    a, b = A.astype(dtype), B.astype(dtype)
    expected = results_of_jax(dtype)[name]

    def body(a: Any, b: Any, result: Any) -> Any:
        del result
        return a, b, OPERATIONS[name](a, b)

    jaxpr = jax.make_jaxpr(body)(a, b, expected)
    assert name in {jaxprs.primitive_name(eqn) for eqn in jaxprs.all_equations(jaxpr)}
    carry = [constant_value(v, jax.typeof(v)) for v in (a, b, np.zeros_like(expected))]
    result = carried_integers(jaxpr, [], carry, [], LoopIterations((0,), 2, reverse=False))[2]
    assert result is not None
    assert not result.unknown
    value = result.evaluate({(0,): 1})
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


def test_every_rule_for_integers_is_tested() -> None:
    rules = {name for name, rule in PRIMITIVES.items() if rule.integers is not None}
    assert sorted(rules - OPERATIONS.keys()) == []


# ---- regions

SHAPE = (4, 3, 6)
MOVES: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda x: x.transpose(2, 0, 1),
    "reshape": lambda x: x.reshape(2, 2, 3, 6),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 4, 3, 6), (1, 2, 3)),
    "rev": lambda x: lax.rev(x, (0, 2)),
    "slice": lambda x: lax.slice(x, (1, 0, 1), (4, 3, 6), (2, 1, 3)),
    "split": lambda x: jnp.split(x, 3, axis=2)[1],
    "unstack": lambda x: jnp.unstack(x, axis=1)[2],
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 0, 2), (2, 3, 4)),
    "pad": lambda x: lax.pad(x, 0, ((1, 2, 0), (-1, 0, 0), (0, -2, 0))),
    "gather": lambda x: x[jnp.array([2, 0, 3])],
    "gather, negative": lambda x: x[jnp.array([-1, -3])],
    "gather, pairs": lambda x: x[jnp.array([[3, 1], [0, 2]])],
    "neg": lambda x: -x,
}


@pytest.mark.parametrize("name", MOVES)
def test_elements_come_from_where_jax_takes_them(name: str) -> None:
    """Each equation with a rule for regions, on the numbers of elements: any single element, and a box of several."""
    x = jnp.arange(1, 1 + int(np.prod(SHAPE))).reshape(SHAPE)
    jaxpr = jax.make_jaxpr(MOVES[name])(x)
    checked, padding = [], {0} if name == "pad" else set()
    env: dict[Any, Any] = dict(zip(jaxpr.jaxpr.invars, [x], strict=True))
    env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    for eqn in jaxpr.jaxpr.eqns:
        operands = [np.asarray(getattr(a, "val", None) if hasattr(a, "val") else env[a]) for a in eqn.invars]
        results = jaxprs.bind(eqn, *operands)
        env.update(zip(eqn.outvars, results, strict=True))
        rule = rule_of(eqn).region
        if rule is None or operands[0].ndim < 2:
            continue
        checked.append(jaxprs.primitive_name(eqn))
        for output, result in enumerate(results):
            move = Move(eqn, output, [partial(np.asarray, o) for o in operands[1:]])
            boxes = [tuple(range(i, i + 1) for i in index) for index in np.ndindex(*result.shape)]
            boxes.append(tuple(range(0, size, 2) for size in result.shape))
            for box in boxes:
                before = rule(move, box)
                taken = np.asarray(result)[np.ix_(*(np.asarray(i) for i in box))]
                read = operands[0][np.ix_(*(np.asarray(i) for i in before))]
                assert set(taken.ravel()) - padding == set(read.ravel()), (name, box, before)
    name = name.partition(",")[0]
    assert name in checked or PRIMITIVES[name].region is None
