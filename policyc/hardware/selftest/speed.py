"""Times GEMMs, quantizers, a copy and a Llama block. Compares them with the cost model, and finds its constants."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.compiler.matching.execution import execution_options
from policyc.compiler.pipeline import apply, as_policy, plan
from policyc.hardware import gemm_cost, step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.selftest.subject import read_recipe
from policyc.hardware.training_step import TrainingStep
from policyc.language.recipes import Gemm, Role, Treatment
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ModelConfig
from policyc.numerics import primitives
from policyc.numerics.backends import MODULES, load, title
from policyc.numerics.quantize import Axes, Request, make_key
from policyc.numerics.targets import Target

SHAPE = (16384, 4096, 14336)
"""Tokens, inputs and outputs of the GEMM: the MLP of Llama 3 8B."""
_BLOCK = ModelConfig(
    layers=1, width=4096, hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=512, scan=False
)
_TOKENS = (2, 4096)  # sequences, and their length
_REPEAT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured seconds, and those that the cost model predicts. `constant` names the constant that they determine."""

    what: str
    measured: float
    predicted: float
    constant: str = ""
    value: float = 0.0


def time_median(f: Callable[..., Any], *args: Any, repeat: int) -> float:
    """Median seconds of `repeat` runs of a jitted function. A run calls it often enough to hide the dispatch."""
    jitted = jax.jit(f)
    jax.block_until_ready(jitted(*args))
    jax.block_until_ready(jitted(*args))
    start = time.perf_counter()
    jax.block_until_ready(jitted(*args))
    once = max(time.perf_counter() - start, 1e-6)
    calls = max(1, min(20, int(0.05 / once)))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(calls):
            out = jitted(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def time_all(target: Target, backends: Sequence[str]) -> Iterator[Timing]:
    """Times everything that the GPU multiplies natively. Later times are predicted with the constants found so far."""
    constants: dict[str, float] = {}
    for part in (_time_copy, _time_gemms, _time_quantizers, _time_blocks):
        for timing in part(replace(target, measured=dict(constants)), backends):
            if timing.constant:
                constants[timing.constant] = timing.value
            yield timing


def _random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)


def _time_copy(target: Target, _: Sequence[str]) -> Iterator[Timing]:
    x = _random(SHAPE[0], SHAPE[1])
    seconds, moved = time_median(lambda x: -x, x, repeat=_REPEAT), 2 * x.nbytes
    value = moved / seconds / target.memory_bandwidth
    yield Timing(
        what="copy",
        measured=seconds,
        predicted=gemm_cost.copy_seconds(target, moved),
        constant=gemm_cost.COPY,
        value=value,
    )


