"""What a run is: the model, the settings of the run, and the table of configurations.

In: a command line. Out: a `Model` and a `Run`. Every field of both is a flag. The one trap: what decides the
numbers of a run is its identity, which a checkpoint holds; a field that does not is marked `free`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


class BadRun(Exception):
    """Something about the run is wrong, and the message says what, and what to try."""


def library(name: str, extra: str) -> Any:
    """A package that only some runs need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BadRun(f"this needs the package '{name}': pip install 'policyc[{extra}]'") from None


def flag(
    default: Any, help: str, *, least: int | None = None, choices: Sequence[str] = (), free: bool = False
) -> Any:
    about = {"help": help, "least": least, "choices": choices or None, "free": free}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Model:
    layers: int = flag(4, "transformer blocks", least=1)
    width: int = flag(128, "size of the residual stream", least=1)
    hidden: int = flag(384, "size inside the MLP", least=1)
    heads: int = flag(4, "query heads", least=1)
    kv_heads: int = flag(2, "key and value heads", least=1)
    head_dim: int = flag(32, "size of a head", least=2)
    vocab: int = flag(512, "tokens of the embedding and the head", least=1)
    rope_theta: float = flag(5e5, "base of the rotary frequencies", least=1)
    rope_scaling: float = flag(0.0, "factor of Llama 3.1's frequency scaling; 0: none", least=0)
    norm_eps: float = flag(1e-5, "epsilon of RMSNorm", least=0)
    compute: str = flag("bfloat16", "type that is computed in", choices=("bfloat16", "float32"))
    scan: bool = flag(True, "scan over the layers instead of unrolling them")
    remat: str = flag("none", "computed anew in the backward pass: nothing; a block; all but GEMMs and attention; "
                      "all but quantized operands", choices=("none", "full", "dots", "quantized"))  # fmt: skip
    loss_chunks: int = flag(1, "parts that the logits are made in, each twice; 1: whole, and once", least=1)
    attention: str = flag("auto", "what runs attention", choices=("auto", "cudnn", "xla"))


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int = flag(200, "optimizer steps in all", least=1)
    batch: int = flag(8, "sequences in a step, over all devices", least=1)
    sequence: int = flag(128, "tokens in a sequence", least=1)
    accumulate: int = flag(1, "parts that a batch is computed in", least=1)
    seed: int = flag(0, "of the weights and of the order of the data", least=0)
    data: str = flag("stdlib", "where tokens come from; see data.py")
    tokenizer: str | None = flag(None, "file of a BPE tokenizer; without one, bytes")
    learning_rate: float = flag(3e-3, "peak learning rate", least=0)
    schedule: str = flag("cosine", "after the warm-up", choices=("cosine", "wsd", "constant"))
    warmup: float = flag(0.1, "part of the steps in which the learning rate rises", least=0)
    decay: float = flag(0.2, "part of the steps, at the end, in which wsd falls", least=0)
    final: float = flag(0.1, "last learning rate, as a part of the peak", least=0)
    beta1: float = flag(0.9, "of AdamW", least=0)
    beta2: float = flag(0.95, "of AdamW", least=0)
    weight_decay: float = flag(0.1, "on all but norms", least=0)
    clip: float = flag(1.0, "largest gradient norm; 0: no clipping", least=0)
    z_loss: float = flag(0.0, "weight of the squared log-partition", least=0)
    loss_scale: float = flag(0.0, "first dynamic loss scale; 0: none", least=0)
    spike: float = flag(0.0, "a loss this many nats above its running mean is a fault; 0: never", least=0)
    on_fault: str = flag("stop", "NaN, Inf or a spike: end, or skip and count it", choices=("stop", "skip"))
    data_axis: int = flag(-1, "devices over the batch; -1: all that are left", least=-1, free=True)
    fsdp_axis: int = flag(1, "devices over the batch and the parameters", least=1, free=True)
    tensor_axis: int = flag(1, "devices over heads, hidden and vocabulary", least=1, free=True)
    context_axis: int = flag(1, "devices over the sequence", least=1, free=True)
    distributed: bool = flag(False, "start jax.distributed: several processes", free=True)
    coordinator: str | None = flag(None, "host:port; Slurm, Open MPI, Kubernetes: found by JAX", free=True)
    processes: int | None = flag(None, "how many; as above", free=True)
    process_id: int | None = flag(None, "which one this is; as above", free=True)
    out: str | None = flag(
        None, "folder of the run (default: runs/CONFIG, with the policy's hash)", free=True
    )
    checkpoint_every: int = flag(100, "steps; also at the end; 0: never", least=0, free=True)
    keep: int = flag(3, "checkpoints to keep", least=1, free=True)
    resume_from: int | None = flag(
        None, "an older checkpoint, by its step; later ones are removed", free=True
    )
    accept_changes: bool = flag(False, "go on from a checkpoint of another policy or run", free=True)
    init_from: str | None = flag(None, "folder of safetensors in the Hugging Face layout")
    eval_every: int = flag(0, "steps between validations; also at the end; 0: never", least=0, free=True)
    eval_batches: int = flag(8, "batches of the fixed validation set", least=1, free=True)
    export_every: int = flag(0, "steps between safetensors; also at the end; 0: never", least=0, free=True)
    export_command: str | None = flag(None, "run after an export; {path} is its folder", free=True)
    log_every: int = flag(10, "steps between lines where there is no terminal", least=1, free=True)
    wandb: str | None = flag(None, "project to report to", free=True)
    peak_tflops: float = flag(
        0.0, "of a device in bf16, for MFU; 0: by the device's name", least=0, free=True
    )
    profile: str | None = flag(None, "record a profile", choices=("xplane", "nsys"), free=True)
    profile_steps: str = flag("10:13", "the steps to record, first:last", free=True)


