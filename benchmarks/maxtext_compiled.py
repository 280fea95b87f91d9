"""Compiles MaxText's own training step for GPUs that are not present, under Transformer Engine's flags and policies.

    make maxtext-compiled                                       # Llama 3 8B on 8 GB200
    make maxtext-compiled ARGS='--model llama3.1-405b --devices 128 --batch 1'

MaxText is unmodified. Its arguments are those of NVIDIA's example (JAX-Toolbox), except for attention, which is that of
JAX. Each row is compiled with one and with two layers, in a process of its own. Kernels and bytes are linear in depth:
the difference is a layer. Nothing runs: a step is predicted from the bytes, with the model's times of GEMMs and of
attention. A flag is compiled under an empty policy, which leaves its jaxpr as it is. In the file of --json, a row
replaces the one of the same model and name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser
from policyc import Policy, load
from policyc.compiler.matching.execution import execution_options
from policyc.hardware import deviceless, hlo, llama_step
from policyc.hardware.collectives import CollectiveTotal
from policyc.hardware.compile_report import (
    CompiledStep,
    KernelTotal,
    kernel_kind,
    with_compiled,
)
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import estimate
from policyc.hardware.training_step import TrainingStep
from policyc.models.llama.configs import CONFIGS
from policyc.numerics.targets import get_target

FLAGS = {
    "te_fp8_currentscaling": "fp8",
    "te_fp8_delayedscaling": "fp8",
    "te_mxfp8": "mxfp8",
    "te_nvfp4": "nvfp4",
    "te_nvfp4_no_rht": "nvfp4",
}
"""MaxText's values of `quantization`, and the format of their GEMMs."""

POLICIES = {
    "fp8": ("fp8", "xla"),
    "te_nvfp4": ("nvfp4", "te"),
    "te_nvfp4_no_rht": ("nvfp4", "te"),
    "te_nvfp4_bound": ("nvfp4", "te"),
}
"""Bundled policies, the format of their GEMMs, and the backend."""

ROWS = tuple(f"flag {name}" for name in FLAGS) + tuple(f"policy {name}" for name in POLICIES)
BASELINE = "flag te_fp8_currentscaling"

MODELS = {"llama3-8b": "llama3_8b", "llama3.1-405b": "llama3_405b"}
"""MaxText's names of models, and those of the bundled configurations."""

TARGET = "gb200"
SEQUENCE = 8192
DEPTHS = (1, 2)
PACKAGES = ("jax", "transformer-engine", "maxtext", "nvidia-cudnn-cu13")

_COMBINED_BYTES = 2 << 30
XLA_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=",
    *(
        f"--xla_gpu_{kind}_combine_threshold_bytes={_COMBINED_BYTES}"
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ),
    *(f"--xla_gpu_enable_pipelined_{kind}=true" for kind in ("all_gather", "reduce_scatter", "all_reduce")),
    "--xla_gpu_enable_while_loop_double_buffering=false",
    "--xla_gpu_enable_all_gather_combine_by_dim=false",
    "--xla_gpu_enable_reduce_scatter_combine_by_dim=false",
    "--xla_disable_hlo_passes=rematerialization",
    "--xla_gpu_autotune_level=0",
)
"""Those of NVIDIA's example; autotuning needs a GPU."""

_CODES = re.compile(r"\b(?:f8e4m3fn|f8e5m2|f4e2m1fn|u8)\[")
_QUANTIZERS = ("te_dbias_quantize_ffi", "te_rht_amax_ffi", "policyc_te_quantize_ffi")


# ---- one row, in a process of its own


