"""The collectives of a compiled program: what they move in which type, and which kernels read it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from policyc.compiler.planning.plan import Plan
from policyc.hardware import hlo
from policyc.language.recipes import Gemm

_MOVES = frozenset({
    "bitcast", "reshape", "copy", "transpose", "convert", "slice", "dynamic-slice", "concatenate", "pad", "broadcast",
    "opt-barrier", "bitcast-convert", "reverse", *hlo.COLLECTIVES,
})  # fmt: skip
"""Opcodes whose readers are looked for instead of them: they move an array, or cast it."""

_PRODUCT = re.compile(r"(?:^|[/(:])((?:fprop|dgrad|wgrad)\.\d+)(?=[/):]|$)")
GEMMS, QUANTIZERS, OTHERS = "GEMMs", "quantizers", "others"
_WIDE = ("bf16", "f16", "f32")
_LEAST_BYTES = 1024
"""A gathered operand has more. Maxima, scales and keys, which quantizers read too, have fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """The arrays of one element type that collectives of one kind move in a step, and that the same kernels read.

    `bytes` are those of a device. `readers` are the kinds of kernels that read the arrays: quantizers, GEMMs, others;
    `products` are the quantized products that they belong to, as selectors: `layers.mlp.up_proj @ fprop`.
    """

    kind: str
    type: str
    count: int
    bytes: int
    readers: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def is_quantized_later(self) -> bool:
        """Whether values of 16 or more bits are gathered that only quantizers read."""
        return (
            self.kind == "all-gather"
            and self.type in _WIDE
            and tuple(self.readers) == (QUANTIZERS,)
            and self.bytes >= _LEAST_BYTES * self.count
        )


