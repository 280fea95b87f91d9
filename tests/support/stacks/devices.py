"""Losses whose stacks are divided over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.stacks.base import STACK, each, layer, program, scan, take, w


def mesh(**sizes: int) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def divided(body: Any, in_specs: Any, out_specs: Any, **sizes: int) -> Any:
    return jax.shard_map(body, mesh=mesh(**sizes), in_specs=in_specs, out_specs=out_specs, check_vma=False)


EIGHT = {"layers": {"up": w(8), "down": w(8)}}


@program(EIGHT)
def weights_that_devices_pass_on(p, x):
    def stage(stack, h):
        return scan(each(lambda a: lax.ppermute(a, "s", [(0, 1), (1, 0)]), stack), scan(stack, h))

    return divided(stage, (P("s"), P()), P(), s=2)(p["layers"], x).sum()


@program(EIGHT)
def gathered_shards(p, x):
    def body(stack, h):
        whole = each(lambda a: lax.all_gather(a, "s", tiled=True), stack)
        return scan(take(whole, slice(None, None, -1)), h)

    return divided(body, (P("s"), P()), P(), s=8)(p["layers"], x).sum()


@program(EIGHT)
def layers_by_device_number(p, x):
    def body(stack, h):
        return layer(take(stack, lax.axis_index("s")), h)[None]

    return divided(body, (P(), P()), P("s"), s=8)(p["layers"], x).sum()


@program(EIGHT)
def shards_over_two_axes(p, x):
    def body(stack, h):
        return scan(stack, h)[None]

    return divided(body, (P(("a", "b")), P()), P(("a", "b")), a=2, b=2)(p["layers"], x).sum()


@program(STACK)
def scan_around_a_shard_map(p, x):
    call = divided(layer, (P(), P("d")), P("d"), d=2)
    return lax.scan(lambda h, q: (call(q, h), None), x, p["layers"], reverse=True)[0].sum()


@program(EIGHT)
def gathered_in_the_wrong_order(p, x):
    def body(stack, h):
        half = each(lambda a: lax.all_gather(a, "a", tiled=True), stack)
        return scan(each(lambda a: lax.all_gather(a, "b", tiled=True), half), h)

    return divided(body, (P(("a", "b")), P()), P(), a=2, b=2)(p["layers"], x).sum()


@program(EIGHT)
def gathered_over_the_axis_that_does_not_divide(p, x):
    def body(stack, h):
        twice = each(lambda a: lax.all_gather(a, "b", tiled=True), stack)
        return scan(twice, h)[None]

    return divided(body, (P("a"), P()), P("a"), a=2, b=2)(p["layers"], x).sum()


@program(STACK)
def rows_gathered_per_layer(p, x):
    def body(stack, h):
        def step(h, q):
            return layer(each(lambda a: lax.all_gather(a, "s", tiled=True), q), h), None

        return lax.scan(step, h, stack, reverse=True)[0]

    specs = {"up": P(None, "s"), "down": P(None, "s")}
    return divided(body, (specs, P()), P(), s=2)(p["layers"], x).sum()


@program(EIGHT)
def layers_gathered_as_columns(p, x):
    def body(stack, h):
        wide = lax.all_gather(stack["up"][0], "s", axis=1, tiled=True)
        return jnp.tanh(h @ wide)[None]

    return divided(body, (P("s"), P()), P("s"), s=8)(p["layers"], x).sum()
