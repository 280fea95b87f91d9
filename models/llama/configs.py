"""The settings of a run, and the table of configurations.

Every field of `ModelConfig` and `RunConfig` is an option of the command line. The fields that affect the numbers
of a run form its identity, which checkpoints store.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import os
import re
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

ACTIVITIES: dict[str, str] = {
    "step": "steps",
    "stall": "data",
    "compile": "compiling",
    "checkpoint": "checkpoints",
    "eval": "validation",
    "export": "exports",
    "start": "starting",
    "other": "other",
    "lost": "lost steps",
    "down": "between restarts",
}
"""The activities that take up the time of a run, and their display names."""


class ConfigError(ValueError):
    """A run is not possible as configured. The message says why, and what to try."""


def import_library(name: str, extra: str) -> Any:
    """Imports a package that only some runs need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"this needs the package '{name}': pip install 'policyc[{extra}]'") from None


def setting(
    default: Any,
    help: str,
    least: int = 0,
    limit: float = math.inf,
    choices: Any = None,
    in_identity: bool = True,
) -> Any:
    """A dataclass field that is also a command-line option. Numbers must be at least `least` and below `limit`."""
    metadata = {"help": help, "least": least, "limit": limit, "choices": choices, "in_identity": in_identity}
    return field(default=default, metadata=metadata)


