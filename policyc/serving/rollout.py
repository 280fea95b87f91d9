"""Runs the bundled Llama with the arithmetic of an inference server, and compares its tokens with those of training.

A server's forward pass is the plan of training with other forward recipes: the codes of the exported file for weights,
and the server's scales for activations. Static scales and the KV cache, which no recipe has, are hooks of the model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from policyc.base.files import explain_unreadable, read_json
from policyc.base.progress import track
from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.pipeline import LossCall, plan_loss
from policyc.compiler.planning.plan_checks import check_plan
from policyc.language.loader import parse
from policyc.language.policy import Policy
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ModelConfig
from policyc.serving.arithmetic import Activations, Arithmetic, KVCache, Server, round_cache, served_decision
from policyc.serving.audit import read_linears
from policyc.serving.export import find_schemes, read_maxima
from policyc.serving.formats import BOUNDS, COMPRESSED_TENSORS, StoredLinear, group_names
from policyc.serving.linears import Linear, find_linears, find_sharing, quantize_served
from policyc.serving.llama_source import LlamaSource, host_arrays, read_source
from policyc.serving.loaders import fuse, fused_name

InputMaxima: TypeAlias = Mapping[tuple[str, int | None], float]
"""The largest magnitude of the activation of each linear, by path and layer, which sets its static scale."""


# ---- the forward pass of a server


def add_limits(params: llama.Params, linears: Sequence[Linear], maxima: InputMaxima) -> llama.Params:
    """The parameters with the static limits of activations, see `llama.apply_limit`."""
    params = jax.tree.map(lambda array: array, params)  # other containers, the same arrays
    by_name = {linear.module: linear for linear in linears if linear.format}
    for modules in fuse(by_name).values():
        group = [by_name[module] for module in modules]
        limit = max(maxima[linear.path, linear.layer] for linear in group)
        (*parents, name), layer = group[0].path.split("."), group[0].layer
        node: Any = params
        for parent in parents:
            node = node[parent]
            node = node[layer or 0] if isinstance(node, list) else node
        key = f"{fused_name(name).removesuffix('_proj')}_limit"
        if layer is None or isinstance(params["layers"], list):
            node[key] = np.float32(limit)
        else:
            count = len(params["layers"]["mlp_norm"])
            node.setdefault(key, np.full(count, np.inf, np.float32))[layer] = limit
    return params


Scores: TypeAlias = tuple[jax.Array, jax.Array]
"""Per token: its log probability, and the most likely token."""


def score(
    params: llama.Params,
    batch: llama.Batch,
    seed: Any,
    config: ModelConfig,
    *,
    cache: Any = None,
    pads: bool = False,
    temperature: float = 0.0,
) -> tuple[jax.Array, Scores]:
    """The loss in nats, and the scores of the targets. With limits, the model needs a token of padding (`pads`).

    With a temperature, the most likely tokens are sampled instead: Gumbel noise is added to the logits.
    """
    length = batch["tokens"].shape[1]
    inputs = {k: jnp.pad(v, ((0, 0), (0, 1)), mode="edge") for k, v in batch.items()} if pads else batch
    documents = inputs if "segments" in batch else None
    x, _ = llama.run_blocks(params, inputs["tokens"], config, None, documents, cache)
    logits = llama.linear(params, "lm_head", llama.apply_limit(params, "lm_head_limit", x))
    wide = logits[:, :length].astype(jnp.float32)
    of_target = jnp.where(jnp.arange(wide.shape[-1]) == batch["targets"][..., None], wide, 0).sum(-1)
    logp = of_target - jax.nn.logsumexp(wide, axis=-1)
    noise = temperature * jax.random.gumbel(jax.random.key(seed), wide.shape) if temperature else 0
    return -jnp.sum(logp * batch["mask"]), (logp, jnp.argmax(wide + noise, axis=-1))


Scorer: TypeAlias = Callable[..., Scores]
"""Scores a batch with parameters. A third argument is the seed of sampling."""


def make_scorer(
    source: LlamaSource, policy: Policy, arithmetic: Arithmetic | None, temperature: float = 0.0
) -> Scorer:
    """The jitted forward pass of a server, or of training for None. For static scales, see `add_limits`."""
    run = partial(
        score,
        config=dataclasses.replace(source.model, attention="xla", loss_chunks=1, remat="none"),
        cache=round_cache if arithmetic is not None and arithmetic.kv_cache == "fp8" else None,
        pads=arithmetic is not None and arithmetic.is_static,
        temperature=temperature,
    )

    def scores(params: llama.Params, batch: llama.Batch, seed: Any = 0) -> Scores:
        call = LossCall(fn=run, args=(params, batch, seed), param_argnums=(0,), has_aux=True)
        planned = plan_loss(policy, call, ExecutionOptions(backend="emulate"))
        plan = planned.plan
        list(check_plan(plan))  # raises if the policy cannot be applied
        decisions = plan.decisions(source.phase(plan))
        if arithmetic is not None:
            decisions = {key: served_decision(each, arithmetic) for key, each in decisions.items()}
        return cast(Scores, planned.compile(decisions)(params, batch, seed)[1])

    return jax.jit(scores)


# ---- the gap between training and a server

_Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How the tokens of a server differ from those of training.

    Attributes:
      tokens: the number of tokens compared.
      training: the loss in training, in nats per token.
      served: the loss of the server.
      kl: the mean of exp(d) - 1 - d, where d is the difference of the logarithms of a token's probabilities, server
        minus training: the estimator k3 of the KL divergence.
      agreement: the fraction of positions with the same most likely token.
    """

    tokens: int
    training: float
    served: float
    kl: float
    agreement: float

    @property
    def nats(self) -> float:
        return self.served - self.training


