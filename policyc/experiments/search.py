"""Searches a modest set of policies for the one that reaches a loss first.

A policy says which kinds and products are in NVFP4, and what the other products, last blocks and last steps are in. Its
speed comes from the cost model, its gap from the table of sensitivities, and the tokens that make up for the gap from
an exchange rate.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from policyc.base.progress import track
from policyc.base.text import format_ratio
from policyc.compiler.planning.idle_rules import find_deciding_rules
from policyc.compiler.planning.plan_checks import check_plan
from policyc.experiments.exchange import Exchange
from policyc.experiments.sensitivities import ERROR, KINDS, predict_gap
from policyc.hardware.gemm_cost import speed_up_bounds
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import scheduled_seconds
from policyc.hardware.training_step import TrainingStep, count_backends
from policyc.language.diagnostics import PolicyError
from policyc.language.formatter import format_text
from policyc.language.loader import load, parse
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.numerics.backends import join_titles

CONTROLS = ("bf16", "fp8", "fp8_with_head")
"""Bundled policies without 4 bits, with which each found one is compared."""
BUNDLED = (
    *CONTROLS,
    "mlp_nvfp4_rest_fp8",
    "mlp_nvfp4_late_fp8",
    "mlp_nvfp4_tail_fp8",
    "llama_nvfp4",
    "te_nvfp4",
)

TAIL = "layer >= -15%"
SWITCH = "82%"
_ALLOW = "  # allow: no-high-precision-tail -- the table of sensitivities knows kinds, not depth"
_WIDTH = 110

Format = str | tuple[Gemm, ...]
FORMATS: tuple[Format, ...] = ("", "fp8", tuple(Gemm), (Gemm.DGRAD, Gemm.WGRAD), (Gemm.DGRAD,), (Gemm.WGRAD,))
"""What a kind may be in: kept, FP8, or NVFP4 in some products and FP8 in the others. fprop costs most of the loss: with
fprop in NVFP4, the other two cost little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy with its predictions. `name` is empty unless it is bundled."""

    text: str
    name: str = ""
    speed_up: float
    """Over a step in BF16."""
    gap: float
    more_tokens: float
    """Tokens for the loss of BF16, over its tokens."""

    @property
    def rules(self) -> str:
        """The rules in one line."""
        lines = (line.partition("#")[0].strip() for line in self.text.splitlines())
        return "; ".join(line for line in lines if line and not line.startswith("recipe"))

    @property
    def to_loss(self) -> float:
        """The speed-up to the loss of BF16."""
        return self.speed_up / self.more_tokens


class Search:
    """The predictions of policies on one step."""

    def __init__(self, step: TrainingStep, mesh: MeshShape, exchange: Exchange) -> None:
        self.step: TrainingStep = step
        self.exchange: Exchange = exchange
        self._mesh = mesh
        self._base = self._seconds(load("bf16"))

    def _seconds(self, policy: Policy) -> float:
        return scheduled_seconds(self.step.under(policy), self.step.target, self._mesh)

    def speed_up(self, policy: Policy) -> float:
        """Over a step in BF16."""
        return self._base / self._seconds(policy)

    def candidates(self) -> list[Candidate]:
        """All policies of the set, after the bundled ones. Policies without a prediction are left out."""
        bundled = [self.predict(f'import "{name}"\n', name) for name in BUNDLED]
        sites = self.step.plan.sites
        kinds = {KINDS[site.kind.name] for site in sites if site.kind.name in KINDS}
        has_layers = any("layer" in site.attributes(layer) for site in sites for layer in site.layers())
        texts = list(enumerate_policies(kinds, has_layers=has_layers))
        found = [self.predict(text) for text in track(texts)]
        distinct: dict[tuple[float, float], Candidate] = {}
        for candidate in (*bundled, *found):
            if candidate is not None:  # with the same predictions, the first one stays: it may be bundled
                distinct.setdefault((round(candidate.speed_up, 6), round(candidate.gap, 6)), candidate)
        return list(distinct.values())

    def predict(self, text: str, name: str = "") -> Candidate | None:
        """The predictions for a policy; None if it does not fit the program, or its formats were never measured."""
        policy = parse(text)
        under = self.step.under(policy)
        try:
            check_plan(under.plan)
        except PolicyError:
            return None
        gap = predict_gap(under.plan)
        if gap is None or not (policy.changes_nothing or find_deciding_rules(under.plan)[0]):
            return None
        more_tokens = self.exchange.ratio(gap)
        return Candidate(
            text=text, name=name, speed_up=self.speed_up(policy), gap=gap, more_tokens=more_tokens
        )

    def after_equal_time(self, candidate: Candidate) -> float:
        """The loss after the time that BF16 takes, minus that of BF16, in nats, to first order."""
        return candidate.gap - self.exchange.rate * math.log2(candidate.speed_up)

    def break_even(self, one: Candidate, other: Candidate) -> float | None:
        """The nats per doubling of the tokens at which two policies reach a loss at the same time."""
        doublings = math.log2(one.speed_up / other.speed_up)
        return (one.gap - other.gap) / doublings if doublings else None

    def describe(self, candidate: Candidate) -> str:
        planned = self.step.under(parse(candidate.text))
        backends = join_titles(sorted(count_backends(planned.plan)))
        speed = format_ratio(*speed_up_bounds(candidate.speed_up))
        where = (
            f"{self._mesh.devices} {self.step.target.name.upper()}{f', with {backends}' if backends else ''}"
        )
        return f"{speed} the speed of BF16 on {where}"

    def write(self, candidate: Candidate, source: str, command: str) -> str:
        """The text of a found policy, with a header."""
        entries = {
            "Intent": f"the least predicted time to a loss for {source}, found by policyc search.",
            "Source": f"{command}; gaps by the table of docs/howto/search.md, tokens by {self.exchange.source}.",
            "Expect": f"{self.describe(candidate)}; {candidate.gap:.4f} nats above BF16, give or take {ERROR}; "
            f"{candidate.to_loss:.2f}x to the loss of BF16. All are predictions.",
        }
        lines = [f"# Found by search: {candidate.to_loss:.2f}x to the loss of BF16.", "#"]
        for word, text in entries.items():
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent=f"# {word}:  ", subsequent_indent="#          "
            )
        text = "\n".join([*lines, "", candidate.text])
        return format_text(text) or text


# ---- the set


def enumerate_policies(kinds: Collection[str], *, has_layers: bool = True) -> Iterator[str]:
    """The texts of all policies for a program with some of the kinds mlp, attention and head."""
    for mlp in FORMATS if "mlp" in kinds else FORMATS[:1]:
        # If both have 4 bits, they have them in the same products.
        others = FORMATS[:2] if isinstance(mlp, str) else (*FORMATS[:2], mlp)
        for attention in others if "attention" in kinds else FORMATS[:1]:
            for head in FORMATS[:2] if "head" in kinds else FORMATS[:1]:
                formats = {"mlp": mlp, "attention": attention, "head": head}
                four_bits = [kind for kind, format in formats.items() if isinstance(format, tuple)]
                tails = (False, True) if four_bits and has_layers else (False,)
                switches = ("", "fp8", "bf16") if isinstance(mlp, tuple) and Gemm.FPROP in mlp else ("",)
                for tail, switch in itertools.product(tails, switches):
                    yield _write(formats, four_bits, tail=tail, switch=switch)


def _write(formats: dict[str, Format], four_bits: Sequence[str], *, tail: bool, switch: str) -> str:
    products = formats[four_bits[0]] if four_bits else ()
    in_fp8 = [k for k, f in formats.items() if f == "fp8" or (k in four_bits and len(products) < len(Gemm))]
    lines = []
    if four_bits:
        uses = {
            "rht=wgrad": Gemm.WGRAD in products,
            "sr=grad": Gemm.DGRAD in products or Gemm.WGRAD in products,
            "scale2d=weights": Gemm.FPROP in products or Gemm.DGRAD in products,
        }
        lines += [
            f"recipe nv = nvfp4({', '.join(option for option, is_used in uses.items() if is_used)})",
            "",
        ]
    lines += [f"* where {' or '.join(in_fp8)} -> fp8"] if in_fp8 else []
    if four_bits:
        where = " or ".join(four_bits)
        names = f"{{{','.join(products)}}}" if len(products) > 1 else products[0]
        at = "" if len(products) == len(Gemm) else f" @ {names}"
        lines.append(f"*{at} where {where} -> nv{'' if tail else _ALLOW}")
        lines += [f"* where {f'({where})' if ' or ' in where else where} and {TAIL} -> fp8"] if tail else []
        lines += [f"after {SWITCH} {{ * @ fprop where {where} -> {switch} }}"] if switch else []
    return "\n".join(lines or ["* -> bf16"]) + "\n"
