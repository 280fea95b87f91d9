"""Finds the residual stream: additions of a value and of something that products compute from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from policyc.compiler.kinds.flow import CARRY, Flow

_MAX_BRANCH = 4096  # nodes of one branch of the residual stream
_WINDOW = (1 << _MAX_BRANCH) - 1
_MAX_TERMS = 16  # of one sum
_SUMS = frozenset({"add", "add_any", "sub"})
_SCALING = frozenset({"mul", "div", "select_n"})
_MAX_SCALINGS = 3  # operations between the stream and the addition: a scale, dropout, a gate


def find_residuals(flow: Flow, weighted: Collection[int], states: Collection[int]) -> dict[int, set[int]]:
    """The nodes of residual additions, each with the nodes of the sites in the branches that it adds.

    One of these sites must be in `weighted`, or there must be two: an attention without projections.
    An addition in `states` is part of a recurrence.
    """
    residuals: dict[int, set[int]] = {}
    ancestors = _Ancestors(flow)
    for node in flow.nodes_of(_SUMS):
        if len(flow.inputs[node]) > 1 and node not in states:
            ancestors.extend(node)
            members = _branch_members(flow, node, ancestors)
            if len(members) > 1 or not members.isdisjoint(weighted):
                residuals[node] = members
                ancestors.ends.add(node)
    return residuals


class _Ancestors:
    """The ancestors of each node: back to residual additions and carries, and at most `_MAX_BRANCH` nodes back.

    They are the bits of one integer, so that each node takes a bounded time, however many ancestors it has.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._bits: list[int] = []
        """For each node: bit d stands for the node d before it."""
        self.ends = set(flow.nodes_of([CARRY]))
        """Nodes whose inputs are not followed."""
        self._sites = list(flow.sites)
        self._written = {
            node: inputs
            for node in flow.written
            if (inputs := flow.inputs[node]) and inputs[-1] > node and flow.operations[node] != CARRY
        }
        """For each reference: what is written to it later."""

    def extend(self, stop: int) -> None:
        """Adds the next nodes, those before `stop`."""
        known, ends, written, references = self._bits, self.ends, self._written, self._flow.written
        first = len(known)
        for node, operands in enumerate(self._flow.inputs[first:stop], first):
            bits = 1
            if node not in ends:
                if references:  # only references and carries have inputs that are later nodes
                    near = [o for o in operands if node - _MAX_BRANCH < o < node]
                    operands = [*operands, *(v for o in near for v in written.get(o, ()))]
                    operands = [o for o in operands if o < node]
                for operand in operands:
                    bits |= known[operand] << node - operand
            if node >= _MAX_BRANCH:
                bits &= _WINDOW
                known[node - _MAX_BRANCH] = 0  # out of reach for all later nodes
            known.append(bits)

    def sites_between(self, first: int, last: int) -> set[int]:
        """The sites that are computed from the node `first`, and that the later node `last` is computed from."""
        bits, sites = self._bits, self._sites
        if not bits[last] >> last - first & 1:
            return set()
        between = sites[bisect_right(sites, first) : bisect_right(sites, last)]
        return {s for s in between if bits[last] & 1 << last - s and bits[s] & 1 << s - first}


def _branch_members(flow: Flow, node: int, ancestors: _Ancestors) -> set[int]:
    """The sites in the branches that an addition adds to a stream; empty if it is not a residual addition."""
    terms = _terms(flow, node)
    last = max(terms)
    members: set[int] = set()
    for stream in terms:
        if flow.operations[stream] in _SCALING:
            candidates = sorted(_unscaled(flow, stream), reverse=True)
        elif stream < last:
            candidates = [stream]
        else:
            continue
        for term in terms:
            for candidate in candidates if term != stream else ():
                if candidate < term and (branch := ancestors.sites_between(candidate, term)):
                    members |= branch
                    break
    return members


def _terms(flow: Flow, node: int) -> list[int]:
    """The terms of a sum. A term that is itself a sum is expanded, unless something else uses it."""
    terms: dict[int, None] = {}
    operations, inputs, users = flow.operations, flow.inputs, flow.users
    pending = list(inputs[node])
    while pending and len(terms) < _MAX_TERMS:
        operand = pending.pop()
        is_sum = operations[operand] in ("add", "add_any") and len(inputs[operand]) > 1
        if is_sum and len(users[operand]) == 1:
            pending += inputs[operand]
        else:
            terms[operand] = None
    return list(terms)


def _unscaled(flow: Flow, node: int) -> set[int]:
    """A node, and the nodes that it is a scaled value of."""
    found, level = {node}, [node]
    for _ in range(_MAX_SCALINGS):
        level = [i for n in level if flow.operations[n] in _SCALING for i in flow.inputs[n]]
        found.update(level)
    return found
