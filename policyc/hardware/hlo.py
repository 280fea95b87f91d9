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
    "opt-barrier", "add-dependency", "while", "call", "conditional",
})  # fmt: skip
"""What takes no kernel of its own; so does what ends in -done or -update, which was started before."""

_FUSIONS = ("fusion", "fusion-start")
_IN_PLACE = ("bitcast", "reshape", "transpose")
"""What only says of an array how it is looked at, inside a fusion."""

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
        opcode = self.instruction.opcode
        return opcode not in _FREE and not opcode.endswith(("-done", "-update"))


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
        """Bytes read and written. Of an array of which only slices are touched, those of the slices."""
        operands = [inside[o] for o in each.operands if o in inside]
        written = size(_results(each))
        if each.opcode == "dynamic-slice":
            return written, written
        if each.opcode == "dynamic-update-slice":
            return operands[1].bytes, operands[1].bytes
        body = self.computations.get(each.called[0]) if each.opcode in _FUSIONS and each.called else None
        if body is None:
            return sum(o.bytes for o in operands), written
        parameters = {int(i.given): i for i in body.values() if i.opcode == "parameter"}
        read = 0
        for at, operand in enumerate(operands):
            slices = _slices(body, parameters[at].name) if at in parameters else None
            if not slices:
                read += operand.bytes
                continue
            for one in slices:
                if one.opcode == "dynamic-slice":
                    ((_, count),), ((kind, _),) = arrays(one.shape), arrays(operand.shape)
                    read += -(-count * width(kind) // 8)
                else:
                    written += body[one.operands[1]].bytes - one.bytes
        return read, written


def _results(each: Instruction) -> str:
    """The shape of what an instruction writes. The shape of a start has its operands first."""
    if not each.opcode.endswith("-start") or not each.shape.startswith("("):
        return each.shape
    depth = 0
    for at, letter in enumerate(each.shape):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 1:
            return each.shape[at:]
    return ""


def _slices(body: Mapping[str, Instruction], name: str) -> list[Instruction] | None:
    """All that is done with an array, where it is nothing but slicing and updating slices; else None."""
    found: list[Instruction] = []
    for user in body.values():
        if name not in user.operands:
            continue
        if (user.opcode == "dynamic-slice" and user.operands[0] == name) or _updates(user, name):
            found.append(user)
        elif user.opcode in _IN_PLACE:
            inner = _slices(body, user.name)
            if inner is None:
                return None
            found += inner
        else:
            return None
    return found


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
    return sum(-(-count * width(kind) // 8) for kind, count in arrays(shape))


def arrays(shape: str) -> list[tuple[str, int]]:
    """The type of each array of a tuple, and how many numbers it has."""
    return [(kind, prod(int(n) for n in dims.split(",") if n)) for kind, dims in _SHAPE.findall(shape)]


def width(kind: str) -> int:
    """Bits of an element."""
    if kind in _BITS:
        return _BITS[kind]
    found = re.match(r"[a-z]+(\d+)", kind)
    return int(found[1]) if found else 0