def compile_row(row: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles MaxText's step of `DEPTHS` layers, and counts what is in it."""
    import jax

    from policyc.numerics.backends import te_calls
    from tests.support import te_without_gpu

    te_without_gpu.import_engine()
    te_calls.load()  # it multiplies on the CPU: before MaxText's devices are those of the target
    devices = deviceless.make_devices(get_target(TARGET), options.devices)
    jax.devices = lambda *_: list(devices)
    return [_compile_depth(row, options, depth, devices) for depth in DEPTHS]


def _compile_depth(
    row: str, options: argparse.Namespace, layers: int, devices: Sequence[Any]
) -> dict[str, Any]:
    kind, name = row.split()
    policy = load(name) if kind == "policy" else Policy()
    execution = execution_options(POLICIES[name][1] if kind == "policy" else "xla", TARGET)
    flag = name if kind == "flag" else ""
    with _maxtext_step(options, flag, layers, devices) as (step, arguments):
        report = deviceless.compile_step(step, arguments, policy, execution, devices=options.devices)
    if report.missing_products:
        raise SystemExit(f"{row}: calls of these products are missing: {report.missing_products}")
    if options.hlo is not None:
        (options.hlo / f"{name}-{kind}-{layers}.hlo.txt").write_text(report.text)
    return {
        "layers": layers,
        "kernels": [asdict(kernels) for kernels in report.kernel_kinds],
        "collectives": [asdict(collectives) for collectives in report.collectives],
        **count_quantizers(hlo.parse_module(report.text)),
    }


def quantizes(module: hlo.Module, run: hlo.Execution) -> bool:
    """Whether a kernel writes codes, or next to nothing but a maximum."""
    if run.instruction.call_target:
        return run.instruction.call_target in _QUANTIZERS
    if _CODES.search(run.instruction.shape):
        return True
    fused = [i for name in run.instruction.called for i in module.computations[name].values()]
    reducers = [name for i in (run.instruction, *fused) if i.opcode == "reduce" for name in i.called]
    finds_maximum = any(
        i.opcode == "maximum" for name in reducers for i in module.computations[name].values()
    )
    return finds_maximum and 64 * run.bytes_written < run.bytes_read


def count_quantizers(module: hlo.Module) -> dict[str, Any]:
    """Bytes of the kernels that find maxima and quantize, and those that a call reads twice, which no HLO says."""
    quantizers = twice = 0
    for run in module.executions:
        if not run.is_kernel or kernel_kind(run) != "other kernels":
            continue
        if quantizes(module, run):
            quantizers += run.times * (run.bytes_read + run.bytes_written)
        attributes = run.instruction.attributes
        if (
            "te_dbias_quantize_ffi" in attributes
            and "use_rht = true" in attributes
            and "q_layout = 2" in attributes
        ):
            operand = module.computations[run.computation][run.instruction.operands[0]]
            twice += run.times * operand.bytes
    return {"quantizer_bytes": quantizers + twice, "read_twice": [{"bytes": twice}]}


@contextlib.contextmanager
def _maxtext_step(
    options: argparse.Namespace, flag: str, layers: int, devices: Sequence[Any]
) -> Iterator[tuple[Any, Any]]:
    """MaxText's jitted training step and its arguments, in the contexts in which MaxText compiles it."""
    import jax
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import max_utils, maxtext_utils, sharding

    words = {
        "run_name": "compiled",
        "base_output_directory": f"{tempfile.gettempdir()}/maxtext",
        "hardware": "gpu",
        "dataset_type": "synthetic",
        "model_name": options.model,
        "override_model_config": True,
        "base_num_decoder_layers": layers,
        "scan_layers": False,
        "remat_policy": "minimal_with_context_and_quantization",
        "attention": "cudnn_flash_jax",
        "dtype": "bfloat16",
        "quantization": flag,
        "max_target_length": SEQUENCE,
        # MaxText divides by the devices of its topology, which are 8.
        "per_device_batch_size": options.batch * options.devices / 8,
        "ici_data_parallelism": 1,
        "dcn_data_parallelism": 1,
        "ici_fsdp_parallelism": options.devices,
        "dcn_fsdp_parallelism": 1,
        "max_segments_per_seq": 32,
        "steps": 50,
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "compile_topology": "a3",
        "compile_topology_num_slices": 1,
    }
    base = Path(next(iter(maxtext.__path__))) / "configs" / "base.yml"
    config = pyconfig.initialize(
        ["", str(base), *(f"{name}={value}" for name, value in words.items() if value != "")]
    )
    grid = maxtext_utils.create_device_mesh(config, devices)
    axis_types = (jax.sharding.AxisType.Auto,) * len(config.mesh_axes)
    mesh = jax.sharding.Mesh(grid, config.mesh_axes, axis_types=axis_types)
    engine = max_utils.maybe_get_transformer_engine_context(config) if flag else contextlib.nullcontext()
    with engine, jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        arguments, _, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
        params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        state = sharding.build_zero1_input_state_mesh_shardings(config, shardings, params)
        batch = sharding.get_input_data_sharding(config, mesh)
        step, inputs, outputs, static, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, batch, state, model, config, params
        )
        yield (
            jax.jit(
                step,
                in_shardings=inputs,
                out_shardings=outputs,
                static_argnums=static,
                donate_argnums=donated,
            ),
            arguments,
        )


# ---- all rows


