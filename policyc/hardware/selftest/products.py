"""Checks of products: each GEMM, on one device and on several, the gradients of a block, and a short training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from policyc.compiler.pipeline import apply
from policyc.hardware.selftest.subject import (
    Finding,
    Subject,
    make_tensor,
    read_recipe,
    reference_device,
    relative_error,
    run_on,
    three_products,
)
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ModelConfig
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.ragged import quantized_ragged_dot

RECIPES = {"nvfp4": "nvfp4(rht=wgrad, scale2d=weights)"}
"""Recipes without stochastic rounding, so that operands are the same on all backends. The default recipes of other
formats never round stochastically."""

POLICIES = {"nvfp4": "te_nvfp4", "mxfp8": "mxfp8", "fp8": "fp8"}
"""The policy that a Llama is trained under, by format. Other formats are never native."""

_SUM_ERROR = 8 * 2.0**-23
"""Relative error of an fp32 sum of 512 products: 8 partial sums of 64, each rounded or cut off once."""
_HOPPER_SUM_ERROR = 2.0**-13
"""The same on Hopper's 8-bit matrix units, which keep about 14 bits of a partial sum."""
_PRODUCTS = ("fprop", "dgrad", "wgrad")


def gemm_tolerance(format: str) -> float:
    """The allowed relative error of a product in bfloat16, as a norm.

    If fp32 sums have an error e, a share of e / 2**-8 of them round to another bfloat16 number, which is 2**-8 away.
    That is sqrt(e) / 16 in the norm. Twice as much is allowed.
    """
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    error = _HOPPER_SUM_ERROR if format == "fp8" and capability.startswith("9") else _SUM_ERROR
    return float(2 * np.sqrt(error) / 16)


def _arrays(columns: int = 384) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return make_tensor(256, 512), make_tensor(512, columns, seed=1), make_tensor(256, columns, seed=2)


def _three_products(backend: str, format: str) -> Callable[..., Any]:
    """A function of x, w and dy that returns fprop, dgrad and wgrad."""
    recipe = read_recipe(RECIPES.get(format, format))
    options = GemmOptions(backends=(backend, backend, backend))
    dimensions = (((1,), (0,)), ((), ()))
    dot = partial(quantized_dot_general, dimension_numbers=dimensions, recipe=recipe, options=options)
    return partial(three_products, dot)


def check_gemm(subject: Subject) -> Iterator[Finding]:
    """Compares three products with the emulation on the CPU. Checks that they are native calls and keep a NaN."""
    arrays, limit = _arrays(), gemm_tolerance(subject.format)
    run = jax.jit(_three_products(subject.backend, subject.format)).lower(*arrays).compile()
    emulated = _three_products("emulate", subject.format)
    yield from _compare_products(subject, run, emulated, arrays, limit)
    arrays[0][5, 7] = np.nan
    expected = run_on(reference_device(), emulated, *arrays)
    for name, ours, theirs in zip(_PRODUCTS, jax.device_get(run(*arrays)), expected, strict=True):
        lost = np.sum(np.isnan(theirs.astype(np.float32)) & ~np.isnan(ours.astype(np.float32)))
        yield Finding(f"NaN in {name}", f"{lost} results lost it" if lost else "")


def _compare_products(
    subject: Subject, run: Compiled, emulated: Callable[..., Any], arrays: Sequence[np.ndarray], limit: float
) -> Iterator[Finding]:
    """Checks that compiled products are native calls, and close to those of the emulation on the CPU."""
    call = subject.implementation.calls.get(subject.format, "")
    if subject.native and call:
        count = str(run.as_text()).count(f'custom_call_target="{call}"')
        yield Finding(f"{call} is called", "" if count >= 3 else f"{count} of 3 products call it")
    expected = run_on(reference_device(), emulated, *arrays)
    for name, ours, theirs in zip(_PRODUCTS, jax.device_get(run(*arrays)), expected, strict=True):
        error = relative_error(ours, theirs)
        what = f"{name}: relative error {error:.1e}, at most {limit:.1e}"
        yield Finding(what, "" if error <= limit else "differs from the emulation")


def check_groups(subject: Subject) -> Iterator[Finding]:
    """Compares three products over ragged groups, one of them empty, with the emulation on the CPU."""
    sizes = jax.numpy.array([130, 0, 300, 70], np.int32)  # 12 rows belong to no group
    x, w, dy = make_tensor(512, 256), make_tensor(1024, 384, seed=1), make_tensor(512, 384, seed=2)
    arrays = x, w.reshape(4, 256, 384), dy
    recipe, limit = read_recipe(RECIPES["nvfp4"]), gemm_tolerance("nvfp4")

    def products(backend: str) -> Callable[..., Any]:
        options = GemmOptions(backends=(backend, backend, backend))
        return partial(three_products, lambda x, w: quantized_ragged_dot(x, w, sizes, recipe, options))

    run = jax.jit(products(subject.backend)).lower(*arrays).compile()
    yield from _compare_products(subject, run, products("emulate"), arrays, limit)