def total_collectives(module: hlo.Module, plans: Iterable[Plan] = ()) -> Iterator[CollectiveTotal]:
    """Yields the arrays that the collectives of a program move, the most bytes first. `plans` are those of its losses.

    An array counts with its larger side: as a whole, before it is scattered or after it is gathered.
    """
    labels = {
        f"{gemm}.{site.id}": f"{site.name} @ {gemm}" for plan in plans for site in plan.sites for gemm in Gemm
    }
    readers = _Readers(module)
    counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    products: dict[tuple[str, str, tuple[str, ...]], dict[str, None]] = {}
    for execution in module.executions:
        instruction = execution.instruction
        kind = instruction.opcode.removesuffix("-start")
        if kind not in hlo.COLLECTIVES:
            continue
        computation = module.computations[execution.computation]
        operands = [computation[name].shape for name in instruction.operands if name in computation]
        before = [array for shape in operands for array in hlo.shape_arrays(shape)]
        after = hlo.shape_arrays(instruction.shape)
        # The shape of most -start instructions has the operands first.
        after = after[len(before) :] if len(after) >= 2 * len(before) else after
        for number, ((element_type, elements), (_, results)) in enumerate(zip(before, after, strict=False)):
            index = number if len(before) > 1 else None
            found = readers.find(execution.computation, instruction.name, index)
            key = kind, element_type, tuple(sorted({reader for reader, _ in found}))
            counts[key] += execution.times
            sizes[key] += execution.times * -(-max(elements, results) * hlo.element_bits(element_type) // 8)
            names = (labels[product] for _, product in sorted(found) if product in labels)
            products.setdefault(key, {}).update(dict.fromkeys(names))
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        kind, element_type, kinds = key
        yield CollectiveTotal(
            kind=kind,
            type=element_type,
            count=counts[key],
            bytes=size,
            readers=kinds,
            products=tuple(products[key]),
        )


_Value = tuple[str, str, int | None]
"""A computation, an instruction in it, and the element of its result if that is a tuple."""


@dataclass(frozen=True)
class _Readers:
    """Follows arrays forward, through moves, fusions and loops, to the instructions that compute with them."""

    module: hlo.Module
    _users: dict[str, Mapping[str, list[hlo.Instruction]]] = field(default_factory=dict)

    @cached_property
    def _callers(self) -> Mapping[str, list[tuple[str, hlo.Instruction]]]:
        callers: dict[str, list[tuple[str, hlo.Instruction]]] = {}
        for name, computation in self.module.computations.items():
            for instruction in computation.values():
                for called in (*instruction.called, *instruction.branches):
                    callers.setdefault(called, []).append((name, instruction))
        return callers

    def find(self, computation: str, name: str, index: int | None) -> set[tuple[str, str]]:
        """The kinds of instructions that read an array, each with its quantized product or with an empty name."""
        found: set[tuple[str, str]] = set()
        pending: list[_Value] = [(computation, name, index)]
        seen = set(pending)
        while pending:
            value = pending.pop()
            for reached in self._step(value, found):
                if reached not in seen:
                    seen.add(reached)
                    pending.append(reached)
        return found or {(OTHERS, "")}

    def _users_of(self, computation: str, name: str) -> list[hlo.Instruction]:
        if computation not in self._users:
            users: dict[str, list[hlo.Instruction]] = {}
            for instruction in self.module.computations[computation].values():
                for operand in dict.fromkeys(instruction.operands):
                    users.setdefault(operand, []).append(instruction)
            self._users[computation] = users
        return list(self._users[computation].get(name, ()))

    def _step(self, value: _Value, found: set[tuple[str, str]]) -> Iterator[_Value]:
        """Yields where a value goes. Adds the instructions that compute with it."""
        computation, name, index = value
        if self.module.computations[computation][name].is_root:
            yield from self._leave(computation, index)
        for user in self._users_of(computation, name):
            opcode = user.opcode
            if opcode == "get-tuple-element":
                if index is None or user.tuple_index == index:
                    yield computation, user.name, None
            elif opcode.endswith(("-done", "-update")):
                yield computation, user.name, index
            elif opcode == "tuple":
                yield from ((computation, user.name, i) for i, n in enumerate(user.operands) if n == name)
            elif opcode == "while":
                yield from self._enter(user.body, 0, index)
            elif opcode == "conditional":
                branches = zip(user.branches, user.operands[1:], strict=False)
                yield from (v for b, n in branches if n == name for v in self._enter(b, 0, index))
            elif user.called and opcode in (*hlo.FUSIONS, "call", "async-start"):
                for number, operand in enumerate(user.operands):
                    if operand == name:
                        yield from self._enter(user.called[0], number, index)
            elif opcode.removesuffix("-start") in _MOVES or not (user.op_name or user.call_target):
                element = user.operands.index(name) if len(user.operands) > 1 and index is None else index
                is_tuple = user.shape.startswith("(")
                yield computation, user.name, element if is_tuple else None
            else:
                product = _PRODUCT.findall(user.op_name)
                found.add((_kind(user), product[-1] if product else ""))

    def _enter(self, computation: str, number: int, index: int | None) -> Iterator[_Value]:
        for instruction in self.module.computations.get(computation, {}).values():
            if instruction.opcode == "parameter" and int(instruction.operand_text) == number:
                yield computation, instruction.name, index

    def _leave(self, computation: str, index: int | None) -> Iterator[_Value]:
        """To the results of the instructions that call a computation, and from the body of a loop to its next trip."""
        for caller, instruction in self._callers.get(computation, ()):
            if instruction.opcode == "while":
                yield from self._enter(computation, 0, index)
            if instruction.opcode in ("while", "conditional", "call", "async-start", *hlo.FUSIONS):
                yield caller, instruction.name, index


def _kind(instruction: hlo.Instruction) -> str:
    if "_quantize)" in instruction.op_name:
        return QUANTIZERS
    is_gemm = "jit(scaled_gemm)" in instruction.op_name or instruction.opcode in ("dot", "ragged-dot")
    return GEMMS if is_gemm or instruction.call_target.startswith("__cublas$") else OTHERS
