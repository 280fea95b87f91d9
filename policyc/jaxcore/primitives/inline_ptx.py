"""Runs PTX on the registers of a Mosaic kernel: a program for one thread, written in Python on `Register`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

Constant = int | np.integer[Any]


@dataclass(slots=True)
class Program:
    """The PTX of one thread, so far. All registers have 32 bits."""

    lines: list[str] = field(default_factory=list)
    count: int = 0
    constants: dict[int, Register] = field(default_factory=dict)

    def emit(self, instruction: str, *operands: Register | Constant) -> Register:
        """Appends an instruction: a mnemonic, or a template with `{0}` for its result and `{1}`... for its operands."""
        names = [self._register(operand).name for operand in operands]
        result = self.new_register()
        if "{0}" in instruction:
            self.lines.append(instruction.format(result.name, *names))
        else:
            self.lines.append(f"{instruction} {', '.join([result.name, *names])};")
        return result

    def _register(self, operand: Register | Constant) -> Register:
        if isinstance(operand, Register):
            return operand
        bits = int(operand) & 0xFFFFFFFF
        if bits not in self.constants:
            self.constants[bits] = self.new_register()
            self.lines.append(f"mov.b32 {self.constants[bits].name}, {bits:#x};")
        return self.constants[bits]

    def new_register(self) -> Register:
        self.count += 1
        return Register(self, f"r{self.count}")

    def text(self, inputs: int, results: Sequence[Register]) -> str:
        """Inline assembly. Its operands are the results, then the inputs, which are the first registers."""
        stores = [f"mov.b32 ${i}, {self._register(result).name};" for i, result in enumerate(results)]
        loads = [f"mov.b32 r{i + 1}, ${len(results) + i};" for i in range(inputs)]
        declaration = f".reg .b32 r<{self.count + 1}>;"
        return "\n".join(["{", declaration, *loads, *self.lines, *stores, "}"])


@dataclass(frozen=True, slots=True, eq=False)
class Register:
    """A 32-bit register. Its operators are those of unsigned integers."""

    program: Program
    name: str

    def __add__(self, other: Register | Constant) -> Register:
        return self.program.emit("add.u32", self, other)

    def __sub__(self, other: Register | Constant) -> Register:
        return self.program.emit("sub.u32", self, other)

    def __mul__(self, other: Register | Constant) -> Register:
        return self.program.emit("mul.lo.u32", self, other)

    def __and__(self, other: Register | Constant) -> Register:
        return self.program.emit("and.b32", self, other)

    def __or__(self, other: Register | Constant) -> Register:
        return self.program.emit("or.b32", self, other)

    def __xor__(self, other: Register | Constant) -> Register:
        return self.program.emit("xor.b32", self, other)

    def __lshift__(self, bits: Constant) -> Register:
        return self.program.emit("shl.b32", self, bits)

    def __rshift__(self, bits: Constant) -> Register:
        return self.program.emit("shr.u32", self, bits)


ThreadFunction = Callable[..., Sequence[Sequence[Any]]]
"""Takes the words that a thread holds of each input (a list, or a word if the input is a scalar), and returns the words
that it holds of each result."""


def run_on_registers(
    function: ThreadFunction,
    inputs: Sequence[Any],
    layouts: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]],
) -> Sequence[Any]:
    """Applies a function to the words of each thread, in a Mosaic kernel.

    Args:
      inputs: uint32 arrays and scalars.
      layouts: the layout of each array, None for a scalar.
      results: the shape and the layout of each result, uint32; the layout of a scalar is None.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    splat = plgpu.Layout.WG_SPLAT(())
    types = [plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=layout or splat) for shape, layout in results]

    def run(_: Any, *arrays: Any) -> tuple[Any, ...]:
        return tuple(_emit(function, arrays, types))

    kinds = tuple(layout or splat for layout in layouts)
    inline: Any = plgpu.inline_mgpu(arg_types=kinds, return_type=tuple(types))
    outputs: Sequence[Any] = inline(run)(*inputs)
    return outputs


def _emit(function: ThreadFunction, arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Applies the function to each register of the arrays in turn. All have the same number of registers."""
    from jax.experimental.mosaic.gpu import FragmentedArray

    registers = [array.registers.ravel() for array in arrays]
    layouts = [kind.layout.to_mgpu() for kind in types]
    shapes = [layout.registers_shape(kind.shape) for kind, layout in zip(types, layouts, strict=True)]
    # A thread may have several registers of an array where it has one of another.
    sizes = [r.size for r, array in zip(registers, arrays, strict=True) if array.shape]
    sizes += [prod(shape) for kind, shape in zip(types, shapes, strict=True) if kind.shape]
    count = min(sizes, default=1)

    def part(r: Any, i: int) -> list[Any]:
        return list(r[i * (r.size // count) : (i + 1) * (r.size // count)]) if r.size >= count else list(r)

    counts = [prod(s) // count if kind.shape else 0 for s, kind in zip(shapes, types, strict=True)]
    outputs = [_emit_once(function, [part(r, i) for r in registers], counts) for i in range(count)]
    results = []
    for layout, shape, parts in zip(layouts, shapes, zip(*outputs, strict=True), strict=True):
        array = np.empty(prod(shape), dtype=object)
        array[:] = [register for part in parts for register in part]
        results.append(FragmentedArray(_registers=array.reshape(shape), _layout=layout, _is_signed=False))
    return results


def _emit_once(
    function: ThreadFunction, inputs: Sequence[Sequence[Any]], counts: Sequence[int]
) -> list[list[Any]]:
    """The registers of each result, from those of each input: vectors of words, or a scalar.

    `counts` has the number of vectors of each result, 0 for a scalar.
    """
    ir, llvm, vector = _mlir()
    i32 = ir.IntegerType.get_signless(32)
    program = Program()
    operands: list[Any] = []
    arguments: list[Any] = []
    for registers in inputs:
        words = [word for register in registers for word in _split(register)]
        own = [program.new_register() for _ in words]
        arguments.append(own if isinstance(registers[0].type, ir.VectorType) else own[0])
        operands += words
    outputs = function(*arguments)
    results = [word for words in outputs for word in words]
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * len(results)) if len(results) > 1 else i32,
        operands,
        program.text(len(operands), results),
        ",".join(["=r"] * len(results) + ["r"] * len(operands)),
        has_side_effects=False,
    )
    values: list[Any] = [struct]
    if len(results) > 1:
        values = [llvm.extractvalue(i32, struct, [i]) for i in range(len(results))]
    joined, start = [], 0
    for result, count in zip(outputs, counts, strict=True):
        own = values[start : start + len(result)]
        start += len(result)
        if count:
            length = len(own) // count
            kind = ir.VectorType.get((length,), i32)
            own = [vector.from_elements(kind, own[i : i + length]) for i in range(0, len(own), length)]
        joined.append(own)
    return joined


def _split(register: Any) -> list[Any]:
    """The words of a register."""
    ir, _, vector = _mlir()
    if not isinstance(register.type, ir.VectorType):
        return [register]
    (length,) = register.type.shape
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(length)]


def _mlir() -> tuple[Any, Any, Any]:
    """MLIR's module of types, and the dialects `llvm` and `vector`. Imported here, as only kernels need them."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    return ir, llvm, vector
