"""Trained models, to use them: the parameters and the tokenizer of a run or of an export."""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AxisType, Mesh

from policyc.models.llama import configs, data, partition, train_step, weights
from policyc.models.llama import model as llama
from policyc.models.llama.checkpoints import DamagedCheckpointError, read_params, saved_steps
from policyc.models.llama.configs import ConfigError, ModelConfig, RunConfig

Config = TypeVar("Config", ModelConfig, RunConfig)

TOKENIZER_REMEDY = "name the tokenizer.json that made them with --tokenizer FILE"


class ByteCodec:
    """Every byte is a token. Tokens beyond the bytes have no text. `end` ends a document."""

    end: int = data.END

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """The text of the tokens after a prompt, in pieces: each as soon as its characters are complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(token for token in prompt if token < 256))  # may end inside a character
        for token in tokens:
            yield decoder.decode(bytes([token]) if token < 256 else b"")
        yield decoder.decode(b"", final=True)


class TokenizerCodec:
    """A tokenizer.json."""

    end: int

    def __init__(self, path: Path) -> None:
        self._tokenizer, self.end = data.read_tokenizer(str(path))

    def encode(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids)

    def decode(self, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
        """Decodes everything again for each token: whether a token begins with a space depends on those before it."""
        ids, printed = list(prompt), len(self._tokenizer.decode(list(prompt)))
        text = ""
        for token in tokens:
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # else its last character is not complete
                yield text[printed:]
                printed = len(text)
        yield text[printed:]


Codec = ByteCodec | TokenizerCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that was trained.

    Attributes:
      params: in the dtype of the computation; those of norms and routers in float32.
      positions: the length of the sequences that it was trained on.
      name: for people: what it is and where it is from.
      policy: the policy that it was trained under, for people.
      step, steps: the step that the parameters are from, and the last one of the run; None if not known.
    """

    config: ModelConfig
    params: llama.Params
    codec: Codec
    positions: int
    name: str
    policy: str | None = None
    step: int | None = None
    steps: int | None = None


def load_trained(folder: Path, step: int | None = None, tokenizer: str | None = None) -> TrainedModel:
    """The model in the folder of a run, at its last checkpoint or at that of a step; or that of an export."""
    if (folder / "run.json").exists():
        return _load_run(folder, step, tokenizer)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{folder} has no run.json and no config.json: name the folder of a run of the bundled trainer (RUN), or "
            "of an export (RUN/exports/STEP)"
        )
    if step is not None:
        raise ConfigError(f"--step is for the folder of a run, and {folder} is an export")
    return _load_export(folder, tokenizer)


def _one_device_mesh() -> Mesh:
    sizes = (1,) * len(partition.AXES)
    kinds = (AxisType.Auto,) * len(partition.AXES)
    return jax.make_mesh(sizes, partition.AXES, devices=jax.devices()[:1], axis_types=kinds)


def _cast(params: llama.Params, config: ModelConfig) -> llama.Params:
    """Weights in the dtype of the computation, as each use would cast them."""

    def cast_leaf(path: Any, array: jax.Array) -> jax.Array:
        is_wide = any(word in str(path[-1]) for word in ("norm", "router"))  # used in float32
        return array if is_wide else array.astype(config.compute)

    return cast(llama.Params, jax.tree.map_with_path(cast_leaf, params))