operational: partial[Any] = partial(setting, in_identity=False)  # does not change the numbers of a run


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of a Llama, and how its loss is computed."""

    layers: int = setting(4, "number of transformer blocks", least=1)
    width: int = setting(128, "size of the residual stream", least=1)
    hidden: int = setting(384, "hidden size of the MLP, or of each expert", least=1)
    experts: int = setting(0, "number of experts in each block; 0: an MLP instead")
    experts_per_token: int = setting(2, "number of experts that process each token", least=1)
    balance_loss: float = setting(0.02, "weight of the experts' load-balancing loss")
    heads: int = setting(4, "number of query heads", least=1)
    kv_heads: int = setting(2, "number of key and value heads", least=1)
    head_dim: int = setting(32, "size of one head", least=2)
    vocab: int = setting(512, "size of the vocabulary", least=1)
    rope_theta: float = setting(5e5, "base of the rotary frequencies", least=1)
    rope_scaling: float = setting(0.0, "factor of Llama 3.1's frequency scaling; 0: no scaling")
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm")
    compute: str = setting("bfloat16", "dtype of the computation", choices=("bfloat16", "float32"))
    scan: bool = setting(True, "scan over the layers instead of unrolling them")
    remat: str = setting("none", "what the backward pass recomputes: nothing; everything; everything but GEMMs and "
                         "attention; everything but quantized operands",
                         choices=("none", "full", "dots", "quantized"))  # fmt: skip
    loss_chunks: int = setting(
        1, "compute the logits in this many chunks, twice each, to save memory", least=1
    )
    attention: str = setting("auto", "implementation of attention", choices=("auto", "cudnn", "xla"))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a model is trained: steps, data, optimizer, devices, checkpoints, metrics."""

    steps: int = setting(200, "number of optimizer steps", least=1)
    batch: int = setting(8, "sequences per step, over all devices", least=1)
    sequence: int = setting(128, "tokens per sequence", least=1)
    accumulate: int = setting(1, "compute the gradient of a batch in this many parts", least=1)
    seed: int = setting(0, "seed of the weights and of the order of the data", limit=2**32)
    seeds: str | None = setting(
        None, "several seeds in one process, such as 0,1,2, each with its own folder FOLDER/seedN"
    )
    folder: str | None = operational(
        None, "folder of the run (default: runs/CONFIG, or runs/CONFIG-HASH under a policy)"
    )
    # The identity of a run has the contents of its data instead of these two paths.
    data: str = operational("stdlib", "source of the tokens: PATH or KIND:PATH,option=value; a blend of several: "
                            "'SPEC@0.7 SPEC@0.3'; see docs/reference/data.md")  # fmt: skip
    tokenizer: str | None = operational(None, "tokenizer.json of a BPE tokenizer (default: tokens are bytes)")
    max_bad_rows: int = operational(
        10,
        "rows without readable text to skip per epoch of a source, each with a warning; one more ends the run",
    )
    document_mask: bool = setting(
        False, "tokens attend only to their own document, and positions restart at each document"
    )
    packing: str = setting("concat", "contents of a row: a window of the joined documents, or whole documents and "
                           "padding", choices=("concat", "whole"))  # fmt: skip
    optimizer: str = setting("adamw", "AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for "
                             "the rest", choices=("adamw", "muon"))  # fmt: skip
    learning_rate: float = setting(3e-3, "peak learning rate")
    schedule: str = setting(
        "cosine", "learning-rate schedule after the warm-up", choices=("cosine", "wsd", "constant")
    )
    warmup: float = setting(0.1, "fraction of the steps in which the learning rate warms up")
    warmup_steps: int = setting(0, "warm-up as a number of steps, instead of --warmup")
    decay: float = setting(0.2, "fraction of the steps at the end in which wsd lowers the learning rate")
    final: float = setting(0.1, "final learning rate, as a fraction of the peak")
    beta1: float = setting(0.9, "beta1 of AdamW", limit=1)
    beta2: float = setting(0.95, "beta2 of AdamW", limit=1)
    momentum: float = setting(0.95, "momentum of Muon", limit=1)
    weight_decay: float = setting(0.1, "weight decay; not applied to norms")
    clip: float = setting(1.0, "clip the gradient to this norm; 0: no clipping")
    z_loss: float = setting(0.0, "weight of the squared log-partition in the loss")
    loss_scale: float = setting(0.0, "initial dynamic loss scale; 0: no scaling")
    spike: float = setting(0.0, "a loss this many nats above its running mean is a fault; 0: never")
    on_fault: str = operational("stop", "what to do on NaN, Inf or a spike", choices=("stop", "skip"))
    max_skips: int = operational(10, "faulty steps in a row after which --on-fault skip gives up", least=1)
    step_timeout: float = operational(0.0, "end the run if a step takes this many seconds, not counting compiling; "
                                      "0: never")  # fmt: skip
    gather: str = setting("each", "gather weights and sum gradients over devices for each part of a batch, or once per "
                          "step, with whole weights and gradients on every device",
                          choices=("each", "once"))  # fmt: skip
    data_axis: int = operational(-1, "devices to split the batch over; -1: all remaining devices", least=-1)
    fsdp_axis: int = operational(1, "devices to split the batch and the parameters over", least=1)
    expert_axis: int = operational(1, "devices to split the batch and the experts over", least=1)
    tensor_axis: int = operational(1, "devices to split heads, hidden and vocabulary over", least=1)
    context_axis: int = operational(1, "devices to split the sequence over", least=1)
    distributed: bool = operational(False, "start jax.distributed, for several processes")
    coordinator: str | None = operational(None, "host:port of process 0 (JAX finds it under Slurm, Open MPI and "
                                          "Kubernetes)")  # fmt: skip
    processes: int | None = operational(None, "number of processes (JAX finds it there too)")
    process_id: int | None = operational(None, "index of this process (JAX finds it there too)")
    heartbeat: int = operational(15, "seconds without a heartbeat before a process counts as dead", least=2)
    checkpoint_every: int = operational(100, "steps between checkpoints; also at the end; 0: never")
    keep: int = operational(3, "number of checkpoints to keep", least=1)
    keep_every: int = operational(0, "keep the checkpoints of every N-th step for good; 0: none")
    resume_from: str | None = operational(None, "start in a new folder from this checkpoint of another run, such as "
                                          "runs/a/checkpoints/300")  # fmt: skip
    accept_changes: bool = operational(
        False, "resume although the policy, settings or metrics.jsonl have changed"
    )
    init_from: str | None = setting(None, "start from safetensors in this folder (Hugging Face layout)")
    eval_every: int = operational(0, "steps between validations; also at the end; 0: never")
    eval_batches: int = operational(8, "number of batches in the fixed validation set", least=1)
    export_every: int = operational(0, "steps between exports to safetensors; also at the end; 0: never")
    export_command: str | None = operational(None, "command to run after each export; {path} is its folder")
    export_timeout: float = operational(3600.0, "seconds after which --export-command is killed; 0: never")
    on_export_fault: str = operational(
        "continue", "what to do if --export-command fails", choices=("continue", "stop")
    )
    log_every: int = operational(10, "steps between lines of output if stdout is not a terminal", least=1)
    norms_every: int = operational(
        0, "steps between records of weight and gradient norms by parameter; 0: never"
    )
    wandb: str | None = operational(None, "Weights & Biases project to report to")
    profile: str | None = operational(None, "record a profile", choices=("xplane", "nsys"))
    profile_steps: str = operational("10:13", "steps to record, first:last")
    compile_cache: str | None = operational(None, "folder for compiled programs, or off (default: "
                                            "~/.cache/policyc/compiled)")  # fmt: skip


