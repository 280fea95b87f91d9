"""The flow of activations through a loss, as one graph: every call is inlined, and loops are cycles.

Kinds and blocks are read off this graph. Parameters and constants are not part of it, and an operation that only
changes the layout of its operand shares the operand's node. Different parts of an input are different data, as a batch
of two views is, and have nodes of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, primitives

from policyc.compiler.sites.site import Site
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import CONTAINERS, OPAQUE, SCAN
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES

Call: TypeAlias = "tuple[JaxprEqn, Call | None]"
"""An equation, and the container around it; None at the top level."""

CONSTANT, PARAMETER = -1, -2
"""Used in place of a node for variables that are computed from constants alone, or from parameters and constants."""

_LAYOUT = frozenset(
    name for name, rule in PRIMITIVES.items() if rule.weight in ("layout", "identity") or rule.moves
)
"""Primitives whose results are operands in another layout, type or place.

The n-th result is the n-th operand (`_ONE_FOR_ONE`), or every result is the first operand.
"""

_ONE_FOR_ONE = frozenset(
    name
    for name in _LAYOUT
    if PRIMITIVES[name].weight == "identity" or PRIMITIVES[name].derivative == "per operand"
)

_PARTS = frozenset({"slice", "dynamic_slice", "split", "unstack"})

_PLAIN = frozenset(name for name, rule in PRIMITIVES.items() if rule.weight != "product") - _LAYOUT
"""Primitives without jaxprs and references, most of them elementwise, whose results depend on all operands alike."""

_KNOWN = {
    *PRIMITIVES, *(p.name for name, p in vars(primitives).items() if name.endswith("_p")), "tie", "dce_sink",
    "broadcast_to",
}  # fmt: skip
"""Primitives that are known not to call anything opaque to the compiler."""


def _shifts(eqn: JaxprEqn) -> bool:
    """Whether an equation pads before or between elements: a shift, or a part of an associative scan."""
    return any(low > 0 or interior for low, _, interior in eqn.params.get("padding_config", ()))


_MAX_SEEN = 2  # a kernel without sites that reads more activations is not followed through

CARRY = "carry"
"""The operation of a node that stands for a carry of a loop. Its inputs are the initial value and the next one."""

INPUT = "input"

_PART = "part of an input"


@dataclass(slots=True)
class LoopBody:
    """The body of a loop: its nodes are `first` to `last`; `carries` pairs each carry with its next value.

    It is over data if it scans an activation, as over the tokens of a sequence.
    """

    first: int
    last: int = 0
    carries: list[tuple[int, int]] = field(default_factory=list)
    is_reverse: bool = False
    is_over_data: bool = False


class Flow:
    """The graph. A node is a number; an input of a node has a lower number, except the next value of a carry."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.inputs: list[list[int]] = []
        self.calls: list[Call | None] = []
        self.sites: dict[int, Site] = {}
        """The sites by node, in order."""
        self.operands: dict[int, tuple[int, ...]] = {}
        """The nodes of all operands of a site, including parameters and constants."""
        self.opaque: dict[int, tuple[int, ...]] = {}
        """For each opaque call: the nodes of all operands."""
        self.loops: dict[Address, LoopBody] = {}
        self.learned: set[int] = set()
        """The nodes that read a parameter."""
        self.written: set[int] = set()
        """The references that are written to. The written values are among their inputs."""
        self.visits: int = 0
        """How many nodes all walks have visited: a measure of the cost of finding kinds."""

    @cached_property
    def users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.inputs]
        for node, inputs in enumerate(self.inputs):
            for operand in inputs:
                users[operand].append(node)
        return users

    @cached_property
    def _by_operation(self) -> dict[str, list[int]]:
        nodes: dict[str, list[int]] = defaultdict(list)
        for node, operation in enumerate(self.operations):
            nodes[operation].append(node)
        return nodes

    @cached_property
    def exponentials(self) -> frozenset[int]:
        return frozenset(self.nodes_of(("exp", "exp2")))

    def nodes_of(self, operations: Iterable[str]) -> list[int]:
        """The nodes of some operations, in order."""
        return sorted(node for name in operations for node in self._by_operation.get(name, ()))

    def add(self, operation: str, operands: Collection[int] = (), call: Call | None = None) -> int:
        """Adds a node and returns it. Operands may be `PARAMETER` and `CONSTANT`."""
        node = len(self.operations)
        if PARAMETER in operands:
            self.learned.add(node)
        self.operations.append(operation)
        self.inputs.append([o for o in operands if o >= 0])
        self.calls.append(call)
        return node

    def combine(self, operation: str, operands: Collection[int], call: Call | None) -> int:
        """Adds a node computed from some operands; returns `PARAMETER` or `CONSTANT` if none of them is a node."""
        if max(operands, default=CONSTANT) >= 0:
            return self.add(operation, operands, call)
        return PARAMETER if PARAMETER in operands else CONSTANT

    def equation(self, node: int) -> JaxprEqn:
        call = self.calls[node]
        assert call is not None, "the inputs of a loss have no equation"
        return call[0]

    def place(self, node: int) -> str:
        """The file and line of a node's equation, or of the innermost container that has them."""
        place, call = "", self.calls[node]
        while call is not None and not place:
            eqn, call = call
            place = jaxprs.source_place(eqn)
        return place or "an unknown place"

    def before(self, starts: Iterable[int], stops: Container[int] = (), first: int = 0) -> set[int]:
        """The nodes from `first` on that `starts` are computed from, including `starts`.

        The inputs of the nodes in `stops` are not followed.
        """
        return self._reach([n for n in starts if n >= first] if first else starts, self.inputs, stops, first)

    def after(self, starts: Iterable[int], stops: Container[int] = ()) -> set[int]:
        """The nodes that are computed from `starts`. A start is included only if it is computed from one of them.

        The users of the nodes in `stops` are not followed.
        """
        return self._reach([user for start in starts for user in self.users[start]], self.users, stops)

    def between(self, start: int, inside: Collection[int]) -> set[int]:
        """The nodes in `inside` that are computed from `start` through nodes in `inside` only."""
        reached: set[int] = set()
        pending = [start]
        while pending:
            for user in self.users[pending.pop()]:
                if user in inside and user not in reached:
                    reached.add(user)
                    pending.append(user)
        return reached

    def _reach(
        self, starts: Iterable[int], neighbours: list[list[int]], stops: Container[int], first: int = 0
    ) -> set[int]:
        reached = set(starts)
        pending = list(reached)
        for node in pending:  # grows while it is walked
            if node not in stops:
                for neighbour in neighbours[node]:
                    if neighbour not in reached and neighbour >= first:
                        reached.add(neighbour)
                        pending.append(neighbour)
        self.visits += len(reached)
        return reached