def _load_run(folder: Path, step: int | None, tokenizer: str | None) -> TrainedModel:
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        config = _from_settings(ModelConfig, about["settings"])
        run = _from_settings(RunConfig, about["settings"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder / 'run.json'} cannot be read: {error}") from None
    checkpoints = _find_checkpoints(folder, run)
    params, step = _read_params(checkpoints, step, config, run)
    identity = {"policy": about.get("policy_sha256"), configs.POLICY_NAME: about.get("policy_name")}
    return TrainedModel(
        config=config,
        codec=_find_codec(folder, run, tokenizer),
        params=_cast(params, config),
        positions=run.sequence,
        name=f"{folder}, step {step}",
        policy=configs.describe_policy(identity) if identity["policy"] else None,
        step=step,
        steps=run.steps,
    )


def _from_settings(kind: type[Config], settings: dict[str, Any]) -> Config:
    """A configuration from run.json. Settings that this version does not know are left out."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in known})


def _find_checkpoints(folder: Path, run: RunConfig) -> Path:
    """The folder of the checkpoints of a run. Several seeds have theirs in the folder of the first one."""
    if saved_steps(folder / "checkpoints"):
        return folder / "checkpoints"
    if folder.resolve().name == f"seed{run.seed}":
        for other in sorted(folder.resolve().parent.glob("seed*/checkpoints")):
            if saved_steps(other):
                return other
    exports = sorted((folder / "exports").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    remedy = f"use its export {exports[-1].parent}" if exports else "train it with --checkpoint-every N"
    raise ConfigError(f"{folder} has no checkpoint: {remedy}")


def _read_params(
    checkpoints: Path, step: int | None, config: ModelConfig, run: RunConfig
) -> tuple[llama.Params, int]:
    """The parameters of a checkpoint, by default of the last one, and its step."""
    steps = saved_steps(checkpoints)
    number = steps[0] if step is None else step
    if number not in steps:
        existing = ", ".join(map(str, sorted(steps)))
        raise ConfigError(f"{checkpoints} has no checkpoint of step {number}: there are {existing}")
    try:
        return _read_params_of_seed(checkpoints, number, config, run), number
    except DamagedCheckpointError as error:
        later = saved_steps(checkpoints)
        if step is None and later and later[0] != number:  # the run goes on, and removes its old checkpoints
            return _read_params(checkpoints, None, config, run)
        remedy = "choose another one with --step"
        raise ConfigError(f"checkpoint {checkpoints / str(number)} is damaged: {error}\n{remedy}") from None


def _read_params_of_seed(checkpoints: Path, step: int, config: ModelConfig, run: RunConfig) -> llama.Params:
    mesh = _one_device_mesh()

    def abstract_state(identity: dict[str, Any]) -> train_step.State:
        of_seeds = replace(run, seeds=identity.get("seeds"))
        return train_step.abstract_state(config, of_seeds, mesh)

    params, identity = read_params(checkpoints, step, abstract_state)
    if identity.get("seeds") is None:
        return cast(llama.Params, params)
    seeds = identity["seeds"].split(",")
    if str(run.seed) not in seeds:
        others = f"{checkpoints} is of the seeds {identity['seeds']}"
        raise ConfigError(f"{others}, and has no seed {run.seed}: name the folder of one of these seeds")
    return cast(llama.Params, jax.tree.map(itemgetter(seeds.index(str(run.seed))), params))


def _find_codec(folder: Path, run: RunConfig, tokenizer: str | None) -> Codec:
    file = tokenizer or run.tokenizer
    if file is not None:
        if not Path(file).is_file():
            if tokenizer is not None:
                raise ConfigError(f"--tokenizer {file}: there is no such file")
            raise ConfigError(
                f"{folder} was trained with the tokenizer {file}, which is not here: {TOKENIZER_REMEDY}"
            )
        return TokenizerCodec(Path(file))
    if any(part.spec.kind in ("tokens", "synthetic") for part in data.parse_blend(run.data)):
        raise ConfigError(
            f"{folder} was trained on tokens ({run.data}), and not on texts: {TOKENIZER_REMEDY}"
        )
    return ByteCodec()


def _load_export(folder: Path, tokenizer: str | None) -> TrainedModel:
    config, positions = weights.read_config(folder)
    file = Path(tokenizer) if tokenizer else folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no {file}: {TOKENIZER_REMEDY}")
    return TrainedModel(
        config=config,
        codec=TokenizerCodec(file),
        params=_cast(weights.load_safetensors(folder, config, _one_device_mesh()), config),
        positions=positions,
        name=f"the export {folder}",
    )