def compare(
    training: Sequence[tuple[_Array, _Array]],
    served: Sequence[tuple[_Array, _Array]],
    masks: Sequence[_Array],
) -> Gap:
    """Compares the scores of the same batches. Masked tokens do not count."""
    kept = [mask.astype(bool) for mask in masks]

    def join(scores: Sequence[tuple[_Array, _Array]], part: int) -> _Array:
        return np.concatenate([each[part][mask] for each, mask in zip(scores, kept, strict=True)])

    a, b = (join(scores, 0).astype(np.float64) for scores in (training, served))
    d = b - a
    return Gap(
        tokens=len(d),
        training=float(-a.mean()),
        served=float(-b.mean()),
        kl=float(np.mean(np.expm1(d) - d)),
        agreement=float(np.mean(join(training, 1) == join(served, 1))),
    )


def score_batches(
    scorer: Scorer, params: llama.Params, batches: Sequence[llama.Batch]
) -> list[tuple[_Array, _Array]]:
    """The scores of all batches, on the host."""
    return cast(
        "list[tuple[_Array, _Array]]", [jax.device_get(scorer(params, batch)) for batch in track(batches)]
    )


def read_batches(source: LlamaSource, count: int, split: str = "validation") -> list[llama.Batch]:
    """The first batches of the data of a run."""
    from policyc.models.llama.feed import BatchFeed

    feed = BatchFeed(source.model, [source.run], source.mesh(), split)
    try:
        return list(itertools.islice(feed, count))
    finally:
        feed.close()


# ---- a rollout of a folder


