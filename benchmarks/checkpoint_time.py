"""Writes and restores real checkpoints of small configurations, and compares them with `policyc estimate`.

    python -m benchmarks.checkpoint_time [--config 5m ...] [--folder DIR] [--json FILE]

States hold random numbers, because zeros would be compressed. Restoring includes hashing every bit. Times are the
least of three on this machine and its disk. The estimate predicts only their ratio, which is that of the bytes. Needs
the extra train, and no GPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.command_line import make_parser, print_header, print_row
from policyc.hardware.llama_step import Sizes, checkpoint_cost
from policyc.hardware.mesh import MeshShape
from policyc.models.llama import partition, train_step
from policyc.models.llama.checkpoints import Checkpoints
from policyc.models.llama.configs import find_config
from policyc.numerics.targets import get_target

ROUNDS = 3


@dataclass(frozen=True)
class Measurement:
    """Estimated bytes of a checkpoint, bytes of its files, and the seconds to write and to restore it.

    `restore_cpu_seconds` is the CPU time of all threads, which other load on the machine hardly changes.
    """

    config: str
    estimated_bytes: int
    file_bytes: int
    write_seconds: float
    restore_seconds: float
    restore_cpu_seconds: float


def abstract_state(name: str) -> Any:
    """The shapes of a configuration's state, on one device."""
    config, run = find_config(name)
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(partition.AXES))
    return train_step.abstract_state(config, run, jax.sharding.Mesh(devices, partition.AXES))


def random_state(abstract: Any) -> Any:
    """A state with random numbers."""
    generator = np.random.default_rng(0)

    def fill(leaf: Any) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        numbers = generator.standard_normal(leaf.shape, np.float32) if is_float else np.zeros(leaf.shape)
        array: jax.Array = jax.device_put(numbers.astype(leaf.dtype), leaf.sharding)
        return array

    return jax.tree.map(fill, abstract)


def measure(name: str, folder: Path) -> Measurement:
    """Writes and restores checkpoints of a configuration in a folder."""
    abstract = abstract_state(name)
    state, times = random_state(abstract), []
    cost = checkpoint_cost(name, MeshShape(), Sizes(), get_target("h200"), bandwidth=1.0)
    checkpoints = Checkpoints(folder, 1, {"policy": None})
    for step in range(1, ROUNDS + 1):
        start = time.perf_counter()
        checkpoints.save(step, state, [])
        checkpoints.wait()
        written, cpu = time.perf_counter(), time.process_time()
        restored = checkpoints.restore(abstract, accept_changes=True).state
        jax.block_until_ready(restored)
        times.append((written - start, time.perf_counter() - written, time.process_time() - cpu))
    checkpoints.close()
    writes, restores, restore_cpu = zip(*times, strict=True)
    return Measurement(
        config=name,
        estimated_bytes=int(cost["bytes"]),
        file_bytes=sum(path.stat().st_size for path in (folder / str(ROUNDS)).rglob("*") if path.is_file()),
        write_seconds=min(writes),
        restore_seconds=min(restores),
        restore_cpu_seconds=min(restore_cpu),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--config", action="append", help="only this configuration (may be repeated; default: tiny, 5m, 30m)"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where to write (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    titles = (
        "configuration",
        "estimated",
        "files",
        "ratio",
        "written in",
        "restored in",
        "processor time",
        "per GB",
    )
    print_header(titles)
    results = []
    for name in options.config or ("tiny", "5m", "30m"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result = measure(name, Path(folder))
        results.append(asdict(result))
        sizes = result.estimated_bytes, result.file_bytes
        cells = [name, *(f"{size / 1e6:.1f} MB" for size in sizes), f"{sizes[1] / sizes[0]:.3f}"]
        cells += [f"{result.write_seconds:.2f} s", f"{result.restore_seconds:.2f} s"]
        cpu = result.restore_cpu_seconds
        cells += [f"{cpu:.2f} s", f"{cpu / sizes[0] * 1e9:.1f} s"]
        print_row(cells)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