def _small(layers: int, width: int, hidden: int, rate: float, steps: int) -> tuple[Model, Run]:
    heads = width // 128
    model = Model(
        layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, vocab=32000
    )
    return model, Run(learning_rate=rate, steps=steps, batch=512, sequence=512)  # fmt: skip


def _llama3(layers: int, width: int, hidden: int, heads: int, rate: float, **more: Any) -> tuple[Model, Run]:
    more = {"head_dim": 128, "remat": "dots", "loss_chunks": 8, **more}
    model = Model(layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=8, vocab=128256, **more)
    return model, Run(learning_rate=rate, steps=10000, batch=1024, sequence=8192, warmup=0.02)


_1B = _llama3(16, 2048, 8192, 32, 4e-4, head_dim=64, rope_scaling=32.0, remat="none", loss_chunks=1)[0]
CONFIGS: dict[str, tuple[Model, Run]] = {
    "tiny": (Model(), Run()),
    "30m": _small(
        6, 640, 1792, 1.2e-3, 2900
    ),  # 25 tokens per parameter outside of embedding and head; so the next
    "50m": _small(7, 768, 2048, 1.2e-3, 4700),
    "100m": _small(8, 1024, 2816, 9e-4, 9800),
    "200m": _small(10, 1280, 3584, 7.2e-4, 19400),
    "1b": (_1B, Run(learning_rate=4e-4, steps=25000, batch=256, sequence=4096)),
    "llama3_8b": _llama3(32, 4096, 14336, 32, 3e-4),
    "llama3_70b": _llama3(80, 8192, 28672, 64, 1.5e-4, rope_scaling=8.0),
    "llama3_405b": _llama3(126, 16384, 53248, 128, 8e-5, rope_scaling=8.0, remat="full"),
}

EXAMPLES = """examples:
  python models/llama/train.py --config tiny
  python models/llama/train.py --config 30m --data corpus.bin --batch 64 --accumulate 8 --eval-every 200
  python models/llama/train.py --config llama3_8b --fsdp-axis 8 --distributed --out runs/8b
  policyc apply llama_nvfp4 models/llama/train.py --config tiny
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadRun(f"{message}\ntry --help")


def parse(words: Sequence[str] | None = None) -> tuple[str, Model, Run]:
    """The configuration's name, the model and the run that a command line means."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        description="Pretrain a Llama.", epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--config", default="tiny", help=f"one of {', '.join(CONFIGS)} (default: tiny)")
    for part in (Run, Model):
        group = parser.add_argument_group(part.__name__.lower(), "defaults are the configuration's")
        for f in dataclasses.fields(part):
            kind = {"int": int, "float": float}.get(str(f.type).split(" ")[0], str)
            how: dict[str, Any] = {"type": kind, "choices": f.metadata["choices"]}
            if f.type == "bool":
                how = {"action": argparse.BooleanOptionalAction}
            group.add_argument("--" + f.name.replace("_", "-"), default=None, help=f.metadata["help"], **how)
    given = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    name = given.pop("config")
    if name not in CONFIGS:
        close = "".join(f"did you mean '{c}'? " for c in difflib.get_close_matches(name, CONFIGS, 1))
        raise BadRun(f"no configuration named '{name}': {close}(known: {', '.join(CONFIGS)})")
    model, run = (
        dataclasses.replace(part, **{k: v for k, v in given.items() if hasattr(part, k)}) for part in CONFIGS[name]
    )  # fmt: skip
    check(model, run)
    return name, model, run


def check(model: Model, run: Run) -> None:
    """All that can be known to be wrong without a device, at once."""
    values = [(f, getattr(part, f.name)) for part in (model, run) for f in dataclasses.fields(part)]
    bad = [
        f"--{f.name.replace('_', '-')} {value}: it must be at least {f.metadata['least']}"
        for f, value in values
        if f.metadata["least"] is not None and not value >= f.metadata["least"]
    ]
    if not bad:
        first, _, last = run.profile_steps.partition(":")
        steps = first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)
        falls = run.decay if run.schedule == "wsd" else 0
        rules = (
            (model.heads % model.kv_heads == 0,
             f"{model.heads} heads are not a multiple of {model.kv_heads} key and value heads"),
            (model.head_dim % 2 == 0, f"--head-dim {model.head_dim}: rotary embedding needs an even number"),
            (run.batch % run.accumulate == 0,
             f"--batch {run.batch} cannot be computed in {run.accumulate} equal parts"),
            (run.sequence % model.loss_chunks == 0,
             f"--sequence {run.sequence} does not divide into --loss-chunks {model.loss_chunks}"),
            (run.warmup + falls <= 1, "--warmup and --decay are more than all steps together"),
            (steps, f"--profile-steps {run.profile_steps}: two steps are meant, such as 10:13"),
        )  # fmt: skip
        bad = [text for holds, text in rules if not holds]
    if bad:
        raise BadRun("; ".join(bad))


def identity(model: Model, run: Run, policy: str | None) -> dict[str, Any]:
    """What decides the numbers of a run."""
    fields = {
        f.name: part for part in (model, run) for f in dataclasses.fields(part) if not f.metadata["free"]
    }
    return {"policy": policy} | {name: getattr(part, name) for name, part in fields.items()}
