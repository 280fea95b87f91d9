"""An interpreter of PTX, for the instructions of our kernels: shows their bits where there is no GPU.

All threads of all instances run in lockstep, so it finds no races. Approximate instructions are off by a random part of
the error that they may have. ptxas may fuse a product and a sum that are not marked as rounded; this does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.ptx_arithmetic import WIDTHS, Array, PtxError, compute

THREADS, WARP = 128, 32
_BUFFER = 1 << 40
"""The distance between the addresses of two buffers."""


@dataclass(frozen=True, slots=True)
class _Instruction:
    """An instruction, which only threads whose guard is set (or not set, if negated) execute."""

    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]


@dataclass(slots=True)
class _Memory:
    """The arguments and results of a kernel, as bytes."""

    buffers: list[Array]
    is_written: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        self.is_written = [np.zeros(buffer.size, bool) for buffer in self.buffers]

    def locate(self, address: Array, size: int) -> tuple[int, Array]:
        """The buffer and the indices of the bytes of each thread."""
        (number,) = np.unique(address // np.uint64(_BUFFER)).tolist()
        offset = (address % np.uint64(_BUFFER)).astype(np.int64)
        if np.any(offset % size) or offset.max(initial=0) + size > self.buffers[number - 1].size:
            where = f"from {offset.min()} to {offset.max()} of {self.buffers[number - 1].size}"
            raise PtxError(
                f"buffer {number - 1}: an access of {size} bytes is misaligned or out of bounds, {where}"
            )
        return number - 1, offset[:, None] + np.arange(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The PTX of a kernel, and which of its arguments and results each parameter points to."""

    text: str
    buffers: Sequence[int]


# JAX runs callbacks in threads that treat denormal numbers as zero, and a thread inherits this.
_thread = ThreadPoolExecutor(1)
_thread.submit(int).result()


def run(
    program: Program, grid: tuple[int, int], arguments: Sequence[Array], results: Sequence[Any]
) -> list[Array]:
    """Runs a kernel. Raises `PtxError` if it leaves a byte of its results unwritten.

    Args:
      grid: the instances along x and y.
      results: the shapes and dtypes of the results.
    """
    return _thread.submit(_run, program, grid, arguments, results).result()


def _run(
    program: Program, grid: tuple[int, int], arguments: Sequence[Array], results: Sequence[Any]
) -> list[Array]:
    arrays = [*arguments, *(np.zeros(r.shape, r.dtype) for r in results)]
    memory = _Memory(buffers=[np.ascontiguousarray(a).reshape(-1).view(np.uint8).copy() for a in arrays])
    with np.errstate(all="ignore"):
        _Machine(program, grid, memory).run()
    written = memory.is_written[len(arguments) :]
    for number, is_written in enumerate(written):
        if not is_written.all():
            raise PtxError(f"result {number} is not written everywhere")
    buffers = memory.buffers[len(arguments) :]
    return [b.view(r.dtype).reshape(r.shape) for b, r in zip(buffers, results, strict=True)]