def check_devices(subject: Subject) -> Iterator[Finding]:
    """Compares the same three products, divided over all devices: by rows, by contracted elements and by columns."""
    devices = jax.devices()
    count = next(n for n in (8, 4, 2) if n <= len(devices))
    # JAX cannot divide the scales of an MXFP8 GEMM whose columns are fewer than a tile of 128 on a device.
    mesh, arrays = Mesh(np.asarray(devices[:count]), ("d",)), _arrays(128 * count)
    # Devices add their parts of a sum in bfloat16. Each part, and each sum of two, is rounded by up to 2**-9.
    limit = float(2.0**-9 * np.sqrt(2 * count))
    run = jax.jit(_three_products(subject.backend, subject.format))
    expected = run_on(reference_device(), _three_products("emulate", subject.format), *arrays)
    layouts = {
        "tokens": (P("d"), P(), P("d")),
        "features": (P(None, "d"), P("d"), P()),
        "outputs": (P(), P(None, "d"), P(None, "d")),
    }
    for name, specs in layouts.items():
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
        error = relative_error(jax.device_get(run(*placed)), expected)
        what = f"{name} over {count} devices: relative error {error:.1e}, at most {limit:.1e}"
        yield Finding(what, "" if error <= limit else "differs from one device")


# ---- a small Llama

_CONFIG = ModelConfig(
    layers=2, width=256, hidden=512, heads=4, kv_heads=2, head_dim=64, vocab=256, attention="xla"
)  # Transformer Engine's kernels take these sizes.
_STEPS, _RATE = 20, 0.01
_ALLOWED = 4.0
"""The allowed difference to the emulation, as a multiple of the difference that disturbed initial weights make."""


@cache
def _init_params() -> Any:
    init = partial(llama.init_params, config=_CONFIG)
    return run_on(reference_device(), lambda: init(jax.random.key(0)))


def _disturb(params: Any) -> Any:
    """Changes one in sixteen weights by half a unit in the last place of bfloat16, up or down.

    The effect is about that of another order of sums. All random numbers change too, since they depend on operands.
    """
    rng = np.random.default_rng(1)
    signs = (-1, 1, *(0,) * 30)
    return jax.tree.map(lambda p: (p * (1 + 2.0**-9 * rng.choice(signs, p.shape))).astype(np.float32), params)


def _batch() -> dict[str, np.ndarray]:
    """Two sequences that can be learned: each token is one of two functions of the previous token."""
    rng = np.random.default_rng(2)
    tokens = np.zeros((2, 129), np.int32)
    for i in range(128):
        tokens[:, i + 1] = (5 * tokens[:, i] + 1 + 7 * rng.integers(0, 2, 2)) % _CONFIG.vocab
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((2, 128), bool)}


@cache
def _make_step(policy: str, backend: Any) -> Callable[..., Any]:
    """A jitted step of gradient descent, which also returns loss and gradient. Compiled once for each device."""

    def loss(params: Any, batch: Any) -> jax.Array:
        mean: jax.Array = llama.loss(params, batch, _CONFIG)[0] / batch["mask"].size
        return mean

    gradient = jax.value_and_grad(apply(policy, loss, backend=backend))

    def step(params: Any, batch: Any) -> Any:
        loss, grads = gradient(params, batch)
        return jax.tree.map(lambda p, g: p - _RATE * g, params, grads), (loss, grads)

    return jax.jit(step)


@cache
def _run(policy: str, backend: str, device: jax.Device, steps: int, *, disturbed: bool = False) -> Any:
    """The losses of some steps on a device, and the gradient of the first."""
    params, step, losses, first = _init_params(), _make_step(policy, backend), [], None
    with jax.default_device(device):
        params = jax.device_put(_disturb(params) if disturbed else params, device)
        for _ in range(steps):
            params, (loss, grads) = step(params, _batch())
            losses.append(float(loss))
            first = jax.device_get(grads) if first is None else first
    return losses, first


def _compare_runs(subject: Subject, policy: str, steps: int) -> tuple[Any, Any, Any]:
    """The subject's run, that of the emulation, and one of the emulation with disturbed weights.

    The emulation runs on the same device, or on the CPU if the emulation itself is tested.
    """
    here = jax.devices()[0]
    device = reference_device() if subject.implementation.emulates else here
    emulated = partial(_run, policy, "emulate", device, steps)
    return _run(policy, subject.backend, here, steps), emulated(), emulated(disturbed=True)


def check_block(subject: Subject) -> Iterator[Finding]:
    """Compares gradients of two blocks, embedding and head. Stochastic rounding is off: it would hide small faults."""
    recipe = RECIPES.get(subject.format, subject.format)
    policy = f"* -> bf16\n* where block and (attention or mlp) -> {recipe}\n"
    (_, ours), (_, theirs), (_, disturbed) = _compare_runs(subject, policy, 1)
    for name in ours:
        error, limit = (relative_error(g[name], theirs[name]) for g in (ours, disturbed))
        what = f"{name}: relative error {error:.1e}, at most {_ALLOWED * limit:.1e}"
        yield Finding(what, "" if error <= _ALLOWED * limit else "differs from the emulation")


def check_llama(subject: Subject) -> Iterator[Finding]:
    """Compares the losses of a short training."""
    runs = _compare_runs(subject, POLICIES[subject.format], _STEPS)
    ours, theirs, disturbed = (np.asarray(run[0]) for run in runs)
    difference, limit = (float(np.abs(losses - theirs).max()) for losses in (ours, disturbed))
    what = (
        f"{POLICIES[subject.format]}, {len(ours)} steps: loss {ours[0]:.3f} to {ours[-1]:.3f}, at most "
        f"{difference:.1e} from the emulation, allowed {_ALLOWED * limit:.1e}"
    )
    fault = "" if difference <= _ALLOWED * limit else "losses differ from those of the emulation"
    yield Finding(what, fault if np.isfinite(ours).all() else "the loss is not finite")
