"""Training steps of unmodified MaxText on a GPU: bf16, its own FP8 flags, and policies, side by side.

    pip install maxtext==0.2.5 ...                                  # see tests/trainers-requirements.txt
    python -m benchmarks.maxtext_step --pack maxtext.tar.xz         # where MaxText is installed
    python -m benchmarks.maxtext_step maxtext.tar.xz --remat minimal_with_context,full --json steps.json

The archive has MaxText and those of its dependencies that a machine with JAX, Flax and Optax may lack (9 MB), so the
second command needs no network. What a synthetic run does not use is replaced by stubs. Every row is a process of its
own: `tokens` is the median of the late steps, `first step` the time from MaxText's setup to the end of its compilation,
`memory` XLA's estimate for the step.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser, print_header, print_row
from benchmarks.timing import describe_machine

_PACKAGES = (
    "maxtext",
    "aqt",
    "drjax",
    "einshape",
    "fire",
    "humanize",
    "immutabledict",
    "jaxtyping",
    "ml_collections",
    "omegaconf",
    "pydantic",
    "pydantic_core",
    "simplejson",
    "tokamax",
    "typing_inspection",
    "wadler_lindig",
    "termcolor",
    "annotated_types",
    "attr",
    "attrs",
    "chex",
    "toolz",
    "treescope",
    "grain",
    "array_record",
    "portpicker",
    "etils",
    "qwix",
    "cloudpickle",
    "lark",
)
"""What MaxText and policyc import, apart from JAX, Flax, Optax, Orbax and what these need."""

_NEEDLESS = re.compile(
    r"__pycache__|/(tests|assets)(/|$)|/(test_[^/]*|[^/]*_test)\.py$|tokamax/data/autotuning/tpu|\.ipynb$"
)

_FAST = "* -> bf16\n* where block and (attention or mlp) -> fp8(sums=fast)\n"

_SIZES = {
    "decoder_block": "llama2", "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 8,
    "head_dim": 128, "base_mlp_dim": 8192, "base_num_decoder_layers": 16, "vocab_size": 32768,
    "max_target_length": 2048, "per_device_batch_size": 8, "attention": "cudnn_flash_jax", "dtype": "bfloat16",
}  # fmt: skip
_RUN = {
    "hardware": "gpu", "dataset_type": "synthetic", "enable_checkpointing": "false", "log_config": "false",
    "skip_jax_distributed_system": "true",
}  # fmt: skip
_FIRST = 4
"""Steps that are left out: the first ones are longer."""

ROWS = {
    "bf16": [],
    "its fp8": ["quantization=fp8"],
    "its qwix fp8": ["quantization=fp8", "use_qwix_quantization=true"],
    "policy fp8": [],
    "policy fp8(sums=fast)": [],
    "policy llama_nvfp4": [],
    "policy te_nvfp4": [],
}
"""MaxText's own options for each row."""


def pack(archive: Path) -> None:
    """Writes MaxText and the dependencies beside it into an archive, with their metadata."""
    site = Path(importlib.import_module("maxtext").__file__ or "").parents[1]
    with tarfile.open(archive, "w:xz") as tar:
        for name in _PACKAGES:
            found = [site / name, site / f"{name}.py", *site.glob(f"{name}-*.dist-info")]
            for path in filter(Path.exists, found):
                tar.add(
                    path, path.name, filter=lambda item: None if _NEEDLESS.search(f"/{item.name}") else item
                )


