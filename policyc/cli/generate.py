"""`policyc generate`: continues texts with a model that the bundled trainer has trained."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import ExampleCommand, exit_with_message, explain_missing_package, load_policy
from policyc.cli.options import (
    FiniteRange,
    backend_option,
    collect_options,
    format_option,
    option,
    option_class,
)
from policyc.cli.program import exit_on_error

if TYPE_CHECKING:
    from policyc.language.policy import Policy
    from policyc.models.llama.generate import Generator, Sampling, Transform
    from policyc.models.llama.trained import TrainedModel
    from policyc.numerics.backends import BackendName


@option_class
class GenerateOptions:
    """Which model continues which texts, and how tokens are drawn."""

    prompt: tuple[str, ...] = option(
        multiple=True,
        metavar="TEXT",
        show_default="standard input",
        help="Text to continue; may be repeated. An empty one begins a document.",
    )
    tokens: int = option(metavar="N", type=click.IntRange(1), default=128, help="Most tokens to draw.")
    temperature: float = option(
        metavar="T",
        type=FiniteRange(0),
        default=0.8,
        help="Divide logits by this. 0: take the most probable token.",
    )
    top_k: int = option(
        metavar="K", type=click.IntRange(0), default=0, help="Draw from so many tokens; 0: from all."
    )
    top_p: float = option(
        metavar="P",
        type=FiniteRange(0, 1, min_open=True),
        default=1.0,
        help="Draw from the most probable tokens with this probability together.",
    )
    seed: int = option(metavar="N", type=click.IntRange(0, 2**32 - 1), default=0, help="Seed of the drawing.")
    step: int | None = option(
        type=int, metavar="STEP", show_default="the last one", help="Use the checkpoint of this step."
    )
    tokenizer: str | None = option(metavar="FILE", help="tokenizer.json, if that of the run has moved.")
    policy: str | None = option(
        metavar="POLICY[:VARIANT]",
        show_default="none, also for a run that was trained under one",
        help="Compute under this policy, in the phase of the checkpoint's step.",
    )
    backend: BackendName = backend_option
    output_format: str = format_option(
        "text", "json", help="json: prompt, text, tokens, and ended if the model ended the document."
    )

    def sampling(self) -> Sampling:
        from policyc.models.llama.generate import Sampling

        return Sampling(**{name.name: getattr(self, name.name) for name in fields(Sampling)})


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc generate runs/tiny --prompt 'import os'                    continue a text
    policyc generate runs/tiny --prompt 'def f(' --temperature 0       the most probable tokens
    policyc generate runs/tiny --prompt A --prompt B --tokens 32       several texts
    policyc generate runs/tiny/exports/300 < prompt.txt                an export; the text is a file
    policyc generate runs/tiny --prompt 'def f(' --policy llama_nvfp4  under a policy
    """,
)
@click.argument("folder", metavar="RUN", type=click.Path(path_type=Path))
@collect_options(GenerateOptions, "options")
def generate(folder: Path, options: GenerateOptions) -> None:
    """Continue texts with a trained model.

    RUN is the folder of a run of the bundled trainer, or of one of its exports. Each text is printed with its
    continuation, which ends where the model ends the document, or after --tokens. What was used goes to standard
    error.
    """
    prompts = _read_prompts(options.prompt)
    with explain_missing_package("train"):
        from policyc.models.llama.trained import load_trained

        sampling = options.sampling()
    policy = load_policy(options.policy) if options.policy else None
    with exit_on_error():
        model = load_trained(folder, options.step, options.tokenizer)
        transform = None if policy is None else _make_transform(model, policy, options.backend)
        _continue_all(model, prompts, sampling, transform, options)


def _read_prompts(texts: tuple[str, ...]) -> list[bytes]:
    if texts:
        return [text.encode("utf-8", "surrogateescape") for text in texts]
    if sys.stdin.isatty():
        raise click.UsageError("there is no text to continue: name one with --prompt TEXT, or pipe one")
    return [sys.stdin.buffer.read()]


def _continue_all(
    model: TrainedModel,
    prompts: list[bytes],
    sampling: Sampling,
    transform: Transform | None,
    options: GenerateOptions,
) -> None:
    from policyc.models.llama.generate import Generator

    encoded = [model.codec.encode(prompt) or [model.codec.end] for prompt in prompts]
    for ids in encoded:
        _check_tokens(ids, model)
    longest = max(map(len, encoded))
    if longest + sampling.tokens > model.positions:
        _say(
            f"warning: {longest} + {sampling.tokens} tokens: the model was trained on sequences of {model.positions}, "
            "and may get worse after that"
        )
    generator = Generator(model.params, model.config, sampling, longest, transform)
    _say(_describe(model, sampling, options))
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        _continue(model, generator, number, (prompt, ids), options.output_format)


def _check_tokens(ids: list[int], model: TrainedModel) -> None:
    if max(ids) >= model.config.vocab or min(ids) < 0:
        exit_with_message(
            f"the tokenizer gives token {max(ids)}, and the model has a vocabulary of {model.config.vocab}: it is of "
            "another model, or the prompt is empty and it has no end token"
        )


def _make_transform(model: TrainedModel, policy: Policy, backend: BackendName) -> Transform:
    import policyc

    if model.step is not None and model.steps is not None:
        policyc.set_step(max(model.step - 1, 0), total=model.steps)  # chooses the phase of a schedule
    return partial(policyc.apply, policy, has_aux=True, backend=backend)


def _describe(model: TrainedModel, sampling: Sampling, options: GenerateOptions) -> str:
    draws = f"at most {sampling.tokens} tokens, the most probable ones"
    if sampling.temperature:
        draws = (
            f"at most {sampling.tokens} tokens, temperature {sampling.temperature:g}, top-k "
            f"{sampling.top_k or 'all'}, top-p {sampling.top_p:g}, seed {sampling.seed}"
        )
    trained = f" (trained under {model.policy})" if model.policy else ""
    policy = f"policy {options.policy}, backend {options.backend}" if options.policy else "no policy"
    return f"{model.name}: {model.config.compute}, {policy}{trained}; {draws}"


def _say(text: str) -> None:
    click.echo(f"policyc: {text}", err=True)


def _continue(
    model: TrainedModel,
    generator: Generator,
    number: int,
    prompt: tuple[bytes, list[int]],
    output_format: str,
) -> None:
    """Prints a prompt and its continuation, each piece when it is known; or all of it as JSON.

    A terminal gets no control characters: a model may draw any.
    """
    from policyc.base.text import escape_lines

    text, ids = prompt
    drawn: list[int] = []
    is_complete = False

    def until_end() -> Iterator[int]:
        nonlocal is_complete
        for token in generator.generate(ids, number):
            if token == model.codec.end:
                is_complete = True
                return
            drawn.append(token)
            yield token

    pieces = model.codec.decode(ids, until_end())
    if output_format == "json":
        continuation = "".join(pieces)
        row = {
            "prompt": text.decode("utf-8", "replace"),
            "text": continuation,
            "tokens": drawn,
            "ended": is_complete,
        }
        click.echo(json.dumps(row))
        return
    for piece in itertools.chain([text.decode("utf-8", "replace")], pieces):
        click.echo(escape_lines(piece) if sys.stdout.isatty() else piece, nl=False)
    click.echo()
