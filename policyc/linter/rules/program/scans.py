"""Scans that a policy splits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from policyc.compiler.planning.plan import Plan
from policyc.compiler.planning.plan_checks import name_sites
from policyc.compiler.sites.site import Site
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Context


class _Split(NamedTuple):
    """A scanned stack that a policy splits into several scans in a phase, with the last rule that takes part in it."""

    names: tuple[str, ...]
    parts: tuple[range, ...]
    rule: int
    phase: str


def _find_splits(plan: Plan) -> Iterator[_Split]:
    """Yields each stack that the policy splits, in the phase with the most parts."""
    splits: dict[Address, _Split] = {}
    for phase in plan.phases:
        decisions = plan.decisions(phase)
        cuts: dict[tuple[Address, int], list[tuple[int, Site, int]]] = {}  # (layer, site, rule)
        for site in (s for s in plan.sites if not s.opaque):
            for depth, stack in enumerate(site.stacks):
                for layer in (la for la in site.all_layers() if la[depth] and not stack.is_shard_map):
                    before = (*layer[:depth], layer[depth] - 1, *layer[depth + 1 :])
                    pair = decisions[site.address, before], decisions[site.address, layer]
                    if pair[0].recipe != pair[1].recipe:
                        rule = max(rule for d in pair for rule in d.deciding)
                        cuts.setdefault((stack.address, stack.size), []).append((layer[depth], site, rule))
        for (address, size), found in cuts.items():
            layers, sites, rules = zip(*found, strict=True)
            parts = tuple(range(a, b) for a, b in itertools.pairwise(sorted({0, *layers, size})))
            if address not in splits or len(parts) > len(splits[address].parts):
                splits[address] = _Split(name_sites(sites), parts, max(rules), plan.label(phase))
    yield from splits.values()


def split_scan(context: Context) -> Iterable[Diagnostic]:
    """Note: A rule splits a scanned stack into several scans.

    A scan has one body for all its layers. If a policy treats layers differently, the scan becomes consecutive scans,
    each with its own body. The results are the same, but each body is compiled, so many of them take long to compile.
    This is not a fault: the note makes a split at an unexpected layer visible. If you did not intend it, correct the
    slice.

    Bad:  layers[3:-4].mlp -> fp8  # three parts, although the first three layers were not meant to differ
    Good: layers[:-4].mlp -> fp8
    """
    for split in _find_splits(context.program_plan):
        parts = [f"{p.start}-{p.stop - 1}" if len(p) > 1 else str(p.start) for p in split.parts]
        phase = f" ({split.phase})" if split.phase != "always" else ""
        yield Diagnostic(
            span=context.policy.rules[split.rule].span,
            message=f"the stack of '{split.names[0]}' becomes {len(parts)} scans: iterations {', '.join(parts)}{phase}",
            sites=split.names,
        )
