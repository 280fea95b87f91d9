"""One block of Llama 3 8B, forward and backward, as compiled for a GPU that need not be here: kernels and bytes.

    python -m benchmarks.compiled_block [--target gb200] [--json out.json] [POLICY ...]

Needs the extras cuda13 and train, and no GPU; under a minute a policy. 16384 tokens on one device, nothing
rematerialized, the vocabulary cut to 256. Bytes are what kernels read and write, from the optimized HLO.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

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


@dataclass(frozen=True)
class Kind:
    kernels: int
    read: int
    written: int


@dataclass(frozen=True)
class Block:
    """What a block runs. `wide` are arrays as large as an operand, in fp32 or integers, that no GEMM writes. Gradients
    of weights are no such arrays: they are results, and fp32 as the weights are.
    """

    kinds: dict[str, Kind]
    wide: tuple[str, ...]


def compiled(policy: str, target: str) -> Any:
    """The report of one block and what it is between: an embedding, a head of 256, the loss."""
    import jax

    from policyc.compiler import pipeline
    from policyc.hardware import deviceless, llama_step

    execution = pipeline.execution_options(target=target)
    (device,) = deviceless.devices_of(execution.target, 1)
    whole, _ = llama_step.configuration("llama3_8b")
    model = replace(
        whole, layers=1, scan=False, vocab=256, remat="none", loss_chunks=1, attention="cudnn"
    )  # the rest of a block is as it is

    def loss(params: Any, batch: Any) -> Any:
        return llama_step._module("model").loss(params, batch, model)[0]

    place = jax.sharding.SingleDeviceSharding(device)
    shapes = llama_step._shapes(model, SEQUENCES, LENGTH)
    args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes)
    return deviceless.compile_step(jax.jit(jax.grad(loss)), args, pipeline.as_policy(policy), execution, 1)


def looked_at(text: str) -> Block:
    """The kernels of a block in a compiled program, by kind."""
    from policyc.hardware import hlo

    module = hlo.read(text)
    ran = [r for r in module.ran if r.is_kernel and "layers" in r.instruction.scope]
    found: dict[str, Kind] = {}
    for one in ran:
        kind, old = _kind(one), found.get(_kind(one), Kind(0, 0, 0))
        found[kind] = Kind(old.kernels + 1, old.read + one.read, old.written + one.written)
    return Block(found, tuple(w for one in ran if _kind(one) == REST for w in _wide(one)))


def _kind(one: Any) -> str:
    kind = KINDS.get(one.instruction.target, REST)
    if kind == "other GEMMs" and "jit(run)" in one.instruction.scope:
        return HADAMARD  # a product inside a quantizer
    return kind


def _wide(one: Any) -> Iterator[str]:
    """Arrays of at least as many numbers as the smallest operand of an MLP, in types that no operand has."""
    from policyc.hardware import hlo

    smallest = 4096 * 14336
    if re.search(r"transpose\(.*_proj/convert_element_type$", one.instruction.scope):
        return
    if one.instruction.scope.endswith("/or") and one.written < one.read:
        return  # four codes to a word: fewer bytes than were read, where a wide array has more
    for kind, count in hlo.arrays(one.instruction.shape):
        if kind in ("f32", "u32", "s32", "u64", "s64") and count >= smallest:
            yield f"{count} x {kind}: {one.instruction.scope}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policies", nargs="*", metavar="POLICY", default=POLICIES)
    parser.add_argument("--target", default="gb200")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program here")
    given = parser.parse_args()
    blocks = {}
    print("| policy | kind | kernels | read | written |\n|---|---|---|---|---|")
    for policy in given.policies:
        text = compiled(policy, given.target).text
        blocks[policy] = block = looked_at(text)
        for kind, k in sorted(block.kinds.items()):
            print(
                f"| {policy} | {kind} | {k.kernels} | {k.read / 1e9:.2f} GB | {k.written / 1e9:.2f} GB |",
                flush=True,
            )
        for wide in block.wide:
            print(f"{policy} writes {wide}")
        if given.hlo:
            with open(given.hlo, "w", encoding="utf-8") as file:
                file.write(text)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({policy: asdict(block) for policy, block in blocks.items()}, file, indent=1)


if __name__ == "__main__":
    main()
