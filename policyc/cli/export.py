"""`policyc export`: writes a model as inference servers read it, with the codes of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_USAGE,
    ExampleCommand,
    choose_policy,
    exit_with_message,
    explain_missing_package,
    print_note,
)
from policyc.cli.options import collect_options, number, option, option_class, path_option, switch
from policyc.cli.program import exit_on_error

if TYPE_CHECKING:
    from policyc.serving.export import FormatName
    from policyc.serving.llama_source import LlamaSource


@option_class
class ExportOptions:
    """What is exported, and how."""

    policy: str | None = option(
        metavar="POLICY[:VARIANT]",
        show_default="that of the run",
        help="The policy that the model was trained under.",
    )
    file_format: FormatName = option(
        "--format",
        type=click.Choice(["compressed-tensors", "modelopt"]),
        default="compressed-tensors",
        help="Layout of the file. vLLM and SGLang read both, TensorRT-LLM modelopt, transformers compressed-tensors.",
    )
    folder: str = path_option(metavar="DIR", required=True, help="Folder to create.")
    stats: str | None = path_option(
        metavar="FILE",
        help="stats.jsonl of the run (train --stats-every): static scales for activations. Without it, NVFP4 weights "
        "are served with BF16 activations.",
    )
    step: int | None = number("Step of the checkpoint of a run.", show_default="the last one")
    exact: bool = switch("Fail if a code would differ from training.")


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc export runs/a --folder served                                   NVFP4 weights, BF16 activations
    policyc export runs/a --stats runs/a/stats.jsonl --folder served        with static input scales
    policyc export Llama-3-8B --policy te_nvfp4 --format modelopt --folder served
    """,
)
@click.argument("source", metavar="RUN|HF_FOLDER", type=click.Path(file_okay=False))
@collect_options(ExportOptions, "options")
def export(source: str, options: ExportOptions) -> None:
    """Write a Llama as inference servers read it.

    The codes are those of training, to the bit. But servers run q, k, v and gate, up as one linear each, with one outer
    scale: where training used several (not outer=shared), these weights are quantized again, and what that changes is
    printed. A recipe that no server has is an error that names the edit of the policy. The folder appears once it is
    complete. It has policyc.json, which says how it was made.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with exit_on_error(), explain_missing_package("train"):
        from policyc.serving.export import export as write
        from policyc.serving.llama_source import host_arrays, read_source

        read = read_source(Path(source), options.step)
        policy = choose_policy(read, options.policy)
        plan = read.plan(policy)
        try:
            with stage("quantizing and writing the weights"):
                written = write(
                    host_arrays(read.load()),
                    plan,
                    names=read.names(),
                    out=options.folder,
                    format=options.file_format,
                    config=read.hf_config,
                    files=read.files(),
                    stats=options.stats,
                    phase=read.phase(plan),
                    exact=options.exact,
                    dtype=read.model.compute,  # type: ignore[arg-type]  # a choice of the configuration
                    about=_describe(source, read),
                )
        except OSError as error:
            exit_with_message(f"--folder: '{options.folder}' cannot be written: {error.strerror}", EXIT_USAGE)
    if written.changes:
        print_note(f"{len(written.changes)} linears have other codes than in training, because servers give fused "
                   "linears one outer scale: train with outer=shared (not for experts)")  # fmt: skip
        for change in written.changes:
            click.echo(f"  {change}", err=True)
    for label, count in written.counts.items():
        click.echo(f"{count} linears: {label}")
    click.echo(f"{written.bytes / 1e6:.1f} MB in {written.folder}")


def _describe(source: str, read: LlamaSource) -> dict[str, object]:
    """How the weights were made, as far as it is known. The plan of an export has other backends than the run."""
    backends = read.training.get("backends")
    if not read.step:
        return {"source": source, "backends": backends}
    return {
        "source": source, "step": read.step, "steps": read.run.steps, "training": dict(read.training),
        "backends": backends,
    }  # fmt: skip
