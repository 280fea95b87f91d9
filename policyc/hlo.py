"""XLA's optimized programs, read: which kernels run, how often, what they read and write.

In: the text of a compiled module. Out: its instructions, those that run with how many times a step each does. The one
trap: what is inside a fusion does not run by itself. Only the fusion is a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "while", "call", "conditional", "async-done", "async-update",
})  # fmt: skip
"""What takes no kernel of its own."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|true_computation=%([\w.\-]+), false_computation=%([\w.\-]+))"
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    given: str
    rest: str

    @property
    def bytes(self) -> int:
        return size(self.shape)

    @property
    def scope(self) -> str:
        """Where in the program it comes from: XLA's op_name."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """Of a custom call."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        return tuple(_CALLED.findall(self.rest))

    @property
    def branches(self) -> tuple[str, ...]:
        found = _BRANCHES.search(self.rest)
        if found is None:
            return ()
        return tuple(_NAME.findall(found[1])) if found[1] else (found[2], found[3])

    @property
    def trips(self) -> int | None:
        """Of a loop, where they are known."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Ran:
    """An instruction that runs: how often a step, and what it reads and writes each time."""

    instruction: Instruction
    times: int
    read: int
    written: int
    computation: str

    @property
    def is_kernel(self) -> bool:
        return self.instruction.opcode not in _FREE


@dataclass(frozen=True)
class Module:
    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str

    @cached_property
    def ran(self) -> tuple[Ran, ...]:
        """All that runs, in order. A loop whose trips are not known counts once."""
        return tuple(self._walk(self.entry, 1))

    def _walk(self, name: str, times: int) -> Iterator[Ran]:
        inside = self.computations[name]
        for each in inside.values():
            if each.opcode == "while":
                body = next(re.finditer(r"body=%([\w.\-]+)", each.rest))[1]
                yield from self._walk(body, times * (each.trips or 1))
            elif each.opcode == "call" or (each.opcode == "async-start" and each.called):
                yield from self._walk(each.called[0], times)
            elif each.opcode == "conditional":
                for branch in each.branches:
                    yield from self._walk(branch, times)
            else:
                yield Ran(each, times, *self._moved(each, inside), name)

    def _moved(self, each: Instruction, inside: Mapping[str, Instruction]) -> tuple[int, int]:
        """Bytes read and written. Of an array of which only a slice is touched, that of the slice."""
        operands = [inside[o] for o in each.operands if o in inside]
        if each.opcode == "dynamic-slice":
            return each.bytes, each.bytes
        if each.opcode == "dynamic-update-slice":
            return operands[1].bytes, operands[1].bytes
        body = self.computations.get(each.called[0]) if each.opcode == "fusion" and each.called else None
        if body is None:
            return sum(o.bytes for o in operands), each.bytes
        parameters = {_number(i): i for i in body.values() if i.opcode == "parameter"}
        read = written = 0
        for at, operand in enumerate(operands):
            users = [i for i in body.values() if at in parameters and parameters[at].name in i.operands]
            slices = [
                i for i in users if i.opcode == "dynamic-slice" and i.operands[0] == parameters[at].name
            ]
            updated = [i for i in users if _updates(i, parameters[at].name)]
            if users and len(slices) + len(updated) == len(users):
                read += sum(i.bytes for i in slices)
                written += sum(body[i.operands[1]].bytes - i.bytes for i in updated)
            else:
                read += operand.bytes
        return read, each.bytes + written


def _number(parameter: Instruction) -> int:
    return int(parameter.given)


def _updates(each: Instruction, name: str) -> bool:
    return (
        each.opcode == "dynamic-update-slice" and each.operands[0] == name and name not in each.operands[1:]
    )


def read(text: str) -> Module:
    """The module of a compiled program's text."""
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        head = _HEAD.match(line) if line and not line[0].isspace() else None
        if head:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line == "}":
            current = None
        elif current is not None:
            found = _LINE.match(line)
            if found:
                one = _instruction(found[1], found[2])
                current[one.name] = one
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no entry")
    return Module(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    given = rest[len(opcode) + 1 : close]
    return Instruction(name, shape, opcode, tuple(_NAME.findall(given)), given, rest[close + 1 :])


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at a place closes."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text)


def size(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(
        -(-prod(int(n) for n in dims.split(",") if n) * width(kind) // 8)
        for kind, dims in _SHAPE.findall(shape)
    )


def width(kind: str) -> int:
    """Bits of an element."""
    if kind in _BITS:
        return _BITS[kind]
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 0
