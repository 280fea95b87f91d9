"""The analysis: jaxpr in, sites out. Nothing is compiled or run.

A loss has its parameters in the first argument, and is traced with shapes only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from policyc.compiler.sites.site import Site, dotted
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct

FPROP, DGRAD, WGRAD = Gemm
W, X = struct(16, 32), struct(8, 16)
PARAMS = {"w": W}


def only_site(loss: Callable[..., Any], params: Any = PARAMS, *args: Any) -> Site:
    (site,) = find_sites(loss, params, *(args or (X,)))
    return site


# ---- which operand is the weight


Loss = Callable[..., Any]
SIZES: dict[str, tuple[Loss, Any, Any, tuple[str, str | None, int, int, int, int]]] = {
    "on the right": (lambda p, x: x @ p["w"], PARAMS, X, ("w", "rhs", 1, 8, 32, 16)),
    "on the left": (lambda p, x: p["w"].T @ x.T, PARAMS, X, ("w", "lhs", 1, 8, 32, 16)),
    "the right one of two parameters": (
        lambda p, x: (p["a"] @ p["b"]).sum() + x.sum(), {"a": X, "b": W}, X, ("b", "rhs", 1, 8, 32, 16),
    ),
    "a batch": (
        lambda p, x: jnp.einsum("ebd,edf->ebf", x, p["w"]),
        {"w": struct(3, 16, 32)}, struct(3, 8, 16), ("w", "rhs", 3, 8, 32, 16),
    ),
    "several contracted dimensions": (
        lambda p, x: jnp.einsum("bhd,hdf->bf", x, p["w"]),
        {"w": struct(2, 8, 32)}, struct(4, 2, 8), ("w", "rhs", 1, 4, 32, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("loss", "params", "x", "expected"), SIZES.values(), ids=SIZES.keys())
def test_the_weight_and_the_sizes_of_a_site(loss: Loss, params: Any, x: Any, expected: Any) -> None:
    """The sizes are those of `y = x W`, wherever the weight is."""
    site = only_site(loss, params, x)
    assert (site.name, site.weight, site.batch, site.m, site.n, site.k) == expected
    assert site.flops == 2 * site.batch * site.m * site.n * site.k
    assert (site.is_ragged, site.repeats, site.count) == (False, 1, 1)


# ---- what leaves a parameter a parameter


INDICES = np.array([2, 0, 1])
DERIVED: dict[str, Callable[[Any], Any]] = {
    "an elementwise function": jnp.sin,
    "two functions": lambda w: jnp.exp(w) + w.sum(),
    "a gelu": jax.nn.gelu,
    "a sum over rows": lambda w: jnp.cumsum(w, 0),
    "sorted": lambda w: jnp.sort(w, 0),
    "a Kronecker product": lambda w: jnp.kron(w, jnp.ones((1, 2))) * jnp.kron(w, jnp.ones((1, 2))),
    "rows": lambda w: jnp.pad(jnp.take(w, INDICES, axis=0), ((0, 13), (0, 0))),
    "rows of a range": lambda w: jnp.pad(w[jnp.arange(4) * 3], ((0, 12), (0, 0))),
    "along an axis": lambda w: jnp.take_along_axis(w, jnp.tile(jnp.arange(16)[:, None], (1, 32)), axis=0),
    "tiled": lambda w: jnp.tile(w, (1, 3)),
    "added at a place": lambda w: w.at[0].add(1.0),
    "set at a place": lambda w: w.at[INDICES].set(0.0),
    "a singular value decomposition": lambda w: jnp.linalg.svd(w)[0],
    "a loop": lambda w: lax.fori_loop(0, 3, lambda _, v: jnp.sort(v, 1) + w, w),
}


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_what_is_computed_from_a_parameter_alone_is_a_weight(derive: Callable[[Any], Any]) -> None:
    site = only_site(lambda p, x: x @ derive(p["w"]))
    assert (site.name, site.weight) == ("w", "rhs")
    assert site.products == {FPROP, WGRAD}, "a gradient flows through it"


@pytest.mark.parametrize(
    "move", [lambda arrays: jax.device_put(arrays, jax.devices()[0]), lax.optimization_barrier]
)
def test_arrays_that_one_equation_moves_keep_their_names(move: Callable[[Any], Any]) -> None:
    def loss(p: Any, frozen: Any, x: Any) -> Any:
        a, b = move((p["a"], p["b"]))
        x, w = move((x, frozen["w"]))
        return x @ a @ b @ w

    sites = find_sites(loss, {"a": W, "b": struct(32, 16)}, {"w": W}, X)
    assert [site.name for site in sites] == ["a", "b", "frozen.w"]


def test_a_branch_that_takes_another_parameter_is_named_by_both() -> None:
    params = {"a": W, "b": W}
    site = only_site(
        lambda p, x: x @ lax.cond(x[0, 0] > 0, lambda a, b: a, lambda a, b: b, p["a"], p["b"]), params
    )
    assert site.weight == "rhs"
    assert {dotted(template.path) for template in site.parameters} == {"a", "b"}
    assert site.products == {FPROP, WGRAD}


# ---- lookups


def test_rows_that_are_looked_up_are_activations() -> None:
    sites = find_sites(
        lambda p, ids: p["embed"][ids] @ p["w"],
        {"embed": struct(100, 16), "w": W},
        struct(8, dtype=jnp.int32),
    )
    (site,) = sites
    assert (site.name, site.weight, site.products) == ("w", "rhs", {FPROP, DGRAD, WGRAD})
    assert [dotted(path) for path in sites.looked_up] == ["embed"]
    site = only_site(
        lambda p, ids, x: p["embed"][ids] @ x, {"embed": struct(100, 16)}, struct(8, dtype=jnp.int32), W
    )
    assert site.weight is None


def test_rows_that_each_of_several_models_looks_up_are_activations() -> None:
    """Whole rows of all models have the shape of a matrix."""

    def model(p: Any, tokens: Any) -> Any:
        rows = p["embedding"][tokens]
        return rows.T @ jnp.tanh(rows @ p["w"])

    params = {"embedding": struct(2, 64, 16), "w": struct(2, 16, 32)}
    f = jax.vmap(model, in_axes=(0, None))
    first, second = find_sites(lambda p, t: f(p, t).sum(), params, struct(8, dtype=jnp.int32))
    assert (first.name, first.weight, second.weight) == ("w", "rhs", None)


def test_a_matrix_that_is_looked_up_in_a_stack_is_a_weight() -> None:
    """As in a circular pipeline, where every stage takes the weights of its present round."""

    def loss(params: Any, x: Any) -> Any:
        stages, rounds = params["w"].shape[:2]
        now = jnp.arange(stages) % rounds
        taken = jax.vmap(lambda w, i: lax.dynamic_index_in_dim(w, i, keepdims=False))(params["w"], now)
        return jnp.einsum("sd,sdf->sf", x, taken)

    site = only_site(loss, {"w": struct(2, 3, 16, 32)}, struct(2, 16))
    assert (site.name, site.weight, site.batch, site.k) == ("w", "rhs", 2, 16)


# ---- containers


def in_scan(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: lax.scan(lambda h, _: (h + f(w, x).sum(), None), 0.0, None, length=3)[0]


def in_while(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: lax.while_loop(lambda h: h < 3, lambda h: h + f(w, x).sum(), 0.0)


def in_condition(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: lax.while_loop(lambda h: h < f(w, x).sum(), lambda h: h + 1, 0.0)


def in_branch(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: lax.cond(
        x[0, 0] > 0, lambda w, x: f(w, x).sum().astype(float), lambda w, x: x.sum(), w, x
    )


def in_shard_map(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))


@pytest.mark.parametrize(
    "container",
    [jax.jit, jax.checkpoint, in_scan, in_while, in_condition, in_branch, in_shard_map],
    ids=["jit", "checkpoint", "scan", "body of while", "condition of while", "cond", "shard_map"],
)
def test_a_weight_is_followed_into_a_container(container: Any) -> None:
    f = container(lambda w, x: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    sites = find_sites(lambda p, x: f(p["mlp"]["w"], x), {"mlp": {"w": W}}, X)
    (site,) = sites
    assert (site.name, site.weight, site.opaque) == ("mlp.w", "rhs", "")
    assert (site.m, site.n, site.k) == (4 if container is in_shard_map else 8, 32, 16)
    assert site.takes_extra_inputs is (container is not in_shard_map)
    assert sites.equation(site).axis_env.axes == ((("data", 2),) if container is in_shard_map else ())
    assert site.is_reused is (container in (jax.checkpoint, in_scan, in_while, in_condition))


# ---- what is no site


@pytest.mark.parametrize(
    "loss",
    [
        lambda p, x: jnp.einsum("i,j->ij", x[0], p["w"][0]),
        lambda p, x: jnp.einsum("bi,bi->bi", x, p["w"][:8, :16]),
        lambda p, x: x[:, :1] @ p["w"][:1],
        lambda p, x: x.astype(jnp.int32) @ p["w"].astype(jnp.int32),
        lambda p, x: x[:0] @ p["w"],
    ],
    ids=["outer product", "elementwise", "one number contracted", "integers", "nothing"],
)
def test_a_dot_that_contracts_nothing_is_no_site(loss: Any) -> None:
    assert len(find_sites(loss, PARAMS, X)) == 0


# ---- opaque sites


def with_own_backward(x: Any, w: Any) -> Any:
    f = jax.custom_vjp(lambda x, w: x @ w)
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    return f(x, w)


def with_own_derivative(x: Any, w: Any) -> Any:
    f = jax.custom_jvp(lambda x, w: x @ w)
    f.defjvp(lambda primals, tangents: (f(*primals), primals[0] @ tangents[1]))
    return f(x, w)


def in_kernel(x: Any, w: Any) -> Any:
    from jax.experimental import pallas

    def kernel(x: Any, w: Any, y: Any) -> None:
        y[...] = x[...] @ w[...]

    return pallas.pallas_call(kernel, out_shape=struct(8, 32), interpret=True)(x, w)


def in_unknown_container(x: Any, w: Any) -> Any:
    call = Primitive("mystery_call")
    call.multiple_results = True
    call.def_abstract_eval(lambda *_, jaxpr: [v.aval for v in jaxpr.jaxpr.outvars])
    return call.bind(x, w, jaxpr=jax.make_jaxpr(jnp.matmul)(x, w))[0]


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (with_own_backward, "jax.custom_vjp"),
        (with_own_derivative, "jax.custom_jvp"),
        (in_kernel, "a Pallas kernel"),
        (in_unknown_container, "'mystery_call', which the compiler does not know"),
    ],
)
def test_a_product_in_a_container_that_is_not_entered_is_opaque(product: Any, reason: str) -> None:
    """The weight has its name all the same, so that a rule matches it and an error can say so."""
    sites = find_sites(
        lambda p, x: jax.jit(product)(x, p["w"].astype(jnp.bfloat16).astype(jnp.float32)), PARAMS, X
    )
    (site,) = sites
    assert (site.name, site.weight) == ("w", "rhs")
    assert reason in site.opaque
    assert sites.equation(site).origin is None


def test_what_is_inside_an_opaque_container_is_opaque() -> None:
    site = only_site(lambda p, x: with_own_backward(x, p["w"]).sum())
    nested = only_site(
        lambda p, x: lax.scan(
            lambda h, _: (h + with_own_backward(x, p["w"]).sum(), None), 0.0, None, length=2
        )
    )
    assert site.opaque == nested.opaque
    f = jax.custom_vjp(lambda x, w: jax.jit(jnp.matmul)(x, w))
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    assert "custom_vjp" in only_site(lambda p, x: f(x, p["w"])).opaque


def test_float64_has_no_recipe() -> None:
    with jax.enable_x64(True):
        site = only_site(
            lambda p, x: x @ p["w"],
            {"w": struct(16, 32, dtype=jnp.float64)},
            struct(8, 16, dtype=jnp.float64),
        )
    assert "float64" in site.opaque


GROUPS = struct(2, dtype=jnp.int32)


def test_a_ragged_product_of_another_form_is_opaque() -> None:
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    site = only_site(
        lambda p, x, sizes: lax.ragged_dot_general(x, p["w"], sizes, dims),
        {"w": struct(2, 32, 16)},
        X,
        GROUPS,
    )
    assert (site.is_ragged, site.name, site.n) == (True, "w", 32)
    assert "ragged" in site.opaque


@pytest.mark.skipif(not hasattr(jax.nn, "scaled_matmul"), reason="this JAX has no jax.nn.scaled_matmul")
def test_jax_nn_scaled_matmul_is_opaque() -> None:
    def loss(p: Any, x: Any) -> Any:
        scales = [jnp.ones((1, rows, 2), jnp.float8_e8m0fnu) for rows in (8, 32)]
        a, b = (v.astype(jnp.float8_e4m3fn)[None] for v in (x, p["w"]))
        return jax.nn.scaled_matmul(a, b, *scales)

    sites = find_sites(loss, {"w": struct(32, 64)}, struct(8, 64))
    assert [(s.name, s.weight, s.k) for s in sites] == [("w", "rhs", 64)]
    assert "jax.nn.scaled_matmul" in sites.sites[0].opaque


@pytest.mark.skipif(not hasattr(lax, "scaled_dot"), reason="this JAX has no jax.lax.scaled_dot")
def test_lax_scaled_dot_is_opaque() -> None:
    def loss(p: Any, x: Any) -> Any:
        a, b = (v.astype(jnp.float8_e4m3fn) for v in (x, p["w"]))
        scales = {
            "lhs_scale": jnp.ones((8, 2), jnp.float8_e8m0fnu),
            "rhs_scale": jnp.ones((2, 32), jnp.float8_e8m0fnu),
        }
        return lax.scaled_dot(a, b, **scales, preferred_element_type=jnp.float32)

    sites = find_sites(loss, {"w": struct(64, 32)}, struct(8, 64))
    assert [(s.name, s.weight, s.m, s.n, s.k) for s in sites] == [("w", "rhs", 8, 32, 64)]
    assert "jax.lax.scaled_dot" in sites.sites[0].opaque


# ---- weights that can be quantized outside the loss


@pytest.mark.parametrize(
    "derive",
    [
        lambda w, x: jnp.broadcast_to(w, (2, 16, 32))[0],
        lambda w, x: lax.dynamic_slice_in_dim(w, jnp.argmax(x), 16),
        lambda w, x: jnp.pad(w, ((0, 0), (0, 4))),
    ],
    ids=["becomes larger", "depends on the data", "padded"],
)
def test_a_weight_that_is_better_quantized_where_it_is_used(derive: Any) -> None:
    sites = find_sites(lambda p, x: x @ derive(p["w"], x), PARAMS, X)
    (site,) = sites
    assert site.weight == "rhs"
    assert sites.equation(site).origin is None


# ---- primitives that are called like those of policyc


@pytest.mark.parametrize("name", ["my_quantize", "scaled_gemm", "mxfp8_quantize"])
def test_a_primitive_that_is_called_like_one_of_policyc_does_not_hide_a_gemm(name: str) -> None:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return primitive.bind(x) @ w

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))
    site = only_site(lambda p, x: product(x, p["w"]))
    assert site.name == "w"
    assert "jax.custom_vjp" in site.opaque


def test_a_stacked_list_of_layers_is_named_without_the_index_of_the_layer_only() -> None:
    """Two numbered linears of a block, as in `block_0/ffn_0` and `block_0/ffn_1`, keep their own numbers."""
    layer = {"ffn_0": struct(16, 32), "ffn_1": struct(32, 16)}

    def loss(params: Any) -> Any:
        stacked = jax.tree.map(lambda *weights: jnp.stack(weights), *params.values())
        return lax.scan(lambda x, w: (x + (x @ w["ffn_0"]) @ w["ffn_1"], None), jnp.ones((4, 16)), stacked)[
            0
        ].sum()

    sites = find_sites(loss, {f"block_{number}": layer for number in range(3)})
    assert [site.name for site in sites] == ["block.ffn[0]", "block.ffn[1]"]