_SIZES = ("layers", "width", "hidden", "heads", "kv_heads", "head_dim", "vocab")


def _model(*sizes: int, **options: Any) -> ModelConfig:
    options |= zip(_SIZES, sizes, strict=True)
    return ModelConfig(**options)


_MIXTRAL: dict[str, Any] = {"experts": 8, "rope_theta": 1e6, "remat": "full"}
_LLAMA3: dict[str, Any] = {"remat": "dots"}
_SHORT: dict[str, Any] = {"batch": 512, "sequence": 512}
_LONG: dict[str, Any] = {"steps": 10000, "batch": 1024, "sequence": 8192, "warmup": 0.02}
_SMALL: dict[str, Any] = {"batch": 16, "sequence": 512, "learning_rate": 1e-3}
CONFIGS: dict[str, tuple[ModelConfig, RunConfig]] = {
    "tiny": (ModelConfig(), RunConfig()),
    "moe_tiny": (ModelConfig(layers=2, hidden=96, experts=4), RunConfig(sequence=64)),
    # For many runs of one policy: 10 tokens per parameter, not counting embedding and head. With four times the batch,
    # three times the learning rate and half the warm-up, the gap of two policies varies ten times as much over seeds.
    "5m": (_model(6, 256, 768, 4, 4, 64, 8192), RunConfig(steps=6100, **_SMALL)),
    "19m": (_model(6, 512, 1408, 8, 8, 64, 8192), RunConfig(steps=24400, **_SMALL)),
    # 25 tokens per parameter, not counting embedding and head.
    "30m": (_model(6, 640, 1792, 5, 5, 128, 32000), RunConfig(steps=2900, **_SHORT, learning_rate=1.2e-3)),
    "50m": (_model(7, 768, 2048, 6, 6, 128, 32000), RunConfig(steps=4700, **_SHORT, learning_rate=1.2e-3)),
    "100m": (_model(8, 1024, 2816, 8, 8, 128, 32000), RunConfig(steps=9800, **_SHORT, learning_rate=9e-4)),
    "200m": (_model(10, 1280, 3584, 10, 10, 128, 32000), RunConfig(steps=19400, **_SHORT, learning_rate=7.2e-4)),
    "1b": (_model(16, 2048, 8192, 32, 8, 64, 128256, rope_scaling=32.0),
           RunConfig(steps=25000, batch=256, sequence=4096, learning_rate=4e-4)),
    "llama3_8b": (_model(32, 4096, 14336, 32, 8, 128, 128256, **_LLAMA3), RunConfig(**_LONG, learning_rate=3e-4)),
    "mixtral_8x7b": (_model(32, 4096, 14336, 32, 8, 128, 32000, **_MIXTRAL), RunConfig(**_LONG, learning_rate=3e-4)),
    "llama3_70b": (_model(80, 8192, 28672, 64, 8, 128, 128256, **_LLAMA3, rope_scaling=8.0),
                   RunConfig(**_LONG, learning_rate=1.5e-4)),
    "llama3_405b": (_model(126, 16384, 53248, 128, 8, 128, 128256, **(_LLAMA3 | {"remat": "full"}), rope_scaling=8.0),
                    RunConfig(**_LONG, learning_rate=8e-5)),
}  # fmt: skip


