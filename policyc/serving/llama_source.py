"""Reads a Llama to be served: a run of the bundled trainer, or a folder in the Hugging Face layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from policyc.base.files import explain_unreadable, read_json
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.pipeline import LossCall, plan_loss
from policyc.compiler.planning.plan import Plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.tables.plan_json import read_plan
from policyc.hardware.llama_step import abstract_arguments
from policyc.language.policy import Policy
from policyc.models.llama import model as llama
from policyc.models.llama import partition
from policyc.models.llama.configs import BACKENDS, VERSIONS, ModelConfig, RunConfig

_HF_SEQUENCE = 4096  # of a folder that does not say on which sequences the model was trained
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Converts text to tokens and back. Without a tokenizer, tokens are bytes, and larger ones have no text."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")
        return str(self.tokenizer.decode(list(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSource:
    """A Llama, and how it was trained as far as its folder says.

    Attributes:
      checkpoint: the folder of the weights: a checkpoint, or the Hugging Face folder itself.
      seeds: all seeds of a run of several, whose states a checkpoint holds stacked.
      policy: the policy of the run; None for a Hugging Face folder.
      step: the step of the checkpoint; 0 for a Hugging Face folder.
      hf_config: the content of config.json.
      training: what the checkpoint says of its making: seed, backends and versions; empty for a Hugging Face folder.
    """

    folder: Path
    checkpoint: Path
    model: ModelConfig
    run: RunConfig
    seeds: str | None = None
    policy: Policy | None
    step: int
    hf_config: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trained_policy(self) -> Policy:
        """The policy of the run. Raises ValueError if the folder does not say it."""
        if self.policy is None:
            raise ValueError(
                f"'{self.folder}' does not say under which policy it was trained: name it with --policy"
            )
        return self.policy

    def plan(self, policy: Policy) -> Plan:
        """The plan of the training loss under a policy. The loss is traced with shapes."""
        config = dataclasses.replace(self.model, attention="xla", loss_chunks=1, remat="none")
        rows = max(1, self.run.batch // self.run.accumulate)
        arguments = abstract_arguments(config, rows, self.run.sequence)
        call = LossCall(
            fn=lambda params, batch: llama.loss(params, batch, config), args=arguments, param_argnums=(0,)
        )
        plan = plan_loss(policy, call, ExecutionOptions(backend="emulate")).plan
        list(check_plan(plan))  # raises if the policy cannot be applied
        return plan

    def phase(self, plan: Plan) -> Phase:
        """The phase of the schedule at the checkpoint; the last one for a Hugging Face folder."""
        return plan.phase(self.step - 1, self.run.steps) if self.step else plan.phases[-1]

    def abstract_params(self) -> Any:
        """The shapes of the parameters."""
        return abstract_arguments(self.model, 1, 1)[0]

    def mesh(self) -> jax.sharding.Mesh:
        """The first device."""
        shape = (1,) * len(partition.AXES)
        axis_types = (jax.sharding.AxisType.Auto,) * len(shape)
        device = np.array(jax.devices()[:1]).reshape(shape)
        return jax.sharding.Mesh(device, partition.AXES, axis_types=axis_types)

    def load(self) -> Any:
        """The parameters, on the first device."""
        mesh = self.mesh()
        if not self.step:
            from policyc.models.llama.weights import load_safetensors

            return load_safetensors(self.checkpoint, self.model, mesh)
        from policyc.models.llama import checkpoints, train_step

        run = dataclasses.replace(self.run, seeds=self.seeds)
        abstract_state = train_step.abstract_state(self.model, run, mesh)
        params = checkpoints.read_checkpoint(self.checkpoint, abstract_state)[1]["params"]
        if self.seeds is None:
            return params
        number = [int(seed) for seed in self.seeds.split(",")].index(self.run.seed)
        return jax.tree.map(lambda array: array[number], params)

    def codec(self) -> Codec:
        """Converts text to tokens and back."""
        from policyc.models.llama.data import read_tokenizer

        return Codec(tokenizer=read_tokenizer(self.run.tokenizer)[0] if self.run.tokenizer else None)

    def names(self) -> dict[str, str]:
        from policyc.models.llama.weights import tensor_names

        return tensor_names(self.model)

    def files(self) -> dict[str, str]:
        """The files of the tokenizer."""
        if not self.step:
            beside = (self.checkpoint / name for name in TOKENIZER_FILES)
            return {file.name: file.read_text(encoding="utf-8") for file in beside if file.exists()}
        from policyc.models.llama.weights import tokenizer_files

        return tokenizer_files(self.run.tokenizer)


def read_source(folder: Path, step: int | None = None) -> LlamaSource:
    """Reads what a folder says of its model. The weights are not loaded. Raises ValueError."""
    if (folder / "run.json").exists():
        return _read_run(folder, step)
    if not (folder / "config.json").exists():
        raise ValueError(f"'{folder}' is neither a run (run.json) nor a Hugging Face folder (config.json)")
    if step is not None:
        raise ValueError("--step is for a run, which has several checkpoints")
    from policyc.models.llama.weights import read_config

    tokenizer = folder / "tokenizer.json"
    return LlamaSource(
        folder=folder,
        checkpoint=folder,
        model=read_config(folder),
        run=RunConfig(
            batch=1, sequence=_HF_SEQUENCE, tokenizer=str(tokenizer) if tokenizer.exists() else None
        ),
        policy=None,
        step=0,
        # The head is stored even if it is a copy of the embedding: servers do not store a quantized one twice.
        hf_config={**read_json(folder / "config.json"), "tie_word_embeddings": False},
    )


def _read_run(folder: Path, step: int | None) -> LlamaSource:
    with explain_unreadable(folder / "run.json", "policyc train"):
        settings = read_json(folder / "run.json")["settings"]
        model = ModelConfig(**{f.name: settings[f.name] for f in dataclasses.fields(ModelConfig)})
        run = RunConfig(**{f.name: settings[f.name] for f in dataclasses.fields(RunConfig)})
    # Seeds of one process share checkpoints, which are in the folder of the first one.
    others = sorted(folder.parent.glob("seed*")) if folder.name == f"seed{run.seed}" else []
    stored = {one: steps for one in (folder, *others) if (steps := _checkpoints(one))}
    holder, steps = next(iter(stored.items()), (folder, []))
    if not steps:
        raise ValueError(f"'{folder}' has no checkpoint: train with --checkpoint-every")
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: '{folder}' has the checkpoints {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    from policyc.models.llama.weights import hf_config

    run = dataclasses.replace(run, data_axis=1, fsdp_axis=1, expert_axis=1, tensor_axis=1, context_axis=1)
    checkpoint = holder / "checkpoints" / str(chosen)
    with explain_unreadable(checkpoint / "about" / "metadata", "policyc train"):
        identity = read_json(checkpoint / "about" / "metadata")["identity"]
    return LlamaSource(
        folder=folder,
        checkpoint=checkpoint,
        model=model,
        run=run,
        seeds=_read_seeds(checkpoint),
        policy=read_policy(folder),
        step=chosen,
        hf_config=hf_config(model, model.compute, run.sequence),
        training={name: identity[name] for name in ("seed", BACKENDS, VERSIONS) if name in identity},
    )


def _checkpoints(folder: Path) -> list[int]:
    names = (path.name for path in (folder / "checkpoints").glob("*"))
    return sorted(int(name) for name in names if name.isdigit() and name != "0")


def _read_seeds(checkpoint: Path) -> str | None:
    """The seeds whose states a checkpoint holds, if they are several."""
    path = checkpoint / "about" / "metadata"
    with explain_unreadable(path, "policyc train"):
        seeds: str | None = read_json(path)["identity"]["seeds"]
    return seeds


def read_policy(folder: Path) -> Policy | None:
    """The policy of a run, from its plan.json; None if it was trained without one."""
    path = folder / "plan.json"
    if not path.exists():
        return None
    return read_plan(path, "policyc train")[0]


def host_arrays(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)
