"""Losses whose stacks are divided over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.stacks.base import STACK, D, each, layer, program, scan, take, w


def mesh(**sizes: int) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


EIGHT = {"layers": {"up": w(8), "down": w(8)}}


@program(EIGHT)
def stages_on_devices(p, x):
    def stage(stack, h):
        for _ in range(2):
            h = lax.ppermute(scan(stack, h), "s", [(i, (i + 1) % 2) for i in range(2)])
        return h

    call = jax.shard_map(stage, mesh=mesh(s=2), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def gathered_shards(p, x):
    def body(stack, h):
        whole = each(lambda a: lax.all_gather(a, "s", tiled=True), stack)
        return scan(take(whole, slice(None, None, -1)), h)

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def layers_by_device_number(p, x):
    def body(stack, h):
        return layer(take(stack, lax.axis_index("s")), h)[None]

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P(), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(STACK)
def columns_on_devices(p, x):
    def body(stack, h):
        def step(h, q):
            return h + lax.psum(jnp.tanh(h @ q["up"]) @ q["down"], "t"), None

        return lax.scan(step, h, take(stack, slice(None, None, -1)))[0]

    specs = {"up": P(None, None, "t"), "down": P(None, "t", None)}
    call = jax.shard_map(body, mesh=mesh(t=2), in_specs=(specs, P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def shards_over_two_axes(p, x):
    def body(stack, h):
        return scan(stack, h)[None]

    call = jax.shard_map(
        body, mesh=mesh(a=2, b=2), in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")), check_vma=False
    )
    return call(p["layers"], x).sum()


@program(STACK)
def scan_around_a_shard_map(p, x):
    call = jax.shard_map(layer, mesh=mesh(d=2), in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False)
    return lax.scan(lambda h, q: (call(q, h), None), x, p["layers"], reverse=True)[0].sum()


@program(EIGHT)
def ring_of_weights(p, x):
    """Devices pass their layers around."""

    def body(stack, h):
        def turn(carry, _):
            h, stack = carry
            h = layer(take(stack, 0), h)
            return (
                h,
                each(lambda a: lax.ppermute(a, "s", [(i, (i + 1) % 8) for i in range(8)]), stack),
            ), None

        return lax.scan(turn, (h, stack), length=8)[0][0][None]

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def summed_over_devices(p, x):
    def body(stack, h):
        return layer(each(lambda a: lax.psum(a, "s")[0], stack), h)

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def same_place_on_every_device(p, x):
    def body(stack, h):
        return layer(take(stack, 1), layer(take(stack, 0), h))[None]

    call = jax.shard_map(body, mesh=mesh(s=4), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def stacks_divided_along_different_axes(p, x):
    def body(up, down, h):
        def step(h, q):
            return layer({"up": q[0], "down": q[1]}, h), None

        return lax.scan(step, h, (up, down))[0][None]

    call = jax.shard_map(
        body,
        mesh=mesh(a=2, b=2),
        in_specs=(P("a"), P("b"), P()),
        out_specs=P(("a", "b")),
        check_vma=False,
    )
    return call(p["layers"]["up"], p["layers"]["down"], x).sum()


@program(EIGHT)
def gathered_over_one_of_two_axes(p, x):
    def body(stack, h):
        half = each(lambda a: lax.all_gather(a, "b", tiled=True), stack)
        return scan(half, h)[None]

    call = jax.shard_map(
        body, mesh=mesh(a=2, b=2), in_specs=(P(("a", "b")), P()), out_specs=P(("a", "b")), check_vma=False
    )
    return call(p["layers"], x).sum()


@program(EIGHT)
def device_order_reversed(p, x):
    def body(stack, h):
        return scan(take(stack, slice(None, None, -1)), h)[None]

    call = jax.shard_map(body, mesh=mesh(s=4), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(take(p["layers"], slice(None, None, -1)), x).sum()


@program(EIGHT)
def gathered_untiled(p, x):
    def body(stack, h):
        whole = each(lambda a: lax.all_gather(a, "s"), stack)
        return scan(each(lambda a: a.reshape(8, D, D), whole), h)

    call = jax.shard_map(body, mesh=mesh(s=4), in_specs=(P("s"), P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def gathered_over_both_axes_in_turn(p, x):
    def body(stack, h):
        half = each(lambda a: lax.all_gather(a, "b", tiled=True), stack)
        return scan(each(lambda a: lax.all_gather(a, "a", tiled=True), half), h)

    call = jax.shard_map(
        body, mesh=mesh(a=2, b=2), in_specs=(P(("a", "b")), P()), out_specs=P(), check_vma=False
    )
    return call(p["layers"], x).sum()


@program(EIGHT)
def gathered_in_the_wrong_order(p, x):
    def body(stack, h):
        half = each(lambda a: lax.all_gather(a, "a", tiled=True), stack)
        return scan(each(lambda a: lax.all_gather(a, "b", tiled=True), half), h)

    call = jax.shard_map(
        body, mesh=mesh(a=2, b=2), in_specs=(P(("a", "b")), P()), out_specs=P(), check_vma=False
    )
    return call(p["layers"], x).sum()


@program(EIGHT)
def gathered_over_the_axis_that_does_not_divide(p, x):
    def body(stack, h):
        twice = each(lambda a: lax.all_gather(a, "b", tiled=True), stack)
        return scan(twice, h)[None]

    call = jax.shard_map(body, mesh=mesh(a=2, b=2), in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)
    return call(p["layers"], x).sum()


@program(STACK)
def rows_gathered_per_layer(p, x):
    def body(stack, h):
        def step(h, q):
            return layer(each(lambda a: lax.all_gather(a, "s", tiled=True), q), h), None

        return lax.scan(step, h, stack, reverse=True)[0]

    specs = {"up": P(None, "s"), "down": P(None, "s")}
    call = jax.shard_map(body, mesh=mesh(s=2), in_specs=(specs, P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()


@program(STACK)
def columns_gathered_per_layer(p, x):
    def body(stack, h):
        def step(h, q):
            return layer(each(lambda a: lax.all_gather(a, "s", axis=1, tiled=True), q), h), None

        return lax.scan(step, h, stack)[0]

    specs = {"up": P(None, None, "s"), "down": P(None, None, "s")}
    call = jax.shard_map(body, mesh=mesh(s=2), in_specs=(specs, P()), out_specs=P(), check_vma=False)
    return call(take(p["layers"], slice(None, None, -1)), x).sum()


@program(EIGHT)
def layers_gathered_as_columns(p, x):
    def body(stack, h):
        wide = lax.all_gather(stack["up"][0], "s", axis=1, tiled=True)
        return jnp.tanh(h @ wide)[None]

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def layers_gathered_as_rows(p, x):
    def body(stack, h):
        tall = lax.all_gather(stack["up"][0], "s", tiled=True)
        return jnp.tanh(jnp.tile(h, (1, 8)) @ tall)[None]

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P("s"), check_vma=False)
    return call(p["layers"], x).sum()


@program(EIGHT)
def layers_stacked_over_devices(p, x):
    def body(stack, h):
        whole = each(lambda a: lax.all_gather(a[0], "s"), stack)
        return scan(whole, h)

    call = jax.shard_map(body, mesh=mesh(s=8), in_specs=(P("s"), P()), out_specs=P(), check_vma=False)
    return call(p["layers"], x).sum()
