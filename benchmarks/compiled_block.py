"""Kernels and bytes of one block of Llama 3 8B, forward and backward, compiled for a GPU that need not be present.

    python -m benchmarks.compiled_block [--target gb200] [--json out.json] [POLICY ...]

Needs the extras cuda13 and train, and no GPU. Takes under a minute per policy. The block runs 16384 tokens on one
device, without rematerialization, and the vocabulary is cut to 256. Bytes are those that kernels read and write,
according to the optimized HLO.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import make_parser
from policyc.hardware import hlo

if TYPE_CHECKING:
    from policyc.hardware.compile_report import CompileReport

POLICIES = ("bf16", "fp8", "llama_nvfp4", "te_nvfp4", "te_nvfp4_no_rht")
SEQUENCES, LENGTH = 2, 8192
KINDS = {
    "__cudnn$blockScaledDot": "native GEMMs",
    "__cublas$lt$matmul$f8": "native GEMMs",
    "__cublas$lt$matmul": "other GEMMs",
    "__cublas$gemm": "other GEMMs",
    "__cudnn$fmhaSoftmax": "attention",
    "__cudnn$fmhaSoftmaxBackward": "attention",
}
HADAMARD = "Hadamard products"
REST = "everything else"
SMALLEST_OPERAND = 4096 * 14336  # elements of a weight of the MLP, its smallest operand


@dataclass(frozen=True)
class KernelTotal:
    """The number of kernels of one kind, and the bytes that they read and write."""

    kernels: int
    read: int
    written: int


@dataclass(frozen=True)
class Block:
    """The kernels of a block by kind.

    `wide` lists arrays as large as an operand, in fp32 or integers, that are not results of a GEMM. The gradients of
    weights are not listed: they are results of the step, and fp32 like the weights.
    """

    kinds: dict[str, KernelTotal]
    wide: tuple[str, ...]


def compile_block(policy: str, target: str) -> CompileReport:
    """Compiles one block between an embedding and a head of 256 tokens, with the loss and its gradient."""
    import jax

    from policyc.compiler import pipeline
    from policyc.compiler.matching.execution import execution_options
    from policyc.hardware import deviceless, llama_step
    from policyc.models.llama import model as llama
    from policyc.models.llama.configs import find_config

    execution = execution_options(target=target)
    assert execution.target is not None
    (device,) = deviceless.make_devices(execution.target, 1)
    config, _ = find_config("llama3_8b")
    # The block keeps all other sizes of the model.
    model = replace(config, layers=1, scan=False, vocab=256, remat="none", loss_chunks=1, attention="cudnn")

    def loss(params: Any, batch: Any) -> Any:
        return llama.loss(params, batch, model)[0]

    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = llama_step.abstract_arguments(model, SEQUENCES, LENGTH)
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    gradient = jax.jit(jax.grad(loss))
    return deviceless.compile_step(gradient, arguments, pipeline.as_policy(policy), execution, devices=1)


def read_block(text: str) -> Block:
    """Finds the kernels of the block in a compiled program."""
    kernels = [
        e for e in hlo.parse_module(text).executions if e.is_kernel and "layers" in e.instruction.op_name
    ]
    totals: dict[str, KernelTotal] = {}
    for kernel in kernels:
        kind = kernel_kind(kernel)
        total = totals.get(kind, KernelTotal(0, 0, 0))
        totals[kind] = KernelTotal(
            total.kernels + 1, total.read + kernel.bytes_read, total.written + kernel.bytes_written
        )
    wide = tuple(array for kernel in kernels if kernel_kind(kernel) == REST for array in wide_arrays(kernel))
    return Block(totals, wide)


def kernel_kind(kernel: hlo.Execution) -> str:
    kind = KINDS.get(kernel.instruction.call_target, REST)
    if kind == "other GEMMs" and "_quantize)" in kernel.instruction.op_name:
        return HADAMARD  # a product inside a quantizer
    return kind


def wide_arrays(kernel: hlo.Execution) -> Iterator[str]:
    """Yields the results with at least as many elements as the smallest operand, in types that no operand has."""
    op_name = kernel.instruction.op_name
    if re.search(r"transpose\(.*_proj/convert_element_type$", op_name):
        return  # the gradient of a weight
    if op_name.endswith("/or") and kernel.bytes_written < kernel.bytes_read:
        return  # four codes packed into a word: fewer bytes written than read, unlike a wide array
    for element_type, count in hlo.shape_arrays(kernel.instruction.shape):
        if element_type in ("f32", "u32", "s32", "u64", "s64") and count >= SMALLEST_OPERAND:
            yield f"{count} x {element_type}: {op_name}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "policies", nargs="*", metavar="POLICY", default=POLICIES, help="default: five of them"
    )
    parser.add_argument("--target", default="gb200", help="the GPU (default: gb200)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program of the last policy here")
    options = parser.parse_args()
    blocks = {}
    print("| policy | kind | kernels | read | written |\n|---|---|---|---|---|")
    for policy in options.policies:
        text = compile_block(policy, options.target).text
        blocks[policy] = block = read_block(text)
        for kind, k in sorted(block.kinds.items()):
            print(
                f"| {policy} | {kind} | {k.kernels} | {k.read / 1e9:.2f} GB | {k.written / 1e9:.2f} GB |",
                flush=True,
            )
        for array in block.wide:
            print(f"{policy} writes {array}")
        if options.hlo:
            with open(options.hlo, "w", encoding="utf-8") as file:
                file.write(text)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({policy: asdict(block) for policy, block in blocks.items()}, file, indent=1)


if __name__ == "__main__":
    main()
