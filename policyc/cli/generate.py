"""`policyc generate`: continues texts with a model that the bundled trainer has trained."""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import ExampleCommand, exit_with_message, explain_missing_package, print_note
from policyc.cli.options import FiniteRange, number, option
from policyc.cli.program import exit_on_error

if TYPE_CHECKING:
    from policyc.models.llama.generate import Sampling, TrainedModel


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc generate runs/tiny --prompt 'import os'                    continue a text
    policyc generate runs/tiny --prompt 'def f(' --temperature 0       the most probable tokens
    policyc generate runs/tiny --prompt A --prompt B --tokens 32       several texts
    """,
)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    metavar="TEXT",
    help="Text to continue; may be repeated. An empty text begins a document.",
)
@number("Maximum number of tokens to draw.", "--tokens", default=128)
@option(
    "--temperature",
    metavar="T",
    type=FiniteRange(0),
    default=0.8,
    help="Divide logits by this. 0: take the most probable token.",
)
@number("Seed of the random draws.", "--seed", least=0, most=2**32 - 1, default=0)
def generate(folder: Path, prompts: tuple[str, ...], tokens: int, temperature: float, seed: int) -> None:
    """Continue texts with a trained model.

    RUN is the folder of a run of the bundled trainer: its last checkpoint is read. Each text is printed with its
    continuation, which ends where the model ends the document, or after --tokens. The settings go to standard
    error.
    """
    with explain_missing_package("train"):
        from policyc.models.llama.generate import Sampling, load_trained

    with exit_on_error():
        model = load_trained(folder)
        sampling = Sampling(tokens=tokens, temperature=temperature, seed=seed)
        _continue_all(model, [text.encode("utf-8", "surrogateescape") for text in prompts], sampling)


def _continue_all(model: TrainedModel, prompts: list[bytes], sampling: Sampling) -> None:
    """Prints each prompt with its continuation. Escapes control characters for a terminal: a model may draw any."""
    from policyc.base.text import escape_lines
    from policyc.models.llama.generate import Generator

    encoded = [model.encode(prompt) for prompt in prompts]
    largest, longest = max(map(max, encoded)), max(map(len, encoded))
    if largest >= model.config.vocab:
        exit_with_message(
            f"the tokenizer gives token {largest}, but the model's vocabulary has {model.config.vocab} tokens: this "
            "tokenizer belongs to another model"
        )
    if longest + sampling.tokens > model.positions:
        print_note(
            f"{longest} + {sampling.tokens} tokens: the model was trained on sequences of {model.positions}, and may "
            "get worse beyond that length",
            "warning",
        )
    print_note(
        f"{model.config.compute}, at most {sampling.tokens} tokens, temperature {sampling.temperature:g}, "
        f"seed {sampling.seed}",
        model.name,
    )
    generator = Generator(model.params, model.config, sampling, longest)
    for index, ids in enumerate(encoded):
        drawn = takewhile(lambda token: token != model.end, generator.generate(ids, index))
        text = model.decode([*ids, *drawn])
        click.echo(
            escape_lines(text) if sys.stdout.isatty() else text, color=True
        )  # a pipe gets the raw text