def find_config(name: str) -> tuple[ModelConfig, RunConfig]:
    """The configuration of that name. Raises ConfigError if there is none."""
    if name not in CONFIGS:
        close = _nearest_size(name) or next(iter(difflib.get_close_matches(name, CONFIGS, n=1)), "")
        hint = f"did you mean '{close}'? " if close else ""
        raise ConfigError(f"there is no configuration '{name}': {hint}choose from {', '.join(CONFIGS)}")
    return CONFIGS[name]


_SIZE = re.compile(r"(.*?)(\d+)([bm])")


def _nearest_size(name: str) -> str:
    """The configuration that differs only in its size, and the least; empty if there is none."""
    match = _SIZE.fullmatch(name.lower())
    if match is None or not int(match[2]):
        return ""
    sizes = {
        each: m for each in CONFIGS if (m := _SIZE.fullmatch(each)) and m.group(1, 3) == match.group(1, 3)
    }
    return min(sizes, key=lambda each: abs(math.log(int(sizes[each][2]) / int(match[2]))), default="")


def invalid_settings(model: ModelConfig, run: RunConfig) -> list[str]:
    """Every error that can be found without a device. `partition.make_mesh` finds the others."""
    values = {**vars(model), **vars(run)}
    errors = []
    for each in (*fields(model), *fields(run)):
        value, least, limit = values[each.name], each.metadata["least"], each.metadata["limit"]
        if isinstance(value, int | float) and not least <= value < limit:
            bound = f"at least {least}" if not value >= least else f"less than {limit}"
            errors.append(f"--{each.name.replace('_', '-')} {value}: it must be {bound}")
    first, _, last = run.profile_steps.partition(":")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        errors.append(f"--profile-steps {run.profile_steps}: expected the first and last step, such as 10:13")
    elif run.profile and int(last) > run.steps:
        errors.append(f"--profile-steps {run.profile_steps}: there are only {run.steps} steps")
    if model.experts and model.experts_per_token > model.experts:
        errors.append(
            f"--experts-per-token {model.experts_per_token}: there are only {model.experts} experts"
        )
    if model.experts and model.experts_per_token == 1:
        errors.append("--experts-per-token 1: the weights of a token's experts add up to 1, so the loss would not "
                      "teach the router which one to choose; use 2 or more")  # fmt: skip
    if model.kv_heads > 0 and model.heads % model.kv_heads:
        errors.append(f"--heads {model.heads}: it must be a multiple of --kv-heads {model.kv_heads}")
    if run.seeds is not None:
        errors += _invalid_seeds(run)
    of_processes = {
        "--coordinator": run.coordinator,
        "--processes": run.processes,
        "--process-id": run.process_id,
    }
    if not run.distributed and (names := [name for name, value in of_processes.items() if value is not None]):
        errors.append(
            f"{', '.join(names)}: without --distributed, this process would train alone; add --distributed"
        )
    if run.packing == "whole" and not run.document_mask:
        errors.append(
            "--packing whole needs --document-mask: without it, a document attends to those before it"
        )
    return errors + _invalid_warmup(run)


def _invalid_warmup(run: RunConfig) -> list[str]:
    if run.warmup > 1:
        return [
            f"--warmup {run.warmup:g} is a fraction of the steps: did you mean --warmup-steps {run.warmup:g}?"
        ]
    if warmup_fraction(run) + (run.decay if run.schedule == "wsd" else 0) > 1:
        return ["the warm-up, plus --decay for wsd, is longer than the run: shorten it"]
    return []


