"""Reads the text of optimized HLO modules: which instructions run, how often, and how many bytes they read and write.

Instructions inside a fusion do not run by themselves: the fusion is the kernel. A custom call inside one is the kernel
that the fusion runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

_BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of the element types whose names do not contain them."""

_NO_KERNEL = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "while", "call", "conditional",
})  # fmt: skip
"""Opcodes that launch no kernel. Neither do those that end in -done or -update: their -start does."""

FUSIONS = ("fusion", "fusion-start")
_SLICES = ("dynamic-slice", "slice")
_UPDATE = "dynamic-update-slice"
_LAYOUT_ONLY = ("bitcast", "reshape", "transpose")
"""Opcodes that, inside a fusion, change how an array is indexed and read nothing."""

_LIBRARY_CALLS = ("__cublas$", "__cudnn$", "te_", "CuteDSLRT_")
"""Calls of cuBLAS, cuDNN, Transformer Engine and cuDNN's kernels in Python. If the last of their results is an array of
bytes, it is scratch."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALL_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BODY = re.compile(r"body=%([\w.\-]+)")
_INDEX = re.compile(r"(?:^|, )index=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_computation)=%([\w.\-]+)")
_WORKSPACE = re.compile(r"[su]8\[\d+\](?=(?:\{[^}]*\})?\)$)")
_REMATERIALIZED = re.compile(r"\.remat[\d.]*$")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|true_computation=%([\w.\-]+), false_computation=%([\w.\-]+))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operand_text), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    operand_text: str
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return shape_bytes(self.shape)

    @property
    def op_name(self) -> str:
        """The JAX name stack that the instruction comes from."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def call_target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        match = _CALL_TARGET.search(self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that the instruction calls."""
        return tuple(_CALLED.findall(self.attributes))

    @property
    def body(self) -> str:
        """The computation of a trip of a loop."""
        return next(_BODY.finditer(self.attributes))[1]

    @property
    def tuple_index(self) -> int:
        """The element that a get-tuple-element takes."""
        return int(next(_INDEX.finditer(self.attributes))[1])

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        match = _BRANCHES.search(self.attributes)
        if match is None:
            return ()
        return tuple(_NAME.findall(match[1])) if match[1] else (match[2], match[3])

    @property
    def trip_count(self) -> int | None:
        """The trip count of a loop; None if it is not known."""
        match = _TRIP_COUNT.search(self.attributes)
        return int(match[1]) if match else None