def measure(row: str, options: list[str], site: Path, work: Path, limit: float) -> dict[str, Any]:
    """Runs MaxText once, and reads its log and its metrics."""
    name = re.sub(r"\W+", "_", row)
    folder = work / name
    folder.mkdir()
    program: list[str] = []
    if row.startswith("policy "):
        (folder / "fast.policy").write_text(_FAST)
        policy = row.removeprefix("policy ")
        program = ["-m", "policyc", "apply", str(folder / "fast.policy") if "fast" in policy else policy]
    settings = (
        _SIZES
        | _RUN
        | {"run_name": name, "base_output_directory": work, "metrics_file": folder / "metrics.jsonl"}
    )
    words = [
        *program,
        str(Path(__file__).with_name("maxtext_stubs.py")),
        str(site / "maxtext/configs/base.yml"),
    ]
    words += [f"{key}={value}" for key, value in settings.items()] + options
    path = os.pathsep.join([str(site), *sys.path[:1], os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "DECOUPLE_GCLOUD": "TRUE", "HF_HUB_OFFLINE": "1"}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    log = folder / "log"
    with log.open("w") as output:
        try:
            code = subprocess.call(
                [sys.executable, *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            code = -1
    text = log.read_text(errors="replace")
    if code:
        return {"row": row, "options": options, "error": f"ended with {code}: {text[-800:]}"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["perf/step_time_seconds"] for line in lines if "perf/step_time_seconds" in line]
    losses = [line["learning/loss"] for line in lines if "learning/loss" in line]
    memory = re.search(r"Total estimated memory size: ([\d.]+) GB", text)
    return {
        "row": row,
        "options": options,
        "tokens": 8 * 2048 / statistics.median(seconds[_FIRST:]),
        "quartiles_ms": [1e3 * q for q in statistics.quantiles(seconds[_FIRST:], n=4)],
        "loss": losses[-1],
        "memory_gb": float(memory[1]) if memory else None,
        "first_step_s": _time_of(text, "Total estimated memory") - _time_of(text, "Checkpointing disabled"),
    }


def _time_of(log: str, message: str) -> float:
    """The time of day of a line of the log, in seconds."""
    match = re.search(rf"(\d+):(\d+):([\d.]+) .*{message}", log)
    if match is None:
        return float("nan")
    clock = datetime.timedelta(hours=int(match[1]), minutes=int(match[2]), seconds=float(match[3]))
    return clock.total_seconds()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("archive", type=Path, nargs="?", help="the archive that --pack wrote")
    parser.add_argument("--pack", type=Path, metavar="ARCHIVE", help="write the archive, and measure nothing")
    parser.add_argument(
        "--remat", default="minimal_with_context", help="remat policies of MaxText (default: %(default)s)"
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="what to measure (default: %(default)s)")
    parser.add_argument("--unrolled", action="store_true", help="with scan_layers=false")
    parser.add_argument("--steps", type=int, default=24, help="steps of each run (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=200, help="seconds for one run (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack)
        return
    if options.archive is None:
        parser.error("give the archive that --pack wrote")
    _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process only asks which GPU it is
    machine = describe_machine()
    results = []
    print_header(
        ("remat policy", "row", "tokens/s", "relative to bf16", "first step, s", "memory, GB", "loss")
    )
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        with tarfile.open(options.archive) as tar:
            tar.extractall(site, filter="data")
        for remat in options.remat.split(","):
            common = [
                f"remat_policy={remat}",
                f"scan_layers={str(not options.unrolled).lower()}",
                f"steps={options.steps}",
            ]
            work = Path(folder, remat)
            work.mkdir()
            reference = float("nan")
            for row in options.rows.split(","):
                result = measure(row, [*common, *ROWS[row]], site, work, options.limit)
                results.append(result | {"remat": remat, "scanned": not options.unrolled})
                if options.json:
                    data = {"machine": machine, "sizes": _SIZES, "results": results}
                    options.json.write_text(json.dumps(data, indent=1) + "\n")
                if "error" in result:
                    print_row((remat, row, result["error"].splitlines()[-1][:80], "", "", "", ""))
                    continue
                reference = result["tokens"] if row == "bf16" else reference
                numbers = (
                    result["tokens"] / reference,
                    result["first_step_s"],
                    result["memory_gb"] or float("nan"),
                )
                cells = (
                    f"{result['tokens']:,.0f}",
                    f"{numbers[0]:.3f}",
                    f"{numbers[1]:.1f}",
                    f"{numbers[2]:.1f}",
                )
                print_row((remat, row, *cells, f"{result['loss']:.3f}"))


if __name__ == "__main__":
    main()