def find_source(folder: Path, run: Path | None = None, step: int | None = None) -> tuple[LlamaSource, bool]:
    """The model of a folder, and whether the folder is a served one, whose master weights are those of a run.

    The run is by default the one that `policyc.json` names. A served folder without that file needs it. Raises
    ValueError.
    """
    about = folder / "policyc.json"
    if not about.exists():
        return read_source(run or folder, step), run is not None
    with explain_unreadable(about, "policyc export"):
        content = read_json(about)
        text, name, stored = content["policy"]["text"], content["source"], content.get("step")
    if not (source := run or Path(name)).exists():
        raise ValueError(f"'{folder}' was exported from '{name}', which is not here: name it with --run")
    read = read_source(source, step or stored)
    return (read if read.policy is not None else dataclasses.replace(read, policy=parse(text))), True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A model, its weights, and the arithmetic of what runs it: of training for None.

    `params` are those that training runs, and `served` those of the arithmetic: with its static limits. `formats` are
    those of the quantized weights.
    """

    source: LlamaSource
    policy: Policy
    arithmetic: Arithmetic | None
    params: llama.Params
    served: llama.Params
    formats: tuple[str, ...] = ()

    def gap(self, batches: Sequence[llama.Batch]) -> Gap:
        """The gap to training on some batches."""
        masks = [jax.device_get(batch["mask"]) for batch in batches]
        training = make_scorer(self.source, self.policy, None)
        served = training if self.arithmetic is None else self.scorer()
        return compare(
            score_batches(training, self.params, batches), score_batches(served, self.served, batches), masks
        )

    def scorer(self, temperature: float = 0.0) -> Scorer:
        return make_scorer(self.source, self.policy, self.arithmetic, temperature)

    def generate(
        self, prompt: Sequence[int], count: int, temperature: float = 0.0, seed: int = 0
    ) -> llama.Batch:
        """A batch of one row: the prompt and its continuation, which alone is not masked.

        Every step runs the whole row, so that it compiles once. Until they are known, tokens repeat the prompt.
        """
        row = np.resize(np.asarray(prompt, np.int32), (1, len(prompt) + count))
        known = np.arange(row.shape[1] - 1) >= len(prompt) - 1
        scorer, batch = self.scorer(temperature), {"mask": known.astype(np.int32)[None]}
        for position in track(range(len(prompt), row.shape[1])):
            inputs = {"tokens": row[:, :-1], "targets": row[:, 1:], **batch}
            row[0, position] = scorer(self.served, inputs, np.uint32(seed))[1][0, position - 1]
        return {"tokens": row[:, :-1], "targets": row[:, 1:], **batch}


def make_rollout(
    source: LlamaSource,
    policy: Policy,
    server: Server | None,
    *,
    activations: Activations | None = None,
    kv_cache: KVCache = "bf16",
    stats: Path | None = None,
    served: Path | None = None,
) -> Rollout:
    """Prepares a model to run as a server would, or as in training without one.

    Args:
      activations: how activations are scaled; by default as the server does with the file that `stats` would give.
      stats: the `stats.jsonl` of the run, which sets static scales.
      served: an exported folder instead. Its static scales are used, and its codes must be those of the source.

    Raises ValueError for what a server could not run, with the edit of the policy that would do.
    """
    params = source.load()
    if server is None:
        return Rollout(source=source, policy=policy, arithmetic=None, params=params, served=params)
    plan = source.plan(policy)
    linears = find_linears(host_arrays(params), plan, source.phase(plan), source.names())
    quantized = [linear for linear in linears if linear.format]
    find_schemes(
        linears, COMPRESSED_TENSORS, is_static=False
    )  # raises if a server runs several formats as one
    maxima: InputMaxima = {}
    if served is not None:
        check_codes(served, quantized)
        maxima = served_maxima(served, quantized)
    elif stats is not None:
        maxima = read_maxima(stats)
    arithmetic = server.arithmetic(kv_cache, has_scales=bool(maxima))
    if activations is not None:
        arithmetic = dataclasses.replace(arithmetic, activations=dict.fromkeys(BOUNDS, activations))
    formats = tuple(dict.fromkeys(linear.format for linear in quantized))
    rollout = Rollout(
        source=source, policy=policy, arithmetic=arithmetic, params=params, served=params, formats=formats
    )
    if not arithmetic.is_static:
        return rollout
    if missing := [linear.module for linear in quantized if (linear.path, linear.layer) not in maxima]:
        raise ValueError(f"{group_names(missing)}: no static scale is known: name the stats.jsonl of the run "
                         "(train --stats-every), or choose other --activations")  # fmt: skip
    return dataclasses.replace(rollout, served=add_limits(params, quantized, maxima))


def check_codes(folder: Path, linears: Sequence[Linear]) -> None:
    """Raises ValueError unless a served folder has the codes that `served_recipe` gives for these linears."""
    stored = read_linears(folder)
    by_name, sharing = {linear.module: linear for linear in linears}, find_sharing(linears)
    others = [module for module, codes in stored.items() if codes is not None and module not in by_name]
    for modules in fuse(by_name).values():
        group = quantize_served([by_name[module] for module in modules], sharing)
        others += [
            module
            for module, (expected, _) in zip(modules, group, strict=True)
            if (actual := stored.get(module)) is None or not has_same_codes(actual, expected)
        ]
    if others:
        raise ValueError(f"{group_names(others)}: '{folder}' has other codes than the policy gives these weights: "
                         "'policyc audit --run' says how they differ")  # fmt: skip


def has_same_codes(a: StoredLinear, b: StoredLinear) -> bool:
    """Whether two linears have the same codes and block scales, and outer scales that differ by a rounding at most."""
    pairs: list[tuple[Any, Any]] = [(a.codes, b.codes), (a.scales, b.scales)]
    is_same = a.format == b.format and all(np.array_equal(*pair) for pair in pairs)
    return is_same and bool(np.allclose(a.outer, b.outer, rtol=2**-22, atol=0))


def served_maxima(folder: Path, linears: Sequence[Linear]) -> dict[tuple[str, int | None], float]:
    """The largest magnitude of each activation by the static scales of a served folder. Raises ValueError."""
    stored = read_linears(folder)
    maxima: dict[tuple[str, int | None], float] = {}
    for linear in linears:
        codes = stored.get(linear.module)
        if codes is not None and codes.input_outer is not None:
            maxima[linear.path, linear.layer] = float(codes.input_outer * np.float32(BOUNDS[codes.format]))
    return maxima