def warmup_fraction(run: RunConfig) -> float:
    """The fraction of the steps in which the learning rate rises."""
    return run.warmup_steps / run.steps if run.warmup_steps else run.warmup


def _invalid_seeds(run: RunConfig) -> list[str]:
    words = (run.seeds or "").split(",")
    errors = []
    are_seeds = all(re.fullmatch(r"\d+", word) and int(word) < 2**32 for word in words)
    if not are_seeds or len(set(words)) < len(words):
        errors.append(f"--seeds {run.seeds}: expected distinct whole numbers below 2**32, separated by commas, "
                      "such as 0,1,2")  # fmt: skip
    one_run = {"--seed": run.seed, "--distributed": run.distributed, "--wandb": run.wandb}
    return errors + [
        f"{option} does not work with --seeds, which trains several runs"
        for option, value in one_run.items()
        if value
    ]


def runs_of_seeds(run: RunConfig) -> list[RunConfig]:
    """One run per seed, as if that seed ran alone. Without `--seeds`, only the run itself."""
    if run.seeds is None:
        return [run]
    return [replace(run, seed=int(seed), seeds=None) for seed in run.seeds.split(",")]


def identity(model: ModelConfig, run: RunConfig, policy: str | None) -> dict[str, Any]:
    """The settings that affect the numbers of a run. `policy` is the hash of the active policy."""
    configs = (model, run)
    names = [f.name for config in configs for f in fields(config) if f.metadata["in_identity"]]
    values = {**vars(model), **vars(run)}
    return {"policy": policy} | {name: values[name] for name in names}


POLICY_NAME, POLICY_TEXT, BACKENDS, VERSIONS = "policy_name", "policy_text", "backends", "versions"
"""Keys of a checkpoint's identity that only say how it was made: equal policies may have several names."""


def policy_changes(there: dict[str, Any], now: dict[str, Any]) -> str:
    """The lines that differ between the policies of two runs; empty if the text of one is unknown."""
    before, after = (str(each.get(POLICY_TEXT) or "").splitlines() for each in (there, now))
    lines = difflib.unified_diff(before, after, lineterm="", n=0) if before and after else ()
    return "".join(f"\n    {line}" for line in lines if not line.startswith(("---", "+++", "@@")))


def describe_policy(identity_of_run: dict[str, Any]) -> str:
    """The name and the short hash of a run's policy, for messages."""
    sha256, name = identity_of_run["policy"], identity_of_run[POLICY_NAME]
    return "no policy" if sha256 is None else f"{name or 'a policy'} ({sha256[:8]})"


def read_file(path: Path) -> bytes:
    """Reads a regular file. Raises ConfigError for anything else: a FIFO would wait for a writer for ever."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ConfigError(f"'{path}' is not a regular file")
        return stream.read()


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def name_file(path: Path) -> Iterator[None]:
    """Adds the name of a file to write errors, which lack it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_encoding(folder: Path) -> None:
    """Raises ConfigError if a checkpoint cannot be written to a folder: TensorStore takes only UTF-8."""
    try:
        str(folder.resolve()).encode()
    except UnicodeEncodeError:
        name = ascii(str(folder.resolve()))
        raise ConfigError(
            f"--folder {name} is not UTF-8, or not in this locale: choose another folder, or set LC_ALL=C.UTF-8"
        ) from None


OPEN_FILES = 1024  # the default limit of most systems
MIN_OPEN_FILES = (
    256  # a small model opens 25, a large one more: the parts of a checkpoint are written in parallel
)


def allow_open_files(count: int) -> None:
    """Increases the limit of open files, up to `count`. Raises ConfigError if the system allows too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if allowed < MIN_OPEN_FILES:
        raise ConfigError(
            f"a run needs {MIN_OPEN_FILES} open files, but this process may open only {hard}: start it from a shell "
            f"with a higher limit (ulimit -n {OPEN_FILES})"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
