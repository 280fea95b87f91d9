"""What a run is: the model, the settings of the run, and the table of configurations.

In: a command line. Out: a `Model` and a `Run`. Every field of both is a flag. The one trap: what decides the
numbers of a run is its identity, which a checkpoint holds; a field that does not is marked `free`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn


class BadRun(Exception):
    """Something about the run is wrong, and the message says what, and what to try."""


def flag(default: Any, help: str, *, choices: Sequence[str] = (), free: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "free": free})


@dataclass(frozen=True, kw_only=True)
class Model:
    layers: int = flag(4, "transformer blocks")
    width: int = flag(128, "size of the residual stream")
    hidden: int = flag(384, "size inside the MLP")
    heads: int = flag(4, "query heads")
    kv_heads: int = flag(2, "key and value heads")
    head_dim: int = flag(32, "size of a head")
    vocab: int = flag(512, "tokens of the embedding and the head")
    rope_theta: float = flag(5e5, "base of the rotary frequencies")
    rope_scaling: float = flag(0.0, "factor of Llama 3.1's frequency scaling; 0: none")
    norm_eps: float = flag(1e-5, "epsilon of RMSNorm")
    compute: str = flag("bfloat16", "type that is computed in", choices=("bfloat16", "float32"))
    scan: bool = flag(True, "scan over the layers instead of unrolling them")
    remat: str = flag("none", "what is computed anew in the backward pass: nothing; a block; a block but for its "
                      "GEMMs and attention; but for quantized operands",
                      choices=("none", "full", "dots", "quantized"))  # fmt: skip
    loss_chunks: int = flag(1, "parts that the logits are made in, each one twice; 1: whole, and once")
    attention: str = flag("auto", "what runs attention", choices=("auto", "cudnn", "xla"))


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int = flag(200, "optimizer steps in all")
    batch: int = flag(8, "sequences in a step, over all devices")
    sequence: int = flag(128, "tokens in a sequence")
    accumulate: int = flag(1, "parts that a batch is computed in")
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
    on_fault: str = flag("stop", "on NaN, Inf or a spike: end, or skip the step and count it",
                         choices=("stop", "skip"))  # fmt: skip
    data_axis: int = flag(-1, "devices over the batch; -1: all that are left", free=True)
    fsdp_axis: int = flag(1, "devices over the batch and the parameters", free=True)
    tensor_axis: int = flag(1, "devices over heads, hidden and vocabulary", free=True)
    context_axis: int = flag(1, "devices over the sequence", free=True)
    distributed: bool = flag(False, "start jax.distributed: several processes", free=True)
    coordinator: str | None = flag(
        None, "host:port; found by JAX under Slurm, Open MPI, Kubernetes", free=True
    )
    processes: int | None = flag(None, "how many; as above", free=True)
    process_id: int | None = flag(None, "which one this is; as above", free=True)
    out: str | None = flag(
        None, "folder of the run (default: runs/CONFIG, with the policy's hash)", free=True
    )
    checkpoint_every: int = flag(100, "steps; also at the end; 0: never", free=True)
    keep: int = flag(3, "checkpoints to keep", free=True)
    resume_from: int | None = flag(
        None, "an older checkpoint, by its step; later ones are removed", free=True
    )
    accept_changes: bool = flag(
        False, "go on from a checkpoint of another policy or other settings", free=True
    )
    init_from: str | None = flag(None, "folder of safetensors in the Hugging Face layout")
    eval_every: int = flag(0, "steps between validations; also at the end; 0: never", free=True)
    eval_batches: int = flag(8, "batches of the fixed validation set", free=True)
    export_every: int = flag(0, "steps between exports as safetensors; also at the end; 0: never", free=True)
    export_command: str | None = flag(None, "run after an export; {path} is its folder", free=True)
    log_every: int = flag(10, "steps between lines where there is no terminal", free=True)
    wandb: str | None = flag(None, "project to report to", free=True)
    peak_tflops: float = flag(0.0, "of a device in bf16, for MFU; 0: known by the device's name", free=True)
    profile: str | None = flag(None, "record a profile", choices=("xplane", "nsys"), free=True)
    profile_steps: str = flag("10:13", "the steps to record, first:last", free=True)


def _small(layers: int, width: int, hidden: int) -> Model:
    heads = width // 128
    return Model(
        layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, vocab=32000
    )


def _llama3(layers: int, width: int, hidden: int, heads: int, **more: Any) -> Model:
    more = {"head_dim": 128, "remat": "dots", "loss_chunks": 8, **more}
    return Model(layers=layers, width=width, hidden=hidden, heads=heads, kv_heads=8, vocab=128256, **more)


def _tuned(learning_rate: float, steps: int, batch: int = 512, sequence: int = 512, **more: Any) -> Run:
    return Run(learning_rate=learning_rate, steps=steps, batch=batch, sequence=sequence, **more)


# The small ones: 25 tokens per parameter outside of embedding and head.
CONFIGS: dict[str, tuple[Model, Run]] = {
    "tiny": (Model(), Run()),
    "30m": (_small(6, 640, 1792), _tuned(1.2e-3, 2900)),
    "50m": (_small(7, 768, 2048), _tuned(1.2e-3, 4700)),
    "100m": (_small(8, 1024, 2816), _tuned(9e-4, 9800)),
    "200m": (_small(10, 1280, 3584), _tuned(7.2e-4, 19400)),
    "1b": (_llama3(16, 2048, 8192, 32, head_dim=64, rope_scaling=32.0, remat="none", loss_chunks=1),
           _tuned(4e-4, 25000, 256, 4096)),
    "llama3_8b": (_llama3(32, 4096, 14336, 32), _tuned(3e-4, 10000, 1024, 8192, warmup=0.02)),
    "llama3_70b": (_llama3(80, 8192, 28672, 64, rope_scaling=8.0), _tuned(1.5e-4, 10000, 1024, 8192, warmup=0.02)),
    "llama3_405b": (_llama3(126, 16384, 53248, 128, rope_scaling=8.0, remat="full"),
                    _tuned(8e-5, 10000, 1024, 8192, warmup=0.02)),
}  # fmt: skip

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
    for kind in (Run, Model):
        group = parser.add_argument_group(kind.__name__.lower(), "defaults are the configuration's")
        for f in dataclasses.fields(kind):
            _add(group, f)
    given = {k: v for k, v in vars(parser.parse_args(words)).items() if v is not None}
    name = given.pop("config")
    if name not in CONFIGS:
        close = difflib.get_close_matches(name, CONFIGS, 1)
        raise BadRun(f"no configuration named '{name}': " + (f"did you mean '{close[0]}'?" if close else "")
                     + f" (known: {', '.join(CONFIGS)})")  # fmt: skip
    model, run = (_with(part, given) for part in CONFIGS[name])
    check(model, run)
    return name, model, run


def _add(group: Any, f: dataclasses.Field[Any]) -> None:
    word, text = "--" + f.name.replace("_", "-"), f.metadata["help"].replace("%", "%%")
    if f.type == "bool":
        group.add_argument(word, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    kind = {"int": int, "float": float}.get(str(f.type).split(" ")[0], str)
    group.add_argument(word, type=kind, choices=f.metadata["choices"] or None, help=text)


def _with(part: Any, given: dict[str, Any]) -> Any:
    return dataclasses.replace(
        part, **{f.name: given[f.name] for f in dataclasses.fields(part) if f.name in given}
    )


def check(model: Model, run: Run) -> None:
    """All that can be known to be wrong without a device, at once."""
    bad = [
        f"--{name.replace('_', '-')} {value}: it must be at least {least}"
        for part, names, least in (
            (model, "layers width hidden heads kv_heads head_dim vocab loss_chunks", 1),
            (run, "steps batch sequence accumulate fsdp_axis tensor_axis context_axis keep eval_batches log_every", 1),
            (run, "checkpoint_every eval_every export_every weight_decay clip z_loss loss_scale spike warmup decay", 0),
        )
        for name in names.split()
        if (value := getattr(part, name)) < least
    ]  # fmt: skip
    if not bad and model.heads % model.kv_heads:
        bad.append(f"{model.heads} heads are not a multiple of {model.kv_heads} key and value heads")
    if not bad and model.head_dim % 2:
        bad.append(f"--head-dim {model.head_dim}: rotary embedding needs an even number")
    if not bad and run.batch % run.accumulate:
        bad.append(f"--batch {run.batch} cannot be computed in {run.accumulate} equal parts")
    if not bad and run.sequence % model.loss_chunks:
        bad.append(f"--sequence {run.sequence} does not divide into --loss-chunks {model.loss_chunks}")
    if run.warmup + (run.decay if run.schedule == "wsd" else 0) > 1:
        bad.append("--warmup and --decay are more than all steps together")
    first, colon, last = run.profile_steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        bad.append(f"--profile-steps {run.profile_steps}: two steps are meant, such as 10:13")
    if bad:
        raise BadRun("; ".join(bad))


def identity(model: Model, run: Run, policy: str | None) -> dict[str, Any]:
    """What decides the numbers of a run."""
    return {"policy": policy} | {
        f.name: getattr(part, f.name)
        for part in (model, run)
        for f in dataclasses.fields(part)
        if not f.metadata["free"]
    }
