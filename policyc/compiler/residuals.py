"""The residual stream: additions of a value and of what products compute from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from policyc.compiler.flow import CARRY, Flow

_MAX_BRANCH = 4096  # nodes of one branch of the residual stream
_MAX_TERMS = 16  # of one sum
_SCALING = frozenset({"mul", "div", "select_n"})
_MAX_SCALINGS = 3  # operations between the stream and the addition: a scale, dropout, a gate


def find_residuals(flow: Flow) -> dict[int, set[int]]:
    """The nodes of residual additions, with those of the sites in the branches that they add."""
    residuals: dict[int, set[int]] = {}
    stops = set(flow.carries)
    for node, operation in enumerate(flow.operations):
        if operation in ("add", "add_any", "sub") and len(flow.inputs[node]) > 1:
            members = _branch_members(flow, node, stops)
            if members:
                residuals[node] = members
                stops.add(node)
    return residuals


def _branch_members(flow: Flow, node: int, stops: Collection[int]) -> set[int]:
    """The sites in the branches that an addition adds to a stream; none if it is not a residual addition."""
    terms = _terms(flow, node)
    members: set[int] = set()
    for stream in terms:
        candidates = {n for n in _unscaled(flow, stream) if n >= node - _MAX_BRANCH}
        if not candidates:
            continue
        for term in terms:
            if term == stream:
                continue
            before = flow.before([term], stops, min(candidates))
            for candidate in candidates & before:
                members |= flow.between(candidate, before) & flow.sites.keys()
    return members


def _terms(flow: Flow, node: int) -> list[int]:
    """The terms of a sum. A term that is itself a sum which nothing else uses is taken apart."""
    terms: dict[int, None] = {}
    pending = list(flow.inputs[node])
    while pending and len(terms) < _MAX_TERMS:
        operand = pending.pop()
        is_sum = flow.operations[operand] in ("add", "add_any") and len(flow.inputs[operand]) > 1
        if is_sum and len(flow.users[operand]) == 1:
            pending += flow.inputs[operand]
        else:
            terms[operand] = None
    return list(terms)


def _unscaled(flow: Flow, node: int) -> Iterator[int]:
    """A node, and what it is a multiple of."""
    yield node
    level = [node]
    for _ in range(_MAX_SCALINGS):
        level = [i for n in level if flow.operations[n] in _SCALING for i in flow.inputs[n]]
        yield from level
