"""A training script for one or two processes, which `tests/compiler/test_parallel.py` runs under a policy.

    python distributed_program.py PROCESSES NUMBER PORT

Each process has half the devices and loads its own rows. Two devices in all: a sum of two does not depend on its order,
so that losses are equal to the bit.
"""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PROCESSES, NUMBER, PORT = (int(a) for a in sys.argv[1:])


def loss(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((h @ params["head"] - 1) ** 2)


@jax.jit
def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value


def main() -> None:
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={2 // PROCESSES}"  # read when devices start
    )
    if PROCESSES > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{PORT}", PROCESSES, NUMBER)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    weight = random.standard_normal((3, 16, 16)).astype(np.float32) / 8
    values = {"layers": {"up": weight, "down": weight}, "head": weight[0]}
    params = jax.tree.map(
        lambda w: jax.make_array_from_process_local_data(NamedSharding(mesh, P()), w), values
    )
    rows = random.standard_normal((8, 16)).astype(np.float32)
    mine = rows.reshape(PROCESSES, -1, 16)[NUMBER]
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)
    for _ in range(4):
        params, value = step(params, x)
        print(float(value))


if __name__ == "__main__":
    main()
