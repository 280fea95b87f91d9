"""Plan for adopting lower precision: which policies to try, what they save, and which sweep measures the cost in loss.

Speeds are predictions of the cost model, with its errors on published runs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from policyc.base.progress import track
from policyc.experiments.exchange import Exchange
from policyc.experiments.recommend import REFERENCE, find_refusal
from policyc.experiments.report.values import JsonObject
from policyc.experiments.sensitivities import RATE, predict_gap
from policyc.experiments.statistics import ALPHA, DEFAULT_MARGIN, POWER, smallest_detectable_effect
from policyc.hardware import gemm_cost, step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.saved_activations import device_memory
from policyc.hardware.training_step import TrainingStep, count_backends, microbatch_tokens
from policyc.language.loader import load
from policyc.language.policy_tables import read_measured
from policyc.language.recipes import Gemm

BASELINE, EIGHT_BITS = "fp8", "fp8_with_head"
CANDIDATES = {
    REFERENCE: "the reference for losses",
    BASELINE: "the baseline for speeds",
    "fp8_with_head": "the fastest without 4 bits",
    "mlp_nvfp4_late_fp8": "4 bits in the MLPs, 8 elsewhere, and in fprop for the last 18% of steps",
    "mlp_nvfp4_rest_fp8": "the same without the switch",
    "te_nvfp4": "every linear of the blocks in 4 bits",
    "te_nvfp4_no_rht": "te_nvfp4 without the Hadamard transform, which costs two reads of each operand of wgrad",
    "nvfp4_late_switch": "te_nvfp4, but BF16 in the last 15% of the blocks, and in fprop for the last 18% of steps",
    "llama_nvfp4": "4 bits in the MLPs, nothing elsewhere",
}
"""The bundled policies to choose from, each with a description."""

NEEDS_LONG_RUN = "te_nvfp4_no_rht"
"""Its loss shows only in long runs of large models (docs/explanation/recipes.md), so no sweep recommends it."""
LONG_RUN_ADVICE = "not by a sweep: its loss shows in long runs"

FALLBACKS = {"te_nvfp4": "te_nvfp4:fp8", "llama_nvfp4": "llama_nvfp4:fp8"}
SEEDS = 5
SPREAD = 0.004
"""Standard deviation of paired loss differences, in nats: the largest one in docs/results at 19M parameters."""

PROXY = "19m"
_SMALL_CONFIGS = ("tiny", "moe_tiny", "5m", "19m", "30m", "50m", "100m", "200m")


def make_adoption(
    step: TrainingStep,
    mesh: MeshShape,
    *,
    config: str | None,
    words: Sequence[str] = (),
    tokens: float | None = None,
    price: float | None = None,
    exchange: Exchange = RATE,
) -> JsonObject:
    """Returns the data of the adoption page.

    Raises ValueError if the reference policy does not apply.

    Args:
      step: the training step, planned for the target under any policy.
      mesh: the device mesh.
      config: the name of the bundled configuration of `step`; None for a user's program.
      words: the command line of the user's program.
      tokens: tokens in the whole training run.
      price: price of one GPU-hour.
      exchange: what a gap costs in tokens.
    """
    step_tokens = microbatch_tokens(step.plan) * step.accumulate
    steps = None if tokens is None else tokens / step_tokens
    candidates, left_out, other_backend = _judge_all(step, mesh, steps, exchange)
    return {
        # A program is named without its folder, which means nothing to others.
        "model": config or shlex.join([Path(words[0]).name, *words[1:]]),
        "target": step.target.name,
        "devices": mesh.devices,
        "mesh": str(mesh),
        "backend": step.plan.execution.backend,
        "other_backend": other_backend,
        "memory": step.target.memory_bytes,
        "tokens_per_step": step_tokens,
        "tokens": tokens,
        "price": price,
        "errors": gemm_cost.SPEED_UP_ERRORS["te"],
        "exchange": {"rate": exchange.rate, "source": exchange.source, "is_bound": exchange.is_bound},
        "candidates": candidates,
        "left_out": left_out,
        "sweep": _advise_sweep(config, words, candidates),
    }


# ---- the candidates


def _judge_all(
    step: TrainingStep, mesh: MeshShape, steps: float | None, exchange: Exchange
) -> tuple[list[JsonObject], list[JsonObject], str | None]:
    """Returns the figures of the policies that fit the model, and the other policies with the reason why not.

    Also returns the name of the other backend; None if no time depends on it.
    """
    planned, left_out = {}, []
    for name in track(CANDIDATES):
        under = step.under(load(name))
        if reason := find_refusal(under):
            left_out.append({"policy": name, "reason": reason})
        else:
            planned[name] = under
    if REFERENCE not in planned:
        raise ValueError(f"no policy can be applied here: {left_out[0]['reason']}")
    seconds = {name: step_cost.scheduled_seconds(under, step.target, mesh) for name, under in planned.items()}
    on_other = {name: under.with_other_backend() for name, under in planned.items()}
    others = {name: step_cost.scheduled_seconds(under, step.target, mesh) for name, under in on_other.items()}
    backends = [on_other[name].plan.execution.backend for name in planned if others[name] != seconds[name]]
    judged = [_judge(name, planned[name], mesh, seconds, others, steps, exchange) for name in track(planned)]
    plain = max(c["to_loss"] for c in judged if c["policy"] in (REFERENCE, BASELINE))
    for candidate in judged:
        to_loss = candidate["to_loss"]
        if candidate["advice"] == "try" and to_loss is not None and to_loss <= plain:
            candidate["advice"] = "faster per step, slower to the loss"
    return judged, left_out, backends[0] if backends else None


def _judge(
    name: str,
    step: TrainingStep,
    mesh: MeshShape,
    seconds: dict[str, float],
    others: dict[str, float],
    steps: float | None,
    exchange: Exchange,
) -> JsonObject:
    """Returns the cost of a policy on this model, what it saves, and whether to try it.

    `seconds` is the time of a step, and `memory` the bytes on one device. `gap` is that of 19M parameters, measured or
    by the table of sensitivities; `tokens` make up for it, over those of BF16; `to_loss` is the speed-up over BF16 to
    its loss. They are None if nothing is known. `four_bits` and `emulated` are fractions of
    all GEMM FLOPs. `speed_up` is over the baseline; None if the baseline does not fit the model. `least` and `most`
    bound it by the errors of the cost model; None if these are unknown. `others` are the times with the other backend.
    """
    target = step.target
    four_bits, emulated = _shares(step)
    over_reference = seconds[REFERENCE] / seconds[name]
    speed_up = seconds[BASELINE] / seconds[name] if BASELINE in seconds else None
    is_compared = speed_up is not None and four_bits > 0 and not emulated
    limits = (
        gemm_cost.speed_up_range(speed_up, count_backends(step.plan)) if speed_up and is_compared else None
    )
    least, most = limits or (None, None)
    memory = device_memory(step, mesh)
    measured = read_measured().get(name)
    gap = predict_gap(step.plan) if measured is None else measured["gap"]
    tokens = None if gap is None else exchange.ratio(gap)
    if name in (REFERENCE, BASELINE):
        advice = "reference" if name == REFERENCE else "baseline"
    elif not four_bits and name != EIGHT_BITS:
        advice = "nothing is in 4 bits here"
    elif emulated:
        advice = f"emulated on {target.name}: to study the loss, not for speed"
    elif memory > target.memory_bytes:
        advice = "does not fit into memory"
    elif seconds[name] >= min(seconds[each] for each in (REFERENCE, BASELINE) if each in seconds):
        advice = "no gain is predicted"
    else:
        advice = LONG_RUN_ADVICE if name == NEEDS_LONG_RUN else "try"
    return {
        "policy": name,
        "about": CANDIDATES[name],
        "advice": advice,
        "seconds": seconds[name],
        "four_bits": four_bits,
        "emulated": emulated,
        "communication": step_cost.estimate(step, target, mesh).share("communication"),
        "memory": memory,
        "over_reference": over_reference,
        "gap": gap,
        "is_measured": measured is not None,
        "more_tokens": tokens if tokens is None or math.isfinite(tokens) else None,
        "to_loss": tokens and over_reference / tokens,
        "speed_up": speed_up,
        "other_over_reference": others[REFERENCE] / others[name],
        "other_speed_up": others[BASELINE] / others[name] if BASELINE in others else None,
        "least": least,
        "most": most,
        "gpu_hours": None if steps is None else steps * seconds[name] * mesh.devices / 3600,
    }


def _shares(step: TrainingStep) -> tuple[float, float]:
    """Returns the fractions of all GEMM FLOPs that are in 4 bits and that are emulated, in the first phase."""
    total = four_bits = emulated = 0.0
    for group in step.groups():
        for gemm in Gemm:
            if gemm not in group.site.products:
                continue
            backend = group.backend(gemm)
            flops = group.count * group.site.flops
            total += flops
            four_bits += flops if group.recipe is not None and group.recipe.bits(gemm) == 4 else 0
            emulated += flops if backend is not None and backend.emulates else 0
    return four_bits / total, emulated / total


# ---- the sweep that decides


def _advise_sweep(
    model: str | None, program: Sequence[str], candidates: Sequence[JsonObject]
) -> JsonObject | None:
    """The command of the sweep, and what it can resolve; None if there is nothing to try or, emulated, to study."""
    baselines = [c["policy"] for c in candidates if c["policy"] in (REFERENCE, BASELINE)]
    emulated = [c["policy"] for c in candidates if c["emulated"]]
    policies = [c["policy"] for c in candidates if c["advice"] == "try"] or emulated[:1]
    if not policies:
        return None
    config = model and (model if model in _SMALL_CONFIGS else PROXY)
    options = ["--vs", ",".join(baselines), "--seeds", str(SEEDS), "--stats-every", "500"]
    source = ["--config", config, "--data", "corpus.bin"] if config else ["--steps", "2000", *program]
    words = ["policyc", "sweep", ",".join(policies), *options, "--folder", "sweeps/adopt", *source]
    compared = len(policies) + len(baselines) - 1  # with the first baseline
    detectable = smallest_detectable_effect(SPREAD, SEEDS, ALPHA / compared)
    return {
        "command": shlex.join(words),
        "config": config,
        "is_proxy": bool(config) and config != model,
        "seeds": SEEDS,
        "runs": SEEDS * (len(policies) + len(baselines)),
        "margin": str(DEFAULT_MARGIN),
        "spread": SPREAD,
        "detectable": float(detectable),
        "power": POWER,
    }
