"""How a function is divided over devices: mesh axes of operands and results in, a division out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.jaxcore.primitives.partition import PartitionRule, ShardIndex, divide, partition

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
SIZES = {"m": 64, "k": 32, "n": 16}
# The product of (m, k) and (k, n). The operands have 16 elements for each index of k.
PRODUCT = PartitionRule(
    name="product",
    operands=((("m", 1), ("k", 16)), (("k", 16), ("n", 1))),
    results=((("m", 1), ("n", 1)),),
)


@pytest.mark.parametrize(
    ("left", "right", "result", "factors", "scattered"),
    [
        pytest.param(
            (("fsdp",), ()), (("fsdp",), ()), (("fsdp",), ()), {"m": ("fsdp",)}, ((), ()), id="fsdp, forward"
        ),
        pytest.param(
            ((), ("fsdp",)), (("fsdp",), ()), (("fsdp",), ()), {"k": ("fsdp",)}, (("fsdp",), ()), id="scattered"
        ),
        pytest.param(
            ((), ("fsdp",)), (("fsdp",), ()), ((), ()), {"k": ("fsdp",)}, ((), ()), id="reduced, not scattered"
        ),
        pytest.param(
            (("data", "fsdp"), ()), (("fsdp",), ("tensor",)), (("data", "fsdp"), ("tensor",)),
            {"m": ("data", "fsdp"), "n": ("tensor",)}, ((), ()), id="fsdp and tensor",
        ),
        pytest.param(
            (("fsdp",), ("tensor",)), (("tensor",), ("fsdp",)), (("fsdp",), ()),
            {"m": ("fsdp",), "k": ("tensor",)}, ((), ()), id="sum over tensor, weight gathered over fsdp",
        ),
        pytest.param(
            (("fsdp",), ()), ((), ("fsdp",)), ((), ("fsdp",)), {"n": ("fsdp",)}, ((), ()), id="as the result wants"
        ),
        pytest.param(((), ()), ((), ()), (("data",), ()), {"m": ("data",)}, ((), ()), id="only the result"),
        pytest.param(
            ((), ("fsdp",)), (("fsdp",), ("tensor",)), ((), ("tensor", "fsdp")),
            {"k": ("fsdp",), "n": ("tensor",)}, ((), ("fsdp",)), id="scattered within a shard",
        ),
    ],
)  # fmt: skip
def test_division_of_a_product(left: Any, right: Any, result: Any, factors: Any, scattered: Any) -> None:
    division = divide(PRODUCT, SIZES, MESH, (left, right), (result,))
    assert {name: axes for name, axes in division.factors.items() if axes} == factors
    assert division.scattered == (scattered,)
    assert not division.gathered


def test_a_factor_that_does_not_divide_is_gathered() -> None:
    division = divide(PRODUCT, SIZES | {"m": 6}, MESH, ((("fsdp",), ()), ((), ())), (((), ()),))
    assert division.factors["m"] == ()


def test_a_factor_that_only_results_have_is_not_divided() -> None:
    rule = PartitionRule(name="sums", operands=((("m", 1),),), results=((("numbers", 1),),))
    division = divide(rule, {"m": 64}, MESH, ((("fsdp",),),), ((("data",),),))
    assert dict(division.factors) == {"m": ("fsdp",), "numbers": ()}
    assert division.scattered == (((),),)


def test_a_whole_factor_is_not_divided() -> None:
    """It takes no mesh axis from another factor, and nothing is added over it."""
    rule = PartitionRule(
        name="scaled product",
        operands=(*PRODUCT.operands, (("k_whole", 1),)),
        results=PRODUCT.results,
        whole=frozenset({"k_whole"}),
    )
    operands = ((), ("fsdp",)), (("fsdp",), ()), (("tensor",),)
    division = divide(rule, SIZES | {"k_whole": 32}, MESH, operands, (((), ()),))
    assert {name: axes for name, axes in division.factors.items() if axes} == {"k": ("fsdp",)}
    assert division.summed == ("fsdp",)


@pytest.mark.parametrize(
    ("axes", "xla_scatters"), [("fsdp", True), (("data", "fsdp"), False)], ids=["one axis", "two axes"]
)
def test_who_scatters_a_sum(axes: Any, xla_scatters: bool) -> None:
    """XLA may, unless the sum is over other axes too: then it is scattered before it is added further."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    operands, results = ((("k", 1), ("m", 1)),), ((("m", 1),),)
    rule = PartitionRule(name="sum", operands=operands, results=results, xla_scatters=True)
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    sharded = jax.device_put(x, NamedSharding(mesh, P(axes)))
    outputs = (NamedSharding(mesh, P("fsdp")),)
    add = jax.jit(partition(lambda _, x: (jnp.sum(x, axis=0),), rule), out_shardings=outputs)
    compiled = add.lower(sharded).compile()
    np.testing.assert_array_equal(compiled(sharded)[0], np.sum(x, axis=0))
    assert ("reduce-scatter(" not in compiled.as_text()) == xla_scatters


def test_a_limit_gathers_and_says_why() -> None:
    rule = PartitionRule(
        name="kernel",
        operands=PRODUCT.operands,
        results=PRODUCT.results,
        limit=lambda sizes: "needs 32 rows" if sizes["m"] < 32 else "",
    )
    division = divide(rule, SIZES, MESH, ((("fsdp",), ()), ((), ("tensor",))), (((), ()),))
    assert division.factors == {"m": (), "k": (), "n": ()}
    assert "kernel: needs 32 rows" in division.gathered


def test_each_device_runs_the_function_on_its_shard() -> None:
    """Parts of a sum are added over devices, and every shard has another index."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "tensor"))

    def sum_rows(index: ShardIndex, x: Any) -> Any:
        flat = index.flat()
        return jnp.sum(x, axis=1), jnp.full(x.shape[:1], -1 if flat is None else flat)

    rows = (("rows", 1),)
    rule = PartitionRule(name="sum", operands=((*rows, ("columns", 4)),), results=(rows, rows))
    x = jnp.arange(64.0).reshape(8, 8)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data", "tensor")))
    sums, indices = jax.jit(partition(sum_rows, rule))(sharded)
    np.testing.assert_array_equal(sums, np.sum(x, axis=1))
    # The two shards of a row have the indices 2i and 2i + 1.
    np.testing.assert_array_equal(indices, np.repeat([1, 5, 9, 13], 2))
    np.testing.assert_array_equal(partition(sum_rows, rule)(x)[1], -1)


def test_an_index_says_where_a_result_is_scattered() -> None:
    columns = ((), ("fsdp",))
    division = divide(PRODUCT, SIZES, MESH, (((), ("fsdp",)), (("fsdp",), ())), (columns,))
    assert division.scattered == (columns,)
    assert ShardIndex(factors=division.factors, scattered=division.scattered).first_scattered() == 1
    assert ShardIndex(factors=division.factors, scattered=(((), ()),)).first_scattered() is None
    assert ShardIndex(factors={}).first_scattered() is None
