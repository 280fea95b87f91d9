"""Random programs for the compiler's property tests: nested scans, conds, remats, jits and dot_generals.

Every GEMM has its own name scope (`g0`, `g1`, ...), so that tests can find it in a gradient's jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import policyc
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import opaque_indices
from policyc.language.loader import parse

WIDTH, ROWS = 8, 4
Block = Callable[[Any, jax.Array], jax.Array]
Maker = Callable[[int, tuple[int, ...]], tuple[Any, Block]]
"""(maximum nesting depth, axes of the enclosing stacks) -> the parameters of a block, and the block."""


@dataclass
class Program:
    """A loss with its parameters and a batch."""

    loss: Callable[[Any, jax.Array], jax.Array]
    params: Any
    batch: jax.Array

    @property
    def args(self) -> tuple[Any, jax.Array]:
        return self.params, self.batch


@dataclass
class Builder:
    """Makes blocks: functions from parameters and an activation to an activation of the same shape."""

    random: np.random.Generator
    gemms: int = 0
    stacked: int = 0
    names: list[str] = field(default_factory=list)

    def weight(self, lead: tuple[int, ...], *shape: int) -> jax.Array:
        values = self.random.standard_normal((*lead, *shape)) / np.sqrt(WIDTH)
        # `jnp.asarray` would compile a program for every shape.
        return jax.device_put(values.astype(np.float32))

    def name(self) -> str:
        self.names.append(f"g{self.gemms}")
        self.gemms += 1
        return self.names[-1]

    def block(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        leaves, nests = self.leaves(), self.nests()
        kinds = leaves if depth == 0 else [*leaves[:2], *nests, *nests]
        return kinds[self.random.integers(len(kinds))](depth, lead)

    def leaves(self) -> list[Maker]:
        return [self.dense, self.left, self.einsum, self.pair, self.attention]

    def nests(self) -> list[Maker]:
        return [self.scanned, self.checkpointed, self.jitted, self.conditional, self.chained, self.looped]

    def gemm(
        self, lead: tuple[int, ...], shape: tuple[int, ...], multiply: Block, combine: Block, key: str = "w"
    ) -> tuple[Any, Block]:
        """A block with one GEMM, in a scope of its own: `combine(h, multiply(weight, h))`."""
        name = self.name()

        def f(p: Any, h: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                y = multiply(p[key], h)
            return combine(h, y)

        return {key: self.weight(lead, *shape)}, f

    def dense(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        return self.gemm(lead, (WIDTH, WIDTH), lambda w, h: h @ w, lambda h, y: h + jax.nn.relu(y))

    def left(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        return self.gemm(lead, (WIDTH, WIDTH), lambda w, h: w.T @ h.T, lambda h, y: h + jnp.tanh(y.T))

    def einsum(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        half = WIDTH // 2

        def multiply(w: jax.Array, h: jax.Array) -> jax.Array:
            x, w = h.reshape(ROWS, 2, half), w.astype(jnp.bfloat16)
            return jnp.einsum("rab,bace->rce", x, w, preferred_element_type=jnp.float32)

        return self.gemm(lead, (half, 2, 2, half), multiply, lambda h, y: h + jnp.sin(y.reshape(h.shape)))

    def pair(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        """A weight per expert, applied under vmap."""
        shape = 3, WIDTH, WIDTH
        return self.gemm(lead, shape, lambda w, h: jax.vmap(lambda m: h @ m)(w), lambda h, y: h + y.mean(0))

    def attention(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        """A product of two activations."""

        def combine(h: jax.Array, scores: jax.Array) -> jax.Array:
            return h + jax.nn.softmax(scores, -1).sum(-1, keepdims=True)

        return self.gemm(lead, (WIDTH,), lambda s, h: jnp.einsum("rd,sd->rs", h, h * s), combine, key="s")

    def scanned(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        length = int(self.random.integers(2, 5))
        params, inner = self.block(depth - 1, (*lead, length))
        reverse, unroll = bool(self.random.integers(2)), int(self.random.integers(1, 3))

        def f(p: Any, h: jax.Array) -> jax.Array:
            def body(h: jax.Array, layer: Any) -> tuple[jax.Array, jax.Array]:
                h = inner(layer, h)
                return h, h.mean(-1)

            with jax.named_scope("layers"):
                h, means = lax.scan(body, h, p["layers"], reverse=reverse, unroll=unroll)
            return h + 0.1 * jnp.cumsum(means, 0)[-1][:, None]

        return {"layers": params}, f

    def checkpointed(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        params, inner = self.block(depth - 1, lead)
        policies = [None, jax.checkpoint_policies.dots_saveable]
        return params, jax.checkpoint(inner, policy=policies[self.random.integers(2)])

    def jitted(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        params, inner = self.block(depth - 1, lead)
        return params, jax.jit(inner)

    def conditional(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        params, inner = self.block(depth - 1, lead)

        def f(p: Any, h: jax.Array) -> jax.Array:
            return lax.cond(h.mean() > -1e3, inner, lambda _, h: h, p, h)

        return params, f

    def chained(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        first, f = self.block(depth - 1, lead)
        second, g = self.block(depth - 1, lead)
        return {"a": first, "b": second}, lambda p, h: g(p["b"], f(p["a"], h))

    def looped(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        """A loop whose iterations all read the same weights."""
        params, inner = self.block(depth - 1, lead)
        return params, lambda p, h: lax.fori_loop(0, 2, lambda _, h: inner(p, h), h)


class CutGradientBuilder(Builder):
    """Makes blocks in which no gradient reaches some GEMMs. They have no remat, which would run products again."""

    def leaves(self) -> list[Maker]:
        return [self.dense, self.left, self.cut, self.cut, self.cut, self.attention]

    def nests(self) -> list[Maker]:
        return [self.scanned, self.jitted, self.conditional, self.chained, self.looped, self.carried]

    def cut(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        use = USES[self.random.integers(len(USES))]
        return self.gemm(lead, (WIDTH, WIDTH), lambda w, h: h @ w, use)

    def carried(self, depth: int, lead: tuple[int, ...]) -> tuple[Any, Block]:
        """A scan with two carries that swap places and a stacked output, only one of which is used."""
        params, inner = self.block(depth - 1, lead)
        used = int(self.random.integers(3))

        def f(p: Any, h: jax.Array) -> jax.Array:
            def body(carry: Any, _: None) -> Any:
                a, b = carry
                return (jnp.sin(b), inner(p, a)), inner(p, b)

            (a, b), stacked = lax.scan(body, (h, h), None, length=2)
            return h + (a, b, stacked[-1])[used]

        return params, f


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defjvps(lambda t, _, __: t)  # type: ignore[no-untyped-call]


USES: list[Callable[[jax.Array, jax.Array], jax.Array]] = [
    lambda h, y: h + y,
    lambda h, y: h,
    lambda h, y: h + lax.stop_gradient(y),
    lambda h, y: h + jnp.round(y),
    lambda h, y: h + straight_through(y),
    lambda h, y: h + y.argmax(-1)[:, None],
    lambda h, y: jnp.where(y > 0, h, 2 * h),
    lambda h, y: h + y.astype(jnp.int32),
    lambda h, y: h + lax.optimization_barrier((y, jnp.cos(h)))[1],
    lambda h, y: h + jnp.sort(y, axis=-1),
    lambda h, y: h + lax.top_k(y, WIDTH)[1],
    lambda h, y: h * jnp.sign(y),
]
"""Ways to use the result `y` of a GEMM of `h`. Only some of them let a gradient flow to `y`."""


def program(seed: int, depth: int = 3, builder_type: type[Builder] = Builder) -> Program:
    builder = builder_type(np.random.default_rng(seed))
    params, block = builder.block(depth, ())
    batch = jax.device_put(builder.random.standard_normal((ROWS, WIDTH)).astype(np.float32))
    first = builder.weight((), WIDTH, WIDTH)
    name = builder.name()

    def loss(p: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            h = x @ p["first"]
        return jnp.mean(jnp.square(block(p["block"], h)))

    return Program(loss, {"first": first, "block": params}, batch)


def applicable_rules(random_program: Program, policy: str) -> str:
    """A policy of one or two rules, without the second rule if it does not apply to the program."""
    first, _, rule = policy.partition("; ")
    return with_rule_if_applicable(random_program, first, rule) if rule else first


def with_rule_if_applicable(random_program: Program, policy: str, rule: str) -> str:
    """The policy with an additional rule about layers, if the program has such layers and their indices are known."""
    extended = f"{policy}; {rule}"
    traced = policyc.plan("* -> keep", random_program.loss, *random_program.args)
    plan = make_plan(
        parse(extended), traced.sites
    )  # `policyc.plan` would warn about a rule that does nothing
    return extended if plan.counts[-1] and not any(opaque_indices(plan)) else policy