def _parse(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions, and the position of each label."""
    body = text[text.index("{", text.index(".entry")) :].partition("\t.file")[0]
    body = re.sub(r"//[^\n]*|^\s*\.(loc|section|pragma)[^\n]*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"(\$L[\w$]+):", r"\1:;", body)
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        words = re.sub(r"^[\s{}]+|[\s}]+$", "", re.sub(r"\{([^{}]*%[^{}]*)\}", r"<\1>", statement))
        if words.endswith(":"):
            labels[words[:-1]] = len(instructions)
        elif words and not words.startswith("."):
            match = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?(\S+)\s*(.*)", words, re.DOTALL)
            assert match is not None, words
            negated, guard, opcode, rest = match.groups()
            operands = [w.strip() for w in re.split(r",(?![^<]*>)", rest)] if rest else []
            instructions.append(_Instruction(guard or "", bool(negated), opcode, tuple(operands)))
    return instructions, labels


class _Machine:
    """The state of all threads. A register is an array with one element per thread."""

    def __init__(self, program: Program, grid: tuple[int, int], memory: _Memory) -> None:
        text = program.text
        self.instructions, self.labels = _parse(text)
        self.memory = memory
        names = re.findall(r"\.param\b.*?(\w+)[,\n]", text[: text.index("{")])
        self.parameters = dict(zip(names, program.buffers, strict=True))
        instances = grid[0] * grid[1]
        self.count = instances * THREADS
        instance = np.repeat(np.arange(instances, dtype=np.uint32), THREADS)
        self.registers: dict[str, Array] = {
            "%tid.x": np.tile(np.arange(THREADS, dtype=np.uint32), instances),
            "%ctaid.x": instance % np.uint32(grid[0]),
            "%ctaid.y": instance // np.uint32(grid[0]),
        }
        self.instance = instance.astype(np.int64)
        self.shared = np.zeros((instances, 1 << 16), np.uint8)
        self.random = np.random.default_rng(0)

    def run(self) -> None:
        position = 0
        while (step := self.instructions[position]).opcode != "ret":
            position += 1
            active = np.ones(self.count, bool)
            if step.guard:
                active = self.registers[step.guard] != step.negated
            if step.opcode.startswith("bra"):
                if active.any() and not active.all():
                    raise PtxError("threads branch in different directions")
                if active.all():
                    position = self.labels[step.operands[0]]
            elif active.any():
                self.execute(step, active)

    def execute(self, step: _Instruction, active: Array) -> None:
        name, *parts = re.split(r"::\w+\.|\.", step.opcode)
        if name in ("bar", "fence"):
            return
        if name == "st":
            self.store(step, parts, active)
            return
        target, *sources = step.operands
        if name == "ld":
            values = self.load(parts, sources[0], active)
        elif name in ("shfl", "elect"):
            values = self.across_threads(step.opcode, sources)
        else:
            values = [compute(step.opcode, [self.read(s) for s in sources], self.random)]
        for register, value in zip(re.findall(r"[^<>,\s|]+", target), values, strict=False):
            if not active.all():
                value = np.where(active, value, self.registers.get(register, value))
            self.registers[register] = value

    # ---- operands

    def read(self, operand: str) -> Array:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            return np.full(self.count, int(operand.replace("0f", "0x", 1), 0), np.uint64)
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", operand):
            return np.full(self.count, int(operand, 0) & (1 << 64) - 1, np.uint64)
        if operand in ("true", "false"):
            return np.full(self.count, operand == "true")
        if operand.startswith(("%", "r")):
            raise PtxError(f"{operand} is read before it is written")
        return np.zeros(self.count, np.uint64)  # the start of shared memory

    def address(self, operand: str) -> Array:
        match = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand)
        assert match is not None, operand
        return self.read(match[1]).astype(np.uint64) + np.uint64(int(match[2] or 0) & (1 << 64) - 1)

    def load(self, parts: Sequence[str], source: str, active: Array) -> list[Array]:
        if parts[0] == "param":
            number = self.parameters[source.strip("[]")]
            return [np.full(self.count, (number + 1) * _BUFFER, np.uint64)]
        count, dtype = _vector(parts)
        size = count * np.dtype(dtype).itemsize
        data = np.zeros((self.count, size), np.uint8)
        address = self.address(source)[active]
        if "shared" in parts:
            offsets = address.astype(np.int64)[:, None] + np.arange(size)
            data[active] = self.shared[self.instance[active][:, None], offsets]
        else:
            number, offsets = self.memory.locate(address, size)
            data[active] = self.memory.buffers[number][offsets]
        return list(np.ascontiguousarray(data).view(dtype).T)

    def store(self, step: _Instruction, parts: Sequence[str], active: Array) -> None:
        count, dtype = _vector(parts)
        names = re.findall(r"[^<>,\s]+", step.operands[1])
        assert len(names) == count
        words = np.stack([self.read(n).astype(dtype) for n in names], axis=-1)
        data = np.ascontiguousarray(words).view(np.uint8)[active]
        address = self.address(step.operands[0])[active]
        if "shared" in parts:
            offsets = address.astype(np.int64)[:, None] + np.arange(data.shape[1])
            self.shared[self.instance[active][:, None], offsets] = data
            return
        number, offsets = self.memory.locate(address, data.shape[1])
        buffer, is_written = self.memory.buffers[number], self.memory.is_written[number]
        if np.any(is_written[offsets] & (buffer[offsets] != data)):
            raise PtxError(f"buffer {number}: a byte is written twice, with different values")
        buffer[offsets] = data
        if np.any(buffer[offsets] != data):
            raise PtxError(f"buffer {number}: two threads write different bytes to one place")
        is_written[offsets] = True

    def across_threads(self, opcode: str, sources: Sequence[str]) -> list[Array]:
        lane = np.arange(self.count) % WARP
        if opcode == "elect.sync":
            return [np.zeros(self.count, np.uint32), lane == 0]
        source = lane ^ self.read(sources[1]).astype(np.int64)
        if ".idx" in opcode:
            source = self.read(sources[1]).astype(np.int64)
        elif ".bfly" not in opcode:
            raise PtxError(f"unknown instruction {opcode}")
        return [self.read(sources[0])[np.arange(self.count) - lane + source]]


def _vector(parts: Sequence[str]) -> tuple[int, Any]:
    """The number and the type of the words of a load or store."""
    counts = [int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)]
    return (counts or [1])[0], WIDTHS[parts[-1][1:]]