Computation = Mapping[str, Instruction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An instruction that runs: how often per step, and the bytes that it reads and writes each time.

    `fusion` is the fusion around a custom call, which reads or writes parts of larger arrays.
    """

    instruction: Instruction
    times: int
    bytes_read: int
    bytes_written: int
    computation: str
    fusion: Instruction | None = None

    @property
    def is_kernel(self) -> bool:
        opcode = self.instruction.opcode
        return opcode not in _NO_KERNEL and not opcode.endswith(("-done", "-update"))


@dataclass(frozen=True)
class Module:
    """The computations of a module by name, and the name of the entry computation."""

    computations: Mapping[str, Computation]
    entry: str

    @cached_property
    def executions(self) -> tuple[Execution, ...]:
        """Everything that runs, in order. The body of a loop counts once if its trip count is not known."""
        return tuple(self._execute(self.entry, 1))

    def _execute(self, name: str, times: int) -> Iterator[Execution]:
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.opcode == "while":
                yield from self._execute(instruction.body, times * (instruction.trip_count or 1))
            elif instruction.opcode == "call" or (instruction.opcode == "async-start" and instruction.called):
                yield from self._execute(instruction.called[0], times)
            elif instruction.opcode == "conditional":
                for branch in instruction.branches:
                    yield from self._execute(branch, times)
            else:
                call = self._fused_call(instruction)
                read, written = self._count_bytes(instruction, call, computation)
                yield Execution(
                    instruction=call or instruction,
                    times=times,
                    bytes_read=read,
                    bytes_written=written,
                    computation=name,
                    fusion=instruction if call else None,
                )

    def _fused_call(self, fusion: Instruction) -> Instruction | None:
        """The custom call in a fusion, which only slices operands: the call reads them from a stack without a copy."""
        if fusion.opcode not in FUSIONS or not fusion.called:
            return None
        body = self.computations.get(fusion.called[0], {})
        return next((i for i in body.values() if i.opcode == "custom-call"), None)

    def fused_updates(self, execution: Execution) -> tuple[int, ...]:
        """The bytes of each result that a custom call in a fusion writes into a part of a larger array."""
        body = self.computations[execution.fusion.called[0]] if execution.fusion else {}
        return tuple(body[i.operands[1]].bytes for i in body.values() if i.opcode == _UPDATE)

    def whole_operands(self, execution: Execution) -> frozenset[str]:
        """The names of the arrays that an instruction, or a custom call in a fusion, reads as a whole.

        An array that XLA rematerializes has the name of the original.
        """
        names = list(execution.instruction.operands)
        if execution.fusion is not None:
            body = self.computations[execution.fusion.called[0]]
            parameters = [body[name] for name in names if body[name].opcode == "parameter"]
            names = [execution.fusion.operands[int(p.operand_text)] for p in parameters]
        computation = self.computations[execution.computation]
        return frozenset(_REMATERIALIZED.sub("", _skip_bitcasts(computation, name)) for name in names)

    def _count_bytes(
        self, instruction: Instruction, call: Instruction | None, computation: Computation
    ) -> tuple[int, int]:
        """Counts the bytes read and written. If only slices of an array are touched, only the slices count.

        `call` is the custom call of a fusion. Workspaces do not count: their traffic is unknown.
        """
        operands = [computation[name] for name in instruction.operands if name in computation]
        result_shape = _result_shape(instruction)
        written = shape_bytes(result_shape)
        workspace = _find_workspace(call or instruction)
        if workspace and workspace in result_shape:
            written -= shape_bytes(workspace)
        if instruction.opcode in _SLICES:
            return written, written
        if instruction.opcode == _UPDATE:
            return operands[1].bytes, operands[1].bytes
        if instruction.opcode in FUSIONS and instruction.called:
            body = self.computations.get(instruction.called[0])
            if body is not None:
                return _count_fusion_bytes(body, operands, written)
        return sum(o.bytes for o in operands), written


def _skip_bitcasts(computation: Computation, name: str) -> str:
    """Follows bitcasts back to the name of the original array."""
    while name in computation and computation[name].opcode == "bitcast":
        name = computation[name].operands[0]
    return name


def _count_fusion_bytes(body: Computation, operands: list[Instruction], written: int) -> tuple[int, int]:
    """Counts the bytes that a fusion reads and writes. `written` are the bytes of its results as a whole."""
    parameters = {int(i.operand_text): i for i in body.values() if i.opcode == "parameter"}
    read = 0
    for number, operand in enumerate(operands):
        slices = _find_slices(body, parameters[number].name) if number in parameters else None
        if not slices:
            read += operand.bytes
            continue
        for user in slices:
            if user.opcode in _SLICES:
                # Count the elements of the slice in the element type of the operand.
                ((_, count),), ((element_type, _),) = shape_arrays(user.shape), shape_arrays(operand.shape)
                read += -(-count * element_bits(element_type) // 8)
            else:
                # An update in place writes the slice, not the whole array.
                written += body[user.operands[1]].bytes - user.bytes
    return read, written


def _result_shape(instruction: Instruction) -> str:
    """The shape of what an instruction writes. The shape of a -start instruction begins with its operands."""
    if not instruction.opcode.endswith("-start") or not instruction.shape.startswith("("):
        return instruction.shape
    depth = 0
    for index, character in enumerate(instruction.shape):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 1:
            return instruction.shape[index:]
    return ""


def _find_workspace(call: Instruction) -> str:
    """The shape of the scratch memory that a library call gets as its last result; empty if it gets none."""
    match = _WORKSPACE.search(call.shape) if call.call_target.startswith(_LIBRARY_CALLS) else None
    return match[0] if match else ""


def _find_slices(body: Computation, name: str) -> list[Instruction] | None:
    """Returns the users of an array if all of them take or update slices of it; else None."""
    slices: list[Instruction] = []
    for user in body.values():
        if name not in user.operands:
            continue
        if (user.opcode in _SLICES and user.operands[0] == name) or _updates_in_place(body, user, name):
            slices.append(user)
        elif user.opcode in _LAYOUT_ONLY:
            slices_of_view = _find_slices(body, user.name)
            if slices_of_view is None:
                return None
            slices += slices_of_view
        else:
            return None
    return slices


def _updates_in_place(body: Computation, instruction: Instruction, name: str) -> bool:
    """Whether an instruction only writes a slice of an array that is a result of the fusion, and reads none of it."""
    return (
        instruction.opcode == _UPDATE
        and instruction.operands[0] == name
        and name not in instruction.operands[1:]
        and _is_result(body, instruction.name)
    )


def _is_result(body: Computation, name: str) -> bool:
    """Whether an array is only a result of a fusion: nothing inside the fusion reads its elements."""
    return all(
        user.opcode == "tuple" or (user.opcode in _LAYOUT_ONLY and _is_result(body, user.name))
        for user in body.values()
        if name in user.operands
    )


# ---- parsing


def parse_module(text: str) -> Module:
    """Parses the text of a compiled module. Raises ValueError if it has no entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    computation: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line) if line and not line[0].isspace() else None
        if head:
            computation = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line == "}":
            computation = None
        elif computation is not None:
            match = _INSTRUCTION.match(line)
            if match:
                computation[match[2]] = _parse_instruction(match[2], match[3], is_root=bool(match[1]))
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no entry computation")
    return Module(computations, entry)


def _parse_instruction(name: str, text: str, *, is_root: bool) -> Instruction:
    end = _closing_parenthesis(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing_parenthesis(rest, len(opcode))
    operand_text = rest[len(opcode) + 1 : close]
    return Instruction(
        name=name,
        shape=shape,
        opcode=opcode,
        operands=tuple(_NAME.findall(operand_text)),
        operand_text=operand_text,
        attributes=rest[close + 1 :],
        is_root=is_root,
    )


def _closing_parenthesis(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(-(-count * element_bits(element_type) // 8) for element_type, count in shape_arrays(shape))


def shape_arrays(shape: str) -> list[tuple[str, int]]:
    """The element type and the number of elements of each array in a shape."""
    return [
        (element_type, prod(int(n) for n in dimensions.split(",") if n))
        for element_type, dimensions in _ARRAY.findall(shape)
    ]


def element_bits(element_type: str) -> int:
    """Bits of an element."""
    if element_type in _BITS:
        return _BITS[element_type]
    match = re.match(r"[a-z]+(\d+)", element_type)
    return int(match[1]) if match else 0
