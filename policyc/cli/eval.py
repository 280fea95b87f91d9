"""`policyc eval`: how far the tokens of an inference server are from those of training."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from policyc.base.progress import stage
from policyc.cli.common import ExampleCommand, explain_missing_package, print_or_write
from policyc.cli.options import collect_options, format_option, number, option, option_class, out_option
from policyc.cli.program import exit_on_error
from policyc.cli.rollout import RolloutOptions, describe_gap, rollout_options

if TYPE_CHECKING:
    from policyc.serving.rollout import Gap, Rollout


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
        from policyc.serving.rollout import read_batches

        changed: dict[str, Any] = {
            "data": options.data,
            "sequence": options.sequence,
            "eval_batches": options.batches,
        }
        run = replace(opened.source.run, **{k: v for k, v in changed.items() if v is not None})
        with stage("evaluating"):
            gap = opened.gap(read_batches(replace(opened.source, run=run), run.eval_batches))
    is_json = options.output_format == "json"
    text = (
        _as_json(source, rollout, opened, gap)
        if is_json
        else rollout.describe(source, opened) + describe_gap(gap)
    )
    print_or_write(text, options.out)


def _as_json(source: str, options: RolloutOptions, rollout: Rollout, gap: Gap) -> str:
    from policyc.serving.arithmetic import SERVER_RULES

    server = SERVER_RULES.get(options.server)
    about = {
        "source": source,
        "as": options.server,
        "version": None if server is None else server.version,
        "policy": rollout.policy.sha256,
        "step": rollout.source.step,
        "arithmetic": None if rollout.arithmetic is None else asdict(rollout.arithmetic),
    }
    return json.dumps({**about, **asdict(gap), "nats": gap.nats}, indent=1) + "\n"
