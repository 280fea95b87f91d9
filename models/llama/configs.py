"""What a run is: the model, the settings of the run, and the table of configurations.

In: a command line. Out: a `Model` and a `Run`. Every field of both is a flag. The one trap: what decides the
numbers of a run is its identity, which a checkpoint holds; a field that does not is marked `free`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any


class BadRun(Exception):
    """Something about the run is wrong, and the message says what, and what to try."""


def library(name: str, extra: str) -> Any:
    """A package that only some runs need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadRun(f"this needs the package '{name}': pip install 'policyc[{extra}]'") from None


def flag(default: Any, help: str, least: int = 0, choices: Any = None, free: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "least": least, "choices": choices, "free": free})


free = partial(flag, free=True)


@dataclass(frozen=True)
class Model:
    layers: int = flag(4, "transformer blocks", least=1)
    width: int = flag(128, "size of the residual stream", least=1)
    hidden: int = flag(384, "size inside the MLP", least=1)
    heads: int = flag(4, "query heads", least=1)
    kv_heads: int = flag(2, "key and value heads", least=1)
    head_dim: int = flag(32, "size of a head", least=2)
    vocab: int = flag(512, "tokens of the embedding and the head", least=1)
    rope_theta: float = flag(5e5, "base of the rotary frequencies", least=1)
    rope_scaling: float = flag(0.0, "factor of Llama 3.1's frequency scaling; 0: none")
    norm_eps: float = flag(1e-5, "epsilon of RMSNorm")
    compute: str = flag("bfloat16", "type that is computed in", choices=("bfloat16", "float32"))
    scan: bool = flag(True, "scan over the layers instead of unrolling them")
    remat: str = flag("none", "computed anew in the backward pass: nothing; a block; all but GEMMs and attention; "
                      "all but quantized operands", choices=("none", "full", "dots", "quantized"))  # fmt: skip
    loss_chunks: int = flag(1, "parts that the logits are made in, each twice; 1: whole, and once", least=1)
    attention: str = flag("auto", "what runs attention", choices=("auto", "cudnn", "xla"))


@dataclass(frozen=True)
class Run:
    steps: int = flag(200, "optimizer steps in all", least=1)
    batch: int = flag(8, "sequences in a step, over all devices", least=1)
    sequence: int = flag(128, "tokens in a sequence", least=1)
    accumulate: int = flag(1, "parts that a batch is computed in", least=1)
    seed: int = flag(0, "of the weights and of the order of the data")
    data: str = flag("stdlib", "where tokens come from; see data.py")
    tokenizer: str | None = flag(None, "file of a BPE tokenizer; without one, bytes")
    learning_rate: float = flag(3e-3, "peak learning rate")
    schedule: str = flag("cosine", "after the warm-up", choices=("cosine", "wsd", "constant"))
    warmup: float = flag(0.1, "part of the steps in which the learning rate rises")
    decay: float = flag(0.2, "part of the steps, at the end, in which wsd falls")
    final: float = flag(0.1, "last learning rate, as a part of the peak")
    beta1: float = flag(0.9, "of AdamW")
    beta2: float = flag(0.95, "of AdamW")
    weight_decay: float = flag(0.1, "on all but norms")
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping")
    z_loss: float = flag(0.0, "weight of the squared log-partition")
    loss_scale: float = flag(0.0, "first dynamic loss scale; 0: none")
    spike: float = flag(0.0, "a loss this many nats above its running mean is a fault; 0: never")
    on_fault: str = flag("stop", "NaN, Inf or a spike: end, or skip and count it", choices=("stop", "skip"))
    data_axis: int = free(-1, "devices over the batch; -1: all that are left", least=-1)
    fsdp_axis: int = free(1, "devices over the batch and the parameters", least=1)
    tensor_axis: int = free(1, "devices over heads, hidden and vocabulary", least=1)
    context_axis: int = free(1, "devices over the sequence", least=1)
    distributed: bool = free(False, "start jax.distributed: several processes")
    coordinator: str | None = free(None, "host:port; Slurm, Open MPI, Kubernetes: found by JAX")
    processes: int | None = free(None, "how many; as above")
    process_id: int | None = free(None, "which one this is; as above")
    out: str | None = free(None, "folder of the run (default: runs/CONFIG, with the policy's hash)")
    checkpoint_every: int = free(100, "steps; also at the end; 0: never")
    keep: int = free(3, "checkpoints to keep", least=1)
    accept_changes: bool = free(False, "go on from a checkpoint of another policy or run")
    init_from: str | None = flag(None, "folder of safetensors in the Hugging Face layout")
    eval_every: int = free(0, "steps between validations; also at the end; 0: never")
    eval_batches: int = free(8, "batches of the fixed validation set", least=1)
    export_every: int = free(0, "steps between safetensors; also at the end; 0: never")
    export_command: str | None = free(None, "run after an export; {path} is its folder")
    log_every: int = free(10, "steps between lines where there is no terminal", least=1)
    wandb: str | None = free(None, "project to report to")
    peak_tflops: float = free(0.0, "of a device in bf16, for MFU; 0: by the device's name")
    profile: str | None = free(None, "record a profile", choices=("xplane", "nsys"))
    profile_steps: str = free("10:13", "the steps to record, first:last")