def start_row(row: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles a row in a process of its own, which sets what JAX and MaxText read when they are imported."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        words = [f"--{n}={getattr(options, n)}" for n in ("model", "devices", "batch")]
        words += [f"--hlo={options.hlo}"] if options.hlo else []
        environment = {
            "DECOUPLE_GCLOUD": "TRUE",
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "NVTE_FUSED_ATTN": "1",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
            "XLA_FLAGS": " ".join(XLA_FLAGS),
        }
        command = [
            sys.executable,
            "-m",
            "benchmarks.maxtext_compiled",
            f"--rows={row}",
            f"--worker={result}",
            *words,
        ]
        subprocess.run(command, stdout=sys.stderr, check=True, env=os.environ | environment)
        return list(json.loads(result.read_text()))


def describe_row(
    row: str, model: str, devices: int, batch: int, depths: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A row of the file: what a layer contains, and how long the step of all layers is predicted to take."""
    return {
        "model": model,
        "devices": devices,
        "batch": batch,
        "row": row,
        "layer": {
            "bytes": _layer(depths, lambda d: sum(k["bytes"] for k in (*d["kernels"], *d["read_twice"]))),
            "quantizer_bytes": _layer(depths, lambda d: d["quantizer_bytes"]),
            "kernels": _layer(depths, lambda d: sum(k["count"] for k in d["kernels"])),
        },
        "seconds": round(predict(row, model, devices, batch, depths), 6),
        "depths": depths,
    }


def _layer(depths: Sequence[dict[str, Any]], count: Callable[[dict[str, Any]], int]) -> int:
    one, two = map(count, depths)
    return two - one


def predict(row: str, model: str, devices: int, batch: int, depths: Sequence[dict[str, Any]]) -> float:
    """Seconds of a step of all layers, from the counts of `DEPTHS` layers."""
    target, mesh = get_target(TARGET), MeshShape(fsdp=devices)
    kind, name = row.split()
    policy = FLAGS[name] if kind == "flag" else POLICIES[name][0]
    config = MODELS[model]
    step = _plan(config, devices, batch).under(load("te_nvfp4" if policy == "nvfp4" else policy))
    layers = CONFIGS[config][0].layers

    def extend(what: str, *key: str) -> Iterator[dict[str, Any]]:
        """The totals of all layers: those of one, and of each further layer the difference of two and one."""
        one, two = ({tuple(t[k] for k in key): t for t in depth[what]} for depth in depths)
        for name, total in two.items():
            first = one.get(name, {})
            yield {
                n: v if n in key else first.get(n, 0) + (layers - 1) * (v - first.get(n, 0))
                for n, v in total.items()
            }

    kernels = [KernelTotal(**total) for total in extend("kernels", "kind")]
    ((twice,),) = (total.values() for total in extend("read_twice"))
    compiled = CompiledStep(
        policy=name,
        target=TARGET,
        devices=devices,
        kernels=tuple(replace(k, bytes=k.bytes + twice * (k.kind == "other kernels")) for k in kernels),
        collectives=tuple(CollectiveTotal(**total) for total in extend("collectives", "kind", "type")),
    )
    return with_compiled(estimate(step, target, mesh), compiled, target, mesh).seconds


@cache
def _plan(config: str, devices: int, batch: int) -> TrainingStep:
    sizes = llama_step.Sizes(batch=batch * devices, sequence=SEQUENCE, accumulate=1, remat="none")
    return llama_step.plan_step(
        Policy(), config, MeshShape(fsdp=devices), sizes, execution_options("te", TARGET)
    )


def table(data: dict[str, Any]) -> Iterator[str]:
    """The lines of the table in the documentation: the figures of one model, and the bytes and speed of the other."""
    rows = {(row["model"], row["row"]): row for row in data["rows"]}
    first, second = MODELS
    for name in ROWS:
        cells = [name.replace(" ", " `") + "`"]
        for model in (m for m in MODELS if (m, name) in rows):
            layer, seconds = rows[model, name]["layer"], rows[model, name]["seconds"]
            cells.append(f"{layer['bytes'] / 1e9:.1f}")
            if model == first:
                cells += [
                    f"{layer['quantizer_bytes'] / 1e9:.1f}",
                    str(layer["kernels"]),
                    f"{1e3 * seconds:.0f}",
                ]
            cells.append(f"{rows[model, BASELINE]['seconds'] / seconds:.2f}")
        yield f"| {' | '.join(cells)} |" + "  |  |" * ((second, name) not in rows)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="rows, separated by commas (default: all)")
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--devices", type=int, default=8, help="GPUs, all on fsdp")
    parser.add_argument("--batch", type=int, default=4, help="sequences per GPU")
    parser.add_argument("--json", type=Path, help="the file to add the rows to")
    parser.add_argument(
        "--hlo", type=Path, metavar="FOLDER", help="also write the optimized HLO to this folder"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        options.worker.write_text(json.dumps(compile_row(options.rows, options)))
        return
    data: dict[str, Any] = {"versions": {}, "rows": []}
    if options.json is not None and options.json.exists():
        data = json.loads(options.json.read_text(encoding="utf-8"))
    data["versions"] = {package: version(package) for package in PACKAGES}
    for row in options.rows.split(","):
        sizes = options.model, options.devices, options.batch
        entry = describe_row(row, *sizes, start_row(row, options))
        print(row, entry["layer"], f"{entry['seconds']:.3f} s", flush=True)
        others = [r for r in data["rows"] if (r["model"], r["row"]) != (options.model, row)]
        order = [(model, row) for model in MODELS for row in ROWS]
        data["rows"] = sorted([*others, entry], key=lambda r: order.index((r["model"], r["row"])))
        if options.json is not None:
            options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
