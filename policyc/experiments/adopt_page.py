"""The page of `policyc adopt`, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from policyc.base.web_page import as_markup, render_template
from policyc.experiments.adopt import BASELINE, FALLBACKS, LONG_RUN_ADVICE
from policyc.experiments.recommend import REFERENCE
from policyc.experiments.report.format import (
    MISSING,
    format_bounds,
    format_figure,
    format_gap,
)
from policyc.experiments.report.values import JsonObject
from policyc.hardware import gemm_cost
from policyc.numerics.backends import title


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page: a table or a command, then some sentences."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    command: str = ""
    sentences: list[str] = field(default_factory=list)


def render_adoption(data: JsonObject) -> str:
    """The page as Markdown."""
    sections = [_speeds(data), _savings(data), _sweep(data), _fallback(data)]
    return render_template(
        "policyc.experiments.report",
        "adopt.md",
        title=f"{data['model']} on {data['devices']} {data['target'].upper()}",
        headline=_headline(data),
        facts=_facts(data),
        sections=[section for section in sections if section is not None],
        verbatim=as_markup,
    )


def _headline(data: JsonObject) -> str:
    """The answer in one sentence."""
    tried = _tried(data)
    where = f"{data['devices']} {data['target'].upper()}"
    rival = _compared_with(data)
    if not tried:
        faster = [c["policy"] for c in data["candidates"] if c["advice"] == LONG_RUN_ADVICE]
        exception = f", except {faster[0]}, whose loss a sweep cannot show" if faster else ""
        return (
            f"On {where}, no policy with 4 bits is predicted to be faster than {rival['policy']}{exception}"
        )
    best = max(tried, key=lambda c: c["to_loss"] or 0)
    ratio = format_bounds(best["over_reference"]) if rival["policy"] == REFERENCE else _with_range(best)
    speed = f"on {where} it is predicted to train at {ratio} the speed of {rival['policy']}"
    if not best["to_loss"] or not rival["more_tokens"]:
        return f"Try {best['policy']}: {speed}; what it costs in loss is not known"
    to_loss = format_bounds(
        best["over_reference"] / rival["over_reference"], divisor=best["more_tokens"] / rival["more_tokens"]
    )
    return f"Try {best['policy']}: {speed}, and to reach its loss at {to_loss}"


def _tried(data: JsonObject) -> list[JsonObject]:
    return [c for c in data["candidates"] if c["advice"] == "try"]


def _compared_with(data: JsonObject) -> JsonObject:
    """What to compare speeds with, and to fall back to: the faster of the reference and the baseline."""
    plain = [c for c in data["candidates"] if c["policy"] in (REFERENCE, BASELINE)]
    fastest: JsonObject = min(plain, key=lambda c: c["seconds"])
    return fastest


def _facts(data: JsonObject) -> str:
    tokens = f"{data['tokens_per_step']:,} tokens per step"
    if data["tokens"] is not None:
        tokens += f", {format_figure('tokens', data['tokens'])} in all"
    return f"{data['mesh']}, {tokens}, NVFP4 with {title(data['backend'])}. Times are predicted, not measured"


def _speeds(data: JsonObject) -> Section:
    low, high = data["errors"]
    other = data["other_backend"]
    rows = [
        [
            c["policy"],
            format_figure("step_seconds", c["seconds"]),
            format_bounds(c["over_reference"]),
            _with_range(c),
            _gap(c),
            MISSING
            if c["to_loss"] is None
            else format_bounds(c["over_reference"], divisor=c["more_tokens"] or math.inf),
            *([format_bounds(c["other_speed_up"])] if other else []),
            f"{c['four_bits']:.0%}",
            format_figure("memory_bytes", c["memory"]),
            f"{c['communication']:.0%}",
            c["advice"],
        ]
        for c in data["candidates"]
    ]
    sentences = [f"{c['policy']}: {c['about']}." for c in data["candidates"]]
    sentences += [f"{row['policy']} is left out: {row['reason']}." for row in data["left_out"]]
    sentences += [
        f"In parentheses: the speed-up if the cost model is as far off as on eight published runs with Transformer "
        f"Engine, where it was {-low:.0%} too low to {high:.0%} too high. No parentheses: no published run to compare "
        "with.",
        f"Gap: to {REFERENCE} at 19M parameters, measured or by the table of sensitivities ('policyc search'). To the "
        f"loss: with the tokens that make up for the gap. {_exchange(data['exchange'])} At another size and length, "
        "both may differ: the sweep decides.",
        "Memory: state, saved activations and logits. The GPU has "
        f"{format_figure('memory_bytes', data['memory'])}. Compiled steps needed 3 to 22% more: 'policyc compile' "
        "counts every byte.",
        f"Waits, gaps and low clocks take {gemm_cost.OTHER_FRACTION:.0%} of a step. Of two figures, the first is for "
        "a policy that does not shorten them, the second for one that leaves their share as it is.",
    ]
    columns = [
        "policy",
        "step",
        f"over {REFERENCE}",
        f"over {BASELINE}",
        "gap, nats",
        f"to the loss of {REFERENCE}",
        *([f"with {title(other)}"] if other else []),
        "in 4 bits",
        "memory",
        "communication",
    ]
    return Section(title="Which policies", columns=[*columns, "advice"], rows=rows, sentences=sentences)


def _gap(candidate: JsonObject) -> str:
    if candidate["policy"] == REFERENCE:
        return MISSING
    is_predicted = candidate["gap"] is not None and not candidate["is_measured"]
    return format_gap(candidate["gap"]) + (" (table)" if is_predicted else "")


def _exchange(exchange: JsonObject) -> str:
    bound = ", a bound, because the learning rate of that run decays" if exchange["is_bound"] else ""
    return f"A doubling of the tokens is worth {exchange['rate']:.3f} nats, by {exchange['source']}{bound}."


def _with_range(candidate: JsonObject) -> str:
    text = format_bounds(candidate["speed_up"])
    if candidate["least"] is None:
        return text
    return f"{text} ({candidate['least']:.2f} to {candidate['most']:.2f})"


def _savings(data: JsonObject) -> Section | None:
    """Days, GPU hours and cost of the whole training run under each policy, and the savings."""
    if data["tokens"] is None:
        return None
    price, devices = data["price"], data["devices"]
    hours = {c["policy"]: c["gpu_hours"] for c in data["candidates"]}

    def amount(gpu_hours: float) -> str:
        return f"{gpu_hours * price:,.0f}" if price else f"{_days(gpu_hours / devices)} days"

    rows = []
    for c in data["candidates"]:
        own = c["gpu_hours"]

        def saved_over(name: str, ratios: Iterable[float]) -> str:
            return " to ".join(dict.fromkeys(amount(hours[name] * (1 - 1 / ratio)) for ratio in ratios))

        saved = [
            MISSING
            if name == c["policy"] or name not in hours
            else saved_over(name, gemm_cost.speed_up_bounds(hours[name] / own))
            for name in (REFERENCE, BASELINE)
        ]
        if c["least"] is not None and BASELINE in hours:
            saved[1] += f" ({saved_over(BASELINE, (c['least'], c['most']))})"
        cost = [f"{own * price:,.0f}"] if price else []
        rows.append([c["policy"], _days(own / devices), f"{own:,.0f}", *cost, *saved])
    columns = ["policy", "days", "GPU hours", *(["cost"] if price else [])]
    columns += [f"saved over {name}" for name in (REFERENCE, BASELINE)]
    sentences = [
        "Steps only: restarts, validation and checkpoints are extra. A negative saving is an extra cost.",
        "If a policy raises the loss, reaching the same loss takes more tokens: the sweep's report says how many.",
    ]
    return Section(title="What they save", columns=columns, rows=rows, sentences=sentences)


def _days(hours: float) -> str:
    days = hours / 24
    return f"{days:,.0f}" if abs(days) >= 100 else f"{days:.3g}"


def _sweep(data: JsonObject) -> Section | None:
    sweep = data["sweep"]
    if sweep is None:
        return None
    sentences = [
        f"{sweep['runs']} runs: {sweep['seeds']} seeds of each policy and of each baseline, paired by seed.",
        f"The sweep detects a gap of {sweep['detectable']:.3f} nats with {sweep['power']:.0%} power if the "
        f"differences of paired seeds have a standard deviation of {sweep['spread']:g} nats, the largest found at 19M "
        f"parameters. Parity is a gap within {sweep['margin']} of the loss. The report says what the sweep itself "
        "could detect.",
        "Gaps grow during a run: give every run at least 20 tokens per parameter.",
    ]
    if sweep["is_proxy"]:
        sentences.append(
            f"{sweep['config']} stands in for {data['model']}, which is too expensive to train {sweep['runs']} times."
        )
    if not sweep["config"]:
        sentences.append(
            "The program gets its seed from {seed} in its arguments or from POLICYC_SEED. Set --steps to its "
            "number of steps."
        )
    sentences.append(
        "'policyc report sweeps/adopt' has the verdicts, and the measured times, memory and stalls."
    )
    return Section(title="Find out what it costs", command=sweep["command"], sentences=sentences)


def _fallback(data: JsonObject) -> Section:
    rival = _compared_with(data)["policy"]
    names = [FALLBACKS[c["policy"]] for c in _tried(data) if c["policy"] in FALLBACKS and rival == BASELINE]
    fallback = " or ".join(names or [rival])
    rules = " The rules stay; only the recipe changes." if names else ""
    sentences = [
        f"Fallback: continue from the last good checkpoint under {fallback}, with the same seed and data.{rules}",
        f"Set the limit before the run: for example, back to {rival} if validation is more than the margin above the "
        "baseline at two checkpoints in a row.",
        "Hardware: NVFP4 training is native on compute capability 10.0 and 10.3 (B200, GB200, B300, GB300). Anywhere "
        "else it is emulated, which is exact but slow; policyc says so at the start. --require-native makes it "
        "an error.",
    ]
    return Section(title="If it goes wrong", sentences=sentences)