def _native(target: Target, backends: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields backends and formats that they run natively. Those that `auto` prefers come last."""
    for name in (name for name in MODULES if name in backends and not load(name).only_ragged):
        yield from ((name, format) for format in load(name).calls if target.is_native(format))


def _time_gemms(target: Target, backends: Sequence[str]) -> Iterator[Timing]:
    m, k, n = SHAPE
    x, w = _random(m, k), _random(n, k)
    dims = (((1,), (1,)), ((), ()))
    runs: list[tuple[str, str, Callable[[], float]]] = [
        ("xla", "bf16", lambda: time_median(lambda x, w: x @ w.T, x, w, repeat=_REPEAT))
    ]

    def time_native(backend: str, format: str) -> float:
        treatment = read_recipe(format).treatments[0]
        request = Request(treatment, Axes(axis=-1, contract=(-1,)))
        quantize = jax.jit(partial(primitives.quantize, request=request, backend=backend))
        multiply = partial(primitives.scaled_gemm, dimension_numbers=dims, out=jnp.bfloat16, backend=backend)
        return time_median(multiply, quantize(x), quantize(w), repeat=_REPEAT)

    runs += [(b, f, partial(time_native, b, f)) for b, f in _native(target, backends)]
    for backend, format, run in runs:
        seconds = run()
        around = gemm_cost.LAUNCH_SECONDS
        if load(backend).scales_results:  # the model has a part of its own for outer scales
            around += gemm_cost.outer_scale_seconds(target, read_recipe(format).treatments, m * n)
        yield Timing(
            what=f"GEMM, {title(backend)} {format}",
            measured=seconds,
            predicted=gemm_cost.gemm_seconds(target, format, m, n, k) + around - gemm_cost.LAUNCH_SECONDS,
            constant=gemm_cost.GEMM.format(format),
            value=2 * m * n * k / (max(seconds - around, 1e-9) * target.peak(format)),
        )


def _time_quantizers(target: Target, backends: Sequence[str]) -> Iterator[Timing]:
    full = read_recipe("nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    rows, columns = (Axes(axis=axis, contract=(axis,), tile=-3 - axis) for axis in (-1, -2))
    cases: dict[str, tuple[Treatment, Axes]] = {
        "fp8": (read_recipe("fp8").treatments[0], rows),
        "plain": (full.treatment(Gemm.FPROP, Role.ACTIVATION), rows),
        "tile2d": (full.treatment(Gemm.FPROP, Role.WEIGHT), columns),
        "sr": (full.treatment(Gemm.DGRAD, Role.GRADIENT), rows),
        "kernels": (full.treatment(Gemm.WGRAD, Role.ACTIVATION), columns),
    }
    x = _random(SHAPE[0], SHAPE[1])
    runs = [("xla", name) for name in cases]
    runs += [(b, "plain") for b, _ in _native(target, backends) if load(b).quantizer_slowdown is not None]
    for backend, name in runs:
        treatment, axes = cases[name]
        key = make_key(1)
        request = Request(treatment, axes, key=key, sign_key=key)
        quantize = partial(primitives.quantize, request=request, backend=backend)
        seconds = time_median(quantize, x, repeat=_REPEAT)
        (kind,) = gemm_cost.quantizer_kinds([treatment], backend)
        constant = gemm_cost.QUANTIZER.format(kind)
        predict = partial(
            gemm_cost.quantize_seconds,
            treatments=[treatment],
            elements=x.size,
            backend=backend,
            is_computed=False,
        )
        # The prediction is linear in the constant.
        least, one = (
            predict(replace(target, measured={**target.measured, constant: value})) for value in (0.0, 1.0)
        )
        yield Timing(
            what=f"quantizer, {title(backend)} {name}",
            measured=seconds,
            predicted=predict(target),
            constant=constant,
            value=max(seconds - least, 0.0) / (one - least),
        )


def _time_blocks(target: Target, backends: Sequence[str]) -> Iterator[Timing]:
    """Forward and backward pass of one block of Llama 3 8B."""
    params = jax.jit(partial(llama.init_params, config=_BLOCK))(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, _BLOCK.vocab, _TOKENS).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens, "mask": np.ones(_TOKENS, bool)}
    formats = {format for _, format in _native(target, backends)}
    policies = ["bf16", *("te_nvfp4" if f == "nvfp4" else f for f in sorted(formats))]

    def loss(params: Any, batch: Any, config: ModelConfig = _BLOCK) -> jax.Array:
        return llama.loss(params, batch, config)[0]

    for policy in policies:
        seconds = time_median(jax.value_and_grad(apply(policy, loss)), params, batch, repeat=_REPEAT)
        # Like `llama_step`, plan with plain attention, so that its products are visible.
        visible = partial(loss, config=replace(_BLOCK, attention="xla"))
        planned = plan(policy, visible, params, batch)
        step = TrainingStep(plan=planned, causal=True).under(
            as_policy(policy), replace(execution_options(), target=target)
        )
        parts = step_cost.estimate(step, target, MeshShape()).compute
        predicted = sum(seconds for name, seconds in parts.items() if name != "optimizer")
        yield Timing(what=f"Llama block, {policy}", measured=seconds, predicted=predicted)
