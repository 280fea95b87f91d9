"""`policyc generate`: continues a text as an inference server would."""

from __future__ import annotations

import click

from policyc.base.progress import stage
from policyc.cli.common import ExampleCommand, explain_missing_package
from policyc.cli.options import FiniteRange, collect_options, number, option, option_class
from policyc.cli.program import exit_on_error
from policyc.cli.rollout import RolloutOptions, describe_gap, rollout_options


@option_class
class GenerateOptions:
    """What is continued, and how tokens are chosen."""

    prompt: str | None = option(
        metavar="TEXT",
        show_default="the first 16 tokens of the validation data",
        help="The text to continue.",
    )
    tokens: int = number("Tokens to generate.", default=64)
    temperature: float = option(
        type=FiniteRange(0),
        metavar="T",
        default=0.0,
        help="Divides the logits before sampling. 0: always the most likely token.",
    )
    seed: int = number("Seed of sampling.", least=0, most=2**32 - 1, default=0)


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc generate runs/a --as vllm --prompt "import os"
    policyc generate served --as vllm --temperature 1 --seed 3
    policyc generate runs/a --as training --prompt "import os"          to compare with
    """,
)
@click.argument("source", metavar="RUN|HF_FOLDER|SERVED_FOLDER", type=click.Path(file_okay=False))
@rollout_options
@collect_options(GenerateOptions, "options")
def generate(source: str, rollout: RolloutOptions, options: GenerateOptions) -> None:
    """Continue a text with a Llama as a server computes it.

    The arithmetic is that of policyc eval. It prints the gap between server and training on the tokens that were
    generated, then the text. Each step runs the whole text, which the scales of activations by tensor depend on.
    """
    with exit_on_error(), explain_missing_package("train"):
        opened = rollout.open(source)
        from policyc.serving.rollout import read_batches

        text = opened.source.codec()
        if options.prompt is None:
            prompt = read_batches(opened.source, 1)[0]["tokens"][0, :16].tolist()
        else:
            prompt = text.encode(options.prompt)
        if not prompt:
            raise click.UsageError("--prompt is empty")
        with stage("generating"):
            batch = opened.generate(prompt, options.tokens, options.temperature, options.seed)
            gap = opened.gap([batch])
    click.echo(
        rollout.describe(source, opened)
        + describe_gap(gap)
        + "\n"
        + text.decode([*batch["tokens"][0, :1].tolist(), *batch["targets"][0].tolist()])
    )
