"""Bytes that a compiled step moves to keep saved activations in stacks of all layers.

This is a constant of docs/explanation/speed.md.

    policyc compile te_nvfp4 --config llama3_8b --target gb200 --devices 8 --backend te --dump-hlo DIR
    python -m benchmarks.stack_traffic DIR/*.hlo.txt [--layers 32]

JAX fills a stack with zeros, or XLA copies the zeros of another stack. Layers are copied into the stack, and some are
copied out again. Passes are the bytes of these kernels, as multiples of the size of the stacks. Stacks that kernels
write in place, without copies of layers, are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from benchmarks.command_line import make_parser, print_header, print_row
from policyc.hardware import hlo

KINDS = ("fills", "copies of zeros", "layers copied in", "layers copied out")
_LEAST_SHARE = 0.1
"""Element types with a smaller share of the stacks are not printed: they are sums of gradients and statistics."""


def stack_kernel(execution: hlo.Execution, layers: int) -> tuple[str, str] | None:
    """The element type of the stack that a kernel fills, copies or slices, and which of `KINDS` it is."""
    instruction = execution.instruction
    stack = re.search(rf"(\w+)\[(?:\d+,)*{layers}(?:,\d+)*\]", instruction.shape)
    if stack is None or not execution.is_kernel:
        return None
    name = instruction.op_name
    if "dynamic_update_index_in_dim" in name:
        return stack[1], "layers copied in"
    if "dynamic_index_in_dim" in name:
        return stack[1], "layers copied out"
    if instruction.opcode == "copy":
        return stack[1], "copies of zeros"
    is_fill = instruction.opcode in hlo.FUSIONS and not execution.bytes_read
    return (stack[1], "fills") if is_fill else None


def count_bytes(module: hlo.Module, layers: int) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Bytes moved by element type and kind, and the bytes of the stacks that layers are copied into."""
    moved: Counter[tuple[str, str]] = Counter()
    stacks: Counter[str] = Counter()
    for execution in module.executions:
        kernel = stack_kernel(execution, layers)
        if kernel is None:
            continue
        moved[kernel] += execution.times * (execution.bytes_read + execution.bytes_written)
        if kernel[1] == "layers copied in":
            stacks[kernel[0]] += execution.times * execution.bytes_written
    return moved, stacks


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("hlo", type=Path, nargs="+", help="optimized HLO")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (default: 32)")
    options = parser.parse_args()
    titles = ("step", "type", "stacks", *KINDS, "passes")
    print_header(titles)
    for path in options.hlo:
        moved, stacks = count_bytes(hlo.parse_module(path.read_text()), options.layers)
        for element_type, size in stacks.most_common():
            if size < _LEAST_SHARE * stacks.total():
                continue
            amounts = [moved[element_type, kind] for kind in KINDS]
            cells = [path.name.removesuffix(".hlo.txt"), element_type]
            cells += [f"{amount / 1e12:.2f} TB" for amount in (size, *amounts)]
            print_row([*cells, f"{sum(amounts) / size:.1f}"])


if __name__ == "__main__":
    main()