# The sizes are in the order of the fields above.
_BIG: dict[str, Any] = {"vocab": 128256, "loss_chunks": 8}
_LONG: dict[str, Any] = {"steps": 10000, "batch": 1024, "sequence": 8192, "warmup": 0.02}
CONFIGS: dict[str, tuple[Model, Run]] = {
    "tiny": (Model(), Run()),
    # 25 tokens per parameter outside of embedding and head.
    "30m": (Model(6, 640, 1792, 5, 5, 128, 32000), Run(2900, 512, 512, learning_rate=1.2e-3)),
    "50m": (Model(7, 768, 2048, 6, 6, 128, 32000), Run(4700, 512, 512, learning_rate=1.2e-3)),
    "100m": (Model(8, 1024, 2816, 8, 8, 128, 32000), Run(9800, 512, 512, learning_rate=9e-4)),
    "200m": (Model(10, 1280, 3584, 10, 10, 128, 32000), Run(19400, 512, 512, learning_rate=7.2e-4)),
    "1b": (Model(16, 2048, 8192, 32, 8, 64, 128256, rope_scaling=32.0),
           Run(25000, 256, 4096, learning_rate=4e-4)),
    "llama3_8b": (Model(32, 4096, 14336, 32, 8, 128, **_BIG, remat="dots"),
                  Run(**_LONG, learning_rate=3e-4)),
    "llama3_70b": (Model(80, 8192, 28672, 64, 8, 128, **_BIG, remat="dots", rope_scaling=8.0),
                   Run(**_LONG, learning_rate=1.5e-4)),
    "llama3_405b": (Model(126, 16384, 53248, 128, 8, 128, **_BIG, remat="full", rope_scaling=8.0),
                    Run(**_LONG, learning_rate=8e-5)),
}  # fmt: skip


EXAMPLES = """examples:
  python models/llama/train.py --config tiny
  python models/llama/train.py --config 30m --data corpus.bin --batch 64 --accumulate 8 --eval-every 200
  python models/llama/train.py --config llama3_8b --fsdp-axis 8 --distributed --out runs/8b
  policyc apply llama_nvfp4 models/llama/train.py --config tiny
"""


def parse(words: Sequence[str] | None = None) -> tuple[str, Model, Run]:
    """The configuration's name, the model and the run that a command line means."""
    usage = "train.py [--help] [--config NAME] [OPTION ...]"
    parser = argparse.ArgumentParser("train.py", usage, "Pretrain a Llama.", EXAMPLES, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="tiny", choices=CONFIGS, help="(default: tiny)")
    for part in (Run, Model):
        group = parser.add_argument_group(part.__name__.lower(), "defaults are the configuration's")
        for f in fields(part):
            kind = {"int": int, "float": float}.get(str(f.type).split(" ")[0], str)
            how: Any = {"type": kind, "choices": f.metadata["choices"]}
            how = {"action": argparse.BooleanOptionalAction} if f.type == "bool" else how
            group.add_argument("--" + f.name.replace("_", "-"), default=None, help=f.metadata["help"], **how)
    given = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    name = given.pop("config")
    model, run = (replace(p, **{k: v for k, v in given.items() if hasattr(p, k)}) for p in CONFIGS[name])
    if bad := faults(model, run):
        parser.error("; ".join(bad))
    return name, model, run


def faults(model: Model, run: Run) -> list[str]:
    """All that can be known to be wrong without a device, at once. `model.make_mesh` knows the rest."""
    values = {**vars(model), **vars(run)}
    least = {f.name: f.metadata["least"] for p in (model, run) for f in fields(p)}
    small = [n for n, v in values.items() if isinstance(v, int | float) and not v >= least[n]]
    bad = [f"--{n.replace('_', '-')} {values[n]}: it must be at least {least[n]}" for n in small]
    first, _, last = run.profile_steps.partition(":")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        bad.append(f"--profile-steps {run.profile_steps}: two steps are meant, such as 10:13")
    elif run.profile and int(last) > run.steps:
        bad.append(f"--profile-steps {run.profile_steps}: there are {run.steps} steps in all")
    if run.warmup + (run.decay if run.schedule == "wsd" else 0) > 1:
        bad.append("--warmup and --decay are more than all steps together")
    return bad


def identity(model: Model, run: Run, policy: str | None) -> dict[str, Any]:
    """What decides the numbers of a run."""
    free = {f.name for p in (model, run) for f in fields(p) if f.metadata["free"]}
    return {"policy": policy} | {n: v for n, v in {**vars(model), **vars(run)}.items() if n not in free}
