"""A training script for one or two processes, which `tests/compiler/test_parallel.py` runs under a policy.

    python distributed_program.py PROCESSES NUMBER PORT

The processes share two devices, and each loads its own rows. A sum of two numbers does not depend on their order, so
the losses are equal to the bit.
"""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((h @ params["head"] - 1) ** 2)


@jax.jit
def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value


def train(processes: int, number: int) -> list[float]:
    """The losses of four steps on the first two devices of all processes."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    random = np.random.default_rng(0)
    layers = random.standard_normal((3, 16, 16)).astype(np.float32) / 8
    params = jax.tree.map(
        lambda w: jax.make_array_from_process_local_data(NamedSharding(mesh, P()), w),
        {"layers": layers, "head": layers[0]},
    )
    rows = random.standard_normal((8, 16)).astype(np.float32)
    own_rows = rows.reshape(processes, -1, 16)[number]
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own_rows)
    losses = []
    for _ in range(4):
        params, value = step(params, x)
        losses.append(float(value))
    return losses


def main() -> None:
    processes, number, port = (int(argument) for argument in sys.argv[1:])
    # XLA reads this when the devices start.
    devices = f"--xla_force_host_platform_device_count={2 // processes}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, number)
    for value in train(processes, number):
        print("loss", value)  # marked, because Gloo prints lines too


if __name__ == "__main__":
    main()
