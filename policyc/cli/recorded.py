"""For commands that evaluate a recorded loss: records it from a program or the bundled trainer."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import exit_with_message, load_jax, print_note
from policyc.cli.options import Decorator, check_source, collect_options, number, option, option_class
from policyc.cli.program import exit_on_error, explain_early_exit, explain_no_loss, parse_program

if TYPE_CHECKING:
    from policyc.experiments.program import Program
    from policyc.experiments.record import RecordedLoss


@option_class
class RecordOptions:
    """Which calls of a loss are recorded."""

    checkpoint: str | None = option(
        "--from",
        metavar="CHECKPOINT",
        help="Start from this checkpoint of the bundled trainer, such as runs/a/checkpoints/300. Needs --config.",
    )
    batches: int = number("Batches to record.", default=4)
    after: int = number("Let the program run this many steps before recording.", least=0, default=0)


record_options: Decorator = collect_options(RecordOptions, "record")


def parse_step(checkpoint: str) -> int:
    """The step of a checkpoint. Raises a usage error if this is not the folder of a checkpoint."""
    path = Path(checkpoint)
    if not (path.name.isdigit() and path.is_dir()):
        raise click.UsageError(
            f"--from {checkpoint}: this is not the folder of a checkpoint, such as runs/a/checkpoints/300"
        )
    return int(path.name)


def record(program: Sequence[str], config: str | None, options: RecordOptions) -> RecordedLoss:
    """Runs a program, or the bundled trainer, until it has recorded enough batches. Exits if there is no loss."""
    if config is None:
        check_source(program, config)
        if options.checkpoint is not None:
            raise click.UsageError("--from is for --config: give a program its own arguments to resume")
    load_jax()
    from policyc.experiments import runner
    from policyc.experiments.record import record_loss

    with _program(program, config, options) as source, exit_on_error():
        try:
            # The bundled trainer itself says why it exits.
            explained = explain_early_exit(source) if config is None else contextlib.nullcontext()
            running = stage(
                f"running the program until it has recorded {options.batches} batches", prints=True
            )
            with explained, contextlib.redirect_stdout(sys.stderr), running:
                recorded = record_loss(source, options.batches, options.after)
        except runner.NoLoss as error:
            exit_with_message(f"the program ended, but it {explain_no_loss(error.saw_forward_mode)}")
    if len(recorded.calls) < options.batches:
        print_note(f"the program ended after {len(recorded.calls)} of {options.batches} batches")
    return recorded


@contextlib.contextmanager
def _program(words: Sequence[str], config: str | None, options: RecordOptions) -> Iterator[Program]:
    """The program to record. The bundled trainer gets a folder that is removed afterwards."""
    if config is None:
        yield parse_program(words)
        return
    from policyc.experiments.program import Program
    from policyc.language.bundled import data_folder

    start = 0
    resume: tuple[str, ...] = ()
    if options.checkpoint is not None:
        start = parse_step(options.checkpoint)
        resume = ("--resume-from", options.checkpoint, "--accept-changes")
    steps = start + options.after + options.batches + 1
    with tempfile.TemporaryDirectory(prefix="policyc-") as folder:
        settings = ("--config", config, "--steps", str(steps), "--checkpoint-every", "0", "--eval-every", "0")
        script = str(data_folder("models") / "llama" / "train.py")
        yield Program(script, (*settings, "--folder", f"{folder}/run", *resume, *words))
