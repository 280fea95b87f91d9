"""The options of `eval` and `generate`: which model runs, and with whose arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import choose_policy
from policyc.cli.options import Decorator, collect_options, number, option, option_class, path_option

if TYPE_CHECKING:
    from policyc.serving.arithmetic import Activations, KVCache
    from policyc.serving.rollout import Gap, Rollout


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
        if self.server == "training" and (self.activations or self.stats or self.kv_cache != "bf16"):
            raise click.UsageError(
                "--activations, --stats and --kv-cache are those of a server, not of training"
            )
        with stage(f"reading {folder}"):
            return self._open(folder)

    def _open(self, folder: str) -> Rollout:
        from policyc.serving.arithmetic import SERVER_RULES
        from policyc.serving.rollout import find_source, make_rollout

        source, is_served = find_source(Path(folder), None if self.run is None else Path(self.run), self.step)
        if is_served and self.stats is not None:
            raise click.UsageError(f"--stats: '{folder}' has its own static scales")
        return make_rollout(
            source,
            choose_policy(source, self.policy),
            SERVER_RULES.get(self.server),
            activations=self.activations,
            kv_cache=self.kv_cache,
            stats=None if self.stats is None else Path(self.stats),
            served=Path(folder) if is_served else None,
        )

    def describe(self, folder: str, rollout: Rollout) -> str:
        """A line that says what runs."""
        arithmetic = rollout.arithmetic
        if arithmetic is None:
            return f"{folder} as training\n"
        scales = [
            f"{format} activations {_WORDS[arithmetic.activations[format]]}" for format in rollout.formats
        ]
        return f"{folder} as {', '.join([self.server, *scales])}, KV cache in {arithmetic.kv_cache}\n"


_WORDS: dict[Activations, str] = {
    "static": "with static scales",
    "dynamic": "scaled by tensor",
    "token": "scaled by token",
    "none": "in BF16",
}


def describe_gap(gap: Gap) -> str:
    return (
        f"loss   {gap.training:.6f} in training, {gap.served:.6f} served: {gap.nats:+.6f} nats\n"
        f"k3-KL  {gap.kl:.3e} nats per token\n"
        f"top-1  {100 * gap.agreement:.3f} % of {gap.tokens:,} tokens\n"
    )


rollout_options: Decorator = collect_options(RolloutOptions, "rollout")
