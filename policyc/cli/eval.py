"""`policyc eval`: how far the tokens of an inference server are from those of training."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import ExampleCommand, choose_policy, explain_missing_package, print_or_write
from policyc.cli.options import (
    collect_options,
    format_option,
    number,
    option,
    option_class,
    out_option,
    path_option,
)
from policyc.cli.program import exit_on_error

if TYPE_CHECKING:
    from policyc.serving.rollout import Activations, Gap, KVCache, Rollout


@option_class
class RolloutOptions:
    """Which model runs, and with whose arithmetic."""

    server: str = option(
        "--as",
        type=click.Choice(["vllm", "trtllm", "training"]),
        required=True,
        help="Whose arithmetic: of a server, or of training.",
    )
    policy: str | None = option(
        metavar="POLICY[:VARIANT]",
        show_default="that of the run",
        help="The policy that the model was trained under.",
    )
    run: str | None = option(
        metavar="RUN|HF_FOLDER",
        type=click.Path(file_okay=False),
        show_default="as policyc.json says",
        help="The master weights of a served folder.",
    )
    stats: str | None = path_option(
        metavar="FILE",
        help="stats.jsonl of the run (train --stats-every): static scales, as in the file that export writes with it.",
    )
    activations: Activations | None = option(
        type=click.Choice(["static", "dynamic", "token", "none"]),
        show_default="what the server does with the file",
        help="How activations of quantized linears are scaled: by the file, by the maximum of the tensor, or by that "
        "of each token. none: they stay in BF16.",
    )
    kv_cache: KVCache = option(
        type=click.Choice(["bf16", "fp8"]), default="bf16", help="Format of keys and values in the cache."
    )
    step: int | None = number("Step of the checkpoint of a run.", show_default="the last one")

    def open(self, folder: str) -> Rollout:
        """The model of a folder, ready to run. Raises ValueError."""
        from policyc.serving.rollout import SERVERS, find_source, make_rollout

        source, is_served = find_source(Path(folder), None if self.run is None else Path(self.run), self.step)
        return make_rollout(
            source,
            choose_policy(source, self.policy),
            SERVERS.get(self.server),
            activations=self.activations,
            kv_cache=self.kv_cache,
            stats=None if self.stats is None else Path(self.stats),
            served=Path(folder) if is_served else None,
        )


rollout_options = collect_options(RolloutOptions, "rollout")


@option_class
class EvalOptions:
    """The data, and the output."""

    data: str | None = option(
        metavar="SPEC", show_default="that of the run", help="Source of the tokens, as in policyc train."
    )
    batches: int | None = number("Number of validation batches.", show_default="that of the run")
    sequence: int | None = number("Tokens per sequence.", show_default="that of the run")
    output_format: str = format_option("text", "json", help="A summary, or all numbers as JSON.")
    out: str | None = out_option()


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc eval runs/a --as vllm                                    NVFP4 weights, BF16 activations
    policyc eval runs/a --as vllm --stats runs/a/stats.jsonl         with static input scales
    policyc eval served --as vllm --kv-cache fp8                     a file that export wrote
    policyc eval Llama-3-8B --policy te_nvfp4 --as trtllm --data text:corpus
    """,
)
@click.argument("source", metavar="RUN|HF_FOLDER|SERVED_FOLDER", type=click.Path(file_okay=False))
@rollout_options
@collect_options(EvalOptions, "options")
def eval(source: str, rollout: RolloutOptions, options: EvalOptions) -> None:
    """Evaluate a Llama as a server computes it, against the forward pass of training.

    Weights have the codes of the exported file. Activations and the KV cache are those of the server, everything else
    is computed in BF16, and all of it is emulated on any device. On the same tokens of the validation data it prints:

    \b
    loss     of both, in nats per token, and the gap
    k3-KL    the mean of exp(d) - 1 - d over all tokens, where d is the difference
             of the logarithms of the token's probability, server minus training:
             an estimate of the KL divergence from training that is never negative
    top-1    the share of positions with the same most likely token
    """
    with exit_on_error(), explain_missing_package("train"):
        opened = rollout.open(source)
        changed = {"data": options.data, "sequence": options.sequence, "eval_batches": options.batches}
        run = replace(opened.source.run, **{k: v for k, v in changed.items() if v is not None})  # type: ignore[arg-type]
        from policyc.serving.rollout import read_batches

        model = replace(opened.source, run=run)
        gap = opened.gap(read_batches(model, run.eval_batches))
    render = _as_json if options.output_format == "json" else _as_text
    print_or_write(render(source, rollout, opened, gap), options.out)


def _as_text(source: str, options: RolloutOptions, rollout: Rollout, gap: Gap) -> str:
    scales = dict(rollout.arithmetic.activations) if rollout.arithmetic else {}
    used = {format: scales[format] for format in rollout.formats if format in scales}
    about = [options.server, *(f"{format} activations {_WORDS[how]}" for format, how in used.items())]
    if rollout.arithmetic:
        about.append(f"KV cache in {rollout.arithmetic.kv_cache}")
    return "\n".join(
        (
            f"{source} as {', '.join(about)}",
            f"loss   {gap.training:.6f} in training, {gap.served:.6f} served: {gap.nats:+.6f} nats",
            f"k3-KL  {gap.kl:.3e} nats per token",
            f"top-1  {100 * gap.agreement:.3f} % of {gap.tokens:,} tokens",
            "",
        )
    )


_WORDS: dict[Activations, str] = {
    "static": "with static scales",
    "dynamic": "scaled by tensor",
    "token": "scaled by token",
    "none": "in BF16",
}


def _as_json(source: str, options: RolloutOptions, rollout: Rollout, gap: Gap) -> str:
    from policyc.serving.rollout import SERVERS

    server = SERVERS.get(options.server)
    about = {
        "source": source,
        "as": options.server,
        "version": None if server is None else server.version,
        "policy": rollout.policy.sha256,
        "step": rollout.source.step,
        "arithmetic": None if rollout.arithmetic is None else asdict(rollout.arithmetic),
    }
    return json.dumps({**about, **asdict(gap), "nats": gap.nats}, indent=1) + "\n"