def build_flow(
    jaxpr: ClosedJaxpr, is_parameter: Sequence[bool], frozen: Collection[Var], sites: Collection[Site]
) -> Flow:
    """The flow of a loss. `is_parameter` says which of its inputs are parameters; `frozen` has the other weights.

    A product that no parameter reaches prepares data, for example rotates an image. It is not a site of the flow.
    """
    builder = _Builder(sites)
    flow = builder.flow
    values = [
        PARAMETER if is_weight or var in frozen else flow.add(INPUT)
        for var, is_weight in zip(jaxpr.jaxpr.invars, is_parameter, strict=True)
    ]
    constants = {}
    for var in jaxpr.jaxpr.constvars:
        if var in frozen:
            constants[var] = PARAMETER
        elif getattr(var.aval, "shape", ()):  # data that the loss closes over
            constants[var] = flow.add(INPUT)
    builder.run(jaxpr, values, (), constants)
    learned = flow.learned
    distant = {n for n in flow.sites.keys() - learned if learned.isdisjoint(flow.inputs[n])}
    for node in distant - flow.after(learned) if distant else ():
        del flow.sites[node], flow.operands[node]
    return flow


_NO_SITES: dict[int, Site] = {}


class _Builder:
    """Adds the nodes of a jaxpr to a `Flow`. A value is a node, `PARAMETER` or `CONSTANT`."""

    def __init__(self, sites: Collection[Site]) -> None:
        self.flow = Flow()
        self._sites: dict[Address, dict[int, Site]] = defaultdict(dict)
        """For the address of each jaxpr: the sites among its equations, by equation number."""
        for site in sites:
            self._sites[site.address[:-1]][site.address[-1]] = site
        self._with_sites = {outer[:depth] for outer in self._sites for depth in range(1, len(outer) + 1)}
        """The addresses of equations with a site inside."""
        self._parts: dict[Hashable, int] = {}
        """The nodes of the parts of inputs, by what is taken of which node."""
        self._caller: Call | None = None

    def run(
        self,
        jaxpr: AnyJaxpr,
        values: Sequence[int],
        address: Address,
        constants: dict[Var, int] | None = None,
    ) -> list[int]:
        """Returns the values of a jaxpr's results, given those of its inputs, which are the last of `values`."""
        opened = jaxprs.open_jaxpr(jaxpr)
        caller, flow, site_at = self._caller, self.flow, self._sites.get(address, _NO_SITES).get
        operations, all_inputs, calls, learned = flow.operations, flow.inputs, flow.calls, flow.learned
        known: dict[Any, int] = dict(
            zip(opened.invars, values[len(values) - len(opened.invars) :], strict=True)
        )
        if constants:
            known.update(constants)
        value_of = known.get
        for number, eqn in enumerate(opened.eqns):
            name = eqn.primitive.name
            operands: list[int] = []
            least = 0
            for atom in eqn.invars:
                value = CONSTANT if type(atom) is Literal else value_of(atom, CONSTANT)
                operands.append(value)
                if value < least:
                    least = value
            site = site_at(number)
            if site is not None or name in _PLAIN:
                inputs = [o for o in operands if o >= 0] if least else operands
                if inputs or site is not None:
                    value = len(operations)
                    operations.append(name)
                    all_inputs.append(inputs)
                    calls.append((eqn, caller))
                    if least == PARAMETER:
                        learned.add(value)
                    if site is not None:
                        flow.sites[value] = site
                        flow.operands[value] = tuple(operands)
                else:
                    value = least or CONSTANT
            elif name not in _LAYOUT or len(operands) != 1 or name in _PARTS:
                self._caller = (eqn, caller)
                enter = _CONTAINERS.get(name, _Builder.other)
                results = enter(self, eqn, operands, (*address, number))
                known.update(zip(eqn.outvars, results, strict=True))
                continue
            if value != CONSTANT:
                for var in eqn.outvars:
                    known[var] = value
        self._caller = caller
        return [CONSTANT if type(a) is Literal else value_of(a, CONSTANT) for a in opened.outvars]

    def other(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        """Any equation that is not a container."""
        name, count = eqn.primitive.name, len(eqn.outvars)
        if name in _ONE_FOR_ONE:
            return operands
        if eqn.invars and jaxprs.is_reference(eqn.invars[0].aval):  # a reference is read or written
            self._write(operands[0], operands[1:])
            return [operands[0]] * count
        if address in self._with_sites:
            return [self._opaque_with_sites(eqn, operands, address)] * count
        if name in _LAYOUT and operands[0] >= 0 > max(operands[1:], default=CONSTANT) and not _shifts(eqn):
            is_part = name in _PARTS and self.flow.operations[operands[0]] in (INPUT, _PART)
            return [self._part(eqn, operands[0], n) if is_part else operands[0] for n in range(count)]
        node = self.flow.combine(name, operands, self._caller)
        is_collective = name.endswith(("_start", "_done"))
        if node >= 0 and name not in _KNOWN and not is_collective:
            self.flow.opaque[node] = tuple(operands)
        return [node] * count

    def _part(self, eqn: JaxprEqn, data: int, output: int) -> int:
        indices = (str(a) if type(a) is Literal else a for a in eqn.invars[1:])
        key = (data, eqn.primitive.name, str(eqn.params), output, *indices)
        if key not in self._parts:
            self._parts[key] = self.flow.add(_PART, [data], self._caller)
        return self._parts[key]

    def _opaque_with_sites(self, eqn: JaxprEqn, operands: list[int], address: Address) -> int:
        """An opaque equation with sites: inputs of its jaxprs may be any operand, its results any of their results."""
        name, caller = eqn.primitive.name, self._caller
        value = self.flow.combine(name, operands, caller)
        results = [value]
        for number, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
            inputs = len(jaxprs.open_jaxpr(sub.jaxpr).invars)
            results += self.run(sub.jaxpr, [value] * inputs, (*address, number))
        return self.flow.combine(name, results, caller)

    def _write(self, reference: int, values: Sequence[int]) -> None:
        if reference >= 0:
            self.flow.inputs[reference] += [v for v in values if v >= 0 and v != reference]
            self.flow.written.add(reference)
            if PARAMETER in values:
                self.flow.learned.add(reference)

    # ---- containers

    def call(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        """A container whose first jaxpr takes its operands."""
        params = eqn.params
        body = params.get("jaxpr") or params.get("call_jaxpr") or jaxprs.sub_jaxprs(eqn)[0].jaxpr
        opened, inside, count = jaxprs.open_jaxpr(body), (*address, 0), len(eqn.outvars)
        if len(opened.eqns) == 1 and inside not in self._sites:
            (inner,) = opened.eqns
            enter = _CONTAINERS.get(inner.primitive.name)
            if enter is not None and inner.invars == opened.invars and inner.outvars == opened.outvars:
                self._caller = (inner, self._caller)  # it only wraps another container, as in relu
                operands = operands[len(operands) - len(inner.invars) :]
                return enter(self, inner, operands, (*inside, 0))[:count]
        return self.run(opened, operands, inside)[:count]

    def cond(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        branches = [
            self.run(branch, operands[1:], (*address, number))
            for number, branch in enumerate(eqn.params["branches"])
        ]
        return [self._join(values) for values in zip(*branches, strict=True)]

    def _join(self, values: Sequence[int]) -> int:
        distinct = set(values)
        return values[0] if len(distinct) == 1 else self.flow.combine("cond", distinct, self._caller)

    def scan(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        parts = SCAN.parts(eqn, operands)
        (sub,) = jaxprs.sub_jaxprs(eqn)
        return self._loop(eqn, sub.jaxpr, (parts.consts, parts.carry, parts.xs), address, (*address, 0))

    def while_loop(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        start, count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        parts = operands[start : start + count], operands[start + count :], ()
        params = [sub.param for sub in jaxprs.sub_jaxprs(eqn)]
        test, body = params.index("cond_jaxpr"), params.index("body_jaxpr")
        results = self._loop(eqn, eqn.params["body_jaxpr"], parts, address, (*address, body))
        self.run(eqn.params["cond_jaxpr"], [*operands[:start], *results], (*address, test))
        return results

    def _loop(
        self, eqn: JaxprEqn, body: AnyJaxpr, parts: Sequence[Sequence[int]], address: Address, inside: Address
    ) -> Sequence[int]:
        consts, init, xs = parts
        opened = jaxprs.open_jaxpr(body)
        loop = LoopBody(
            len(self.flow.operations),
            is_reverse=bool(eqn.params.get("reverse")),
            is_over_data=max(xs, default=CONSTANT) >= 0,
        )
        carry = [
            value
            if opened.outvars[number] is opened.invars[len(consts) + number]
            else self.flow.add(CARRY, [value], self._caller)
            for number, value in enumerate(init)
        ]
        results = self.run(body, [*consts, *carry, *xs], inside)
        for node, first, result in zip(carry, init, results, strict=False):
            if node != first and result >= 0:
                self.flow.inputs[node].append(result)
                loop.carries.append((node, result))
        loop.last = len(self.flow.operations) - 1
        self.flow.loops[address] = loop
        return [*carry, *results[len(carry) :]]

    def pallas(self, eqn: JaxprEqn, operands: list[int], address: Address) -> Sequence[int]:
        """A kernel reads its operands and writes its results through references."""
        active = [o for o in operands if o >= 0]
        if len(active) > _MAX_SEEN and address not in self._with_sites:
            node = self.flow.add("pallas_call", operands, self._caller)
            self.flow.opaque[node] = tuple(operands)
            return [node] * len(eqn.outvars)
        (sub, *_) = jaxprs.sub_jaxprs(eqn)
        count = len(jaxprs.open_jaxpr(sub.jaxpr).invars)
        written = [self.flow.add("reference", call=self._caller) for _ in range(count - len(operands))]
        self.run(sub.jaxpr, [*operands, *written][:count], (*address, 0))
        missing = [self.flow.add("pallas_call", operands, self._caller)] * len(eqn.outvars)
        return [*written, *missing][: len(eqn.outvars)]


_CONTAINERS: dict[str, Callable[[_Builder, JaxprEqn, list[int], Address], Sequence[int]]] = {
    **dict.fromkeys([*CONTAINERS, *OPAQUE], _Builder.call),
    "cond": _Builder.cond,
    "scan": _Builder.scan,
    "while": _Builder.while_loop,
    "pallas_call": _Builder.pallas,
}
