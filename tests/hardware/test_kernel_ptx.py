"""The NVFP4 kernels as PTX, run by an interpreter, against the jnp code that they replace: the same bits.

Needs the extra cuda13, and no GPU: `make test-cuda`. `tests/numerics/test_kernels_on_gpu.py` runs them on a GPU. A
process can compile kernels for one GPU only: $PTX_TARGET, which is an H200 by default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policyc.hardware import deviceless
from policyc.numerics.quantize.kernels import fused_kernels as kernels
from policyc.numerics.quantize.orders import quantize_orders
from policyc.numerics.targets import TARGETS
from tests.numerics.test_kernels import (
    PAIRS,
    TILES,
    all_codes,
    assert_decoded,
    assert_equal,
    assert_same_factors,
    normal,
    reference_quantizer,
    requests,
)
from tests.support import ptx

pytestmark = pytest.mark.cuda

CASES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "normal": lambda x: x,
    "spread": lambda x: x * jnp.exp2(jnp.arange(x.shape[-1]) % 24 - 12).astype(jnp.bfloat16),
    "zeros": lambda x: x * 0,
    "huge": lambda x: x * 1e33,
    "tiny": lambda x: x * 1e-28,
    "nan": lambda x: x.at[3, 5].set(jnp.nan),
    "infinity": lambda x: x.at[3, 5].set(jnp.inf),
}
_NAN = 0x7F
"""The code of NaN in E4M3."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Kernels are compiled for an H200, and their PTX is interpreted."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra cuda13 is not installed")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def run(self: Any, *arguments: jax.Array, interpret: bool) -> Sequence[jax.Array]:
        assert not interpret
        program = _compile(self, tuple((a.shape, a.dtype) for a in arguments), tmp_path)
        shapes = [jax.ShapeDtypeStruct(*out) for out in self.outs]

        def interpret_ptx(*arrays: Any) -> list[np.ndarray]:
            return ptx.run(program, self.grid[::-1], [np.asarray(a) for a in arrays], shapes)

        results: Sequence[jax.Array] = jax.pure_callback(interpret_ptx, shapes, *arguments)
        return results

    monkeypatch.setattr(kernels._Kernel, "run", run)


_programs: dict[Any, ptx.Program] = {}


def _compile(kernel: Any, shapes: tuple[Any, ...], folder: Path) -> ptx.Program:
    """The PTX of a kernel. XLA compiles an equal kernel only once per process."""
    key = kernel, shapes
    if key not in _programs:
        (device,) = deviceless.make_devices(TARGETS[os.environ.get("PTX_TARGET", "h200")], 1)
        sharding = jax.sharding.SingleDeviceSharding(device)
        arguments = [jax.ShapeDtypeStruct(*s, sharding=sharding) for s in shapes]
        call = jax.jit(lambda *a: kernel(*a), keep_unused=True)
        lowered = call.trace(*arguments).lower(lowering_platforms=("cuda",))
        before = set(folder.glob("*.ptx"))
        lowered.compile(compiler_options=deviceless.COMPILER_OPTIONS)
        (path,) = set(folder.glob("*.ptx")) - before
        log = path.with_suffix(".mlir-passes.log")
        _programs[key] = ptx.Program(text=path.read_text(), buffers=_buffers(log.read_text()))
        log.unlink()
    return _programs[key]


def _buffers(log: str) -> list[int]:
    """The number of the argument or result that each parameter of the kernel points to, from the code that calls it."""
    start = log.rindex("gpu.launch_func")
    match = re.search(r" args\((.*)\)", log[start : log.index("\n", start)])
    assert match is not None
    function = log[log.rindex("llvm.func", 0, start) : start]
    loads = dict(re.findall(r"(%\w+) = llvm.load (%\w+) :", function))
    offsets = dict(re.findall(r"(%\w+) = llvm.getelementptr %\w+\[(\d+)\]", function))
    return [int(offsets.get(loads[name], 0)) for name in re.findall(r"(%\w+) :", match[1])]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pair", [*PAIRS, *TILES])
def test_kernels_of_all_orders(pair: str, case: str) -> None:
    """Four tiles, of which two overlap."""
    x = CASES[case](normal(128, 336))
    found = quantize_orders(x, requests(pair), kernels.Kernels())
    for one, other in zip(found, reference_quantizer(pair)(x), strict=True):
        if case in ("nan", "infinity") and not one.layout.decoded:
            # The bits of a NaN are those of the instructions: the signs of codes, and random bits, whose key has the
            # maximum. No value depends on them, because all scales are NaN.
            np.testing.assert_array_equal(one.scales, other.scales)
            assert np.all(np.asarray(one.scales) == _NAN)
        else:
            assert_equal(one, other)


def test_a_kernel_decodes_saved_codes() -> None:
    q = all_codes(64)
    assert_decoded(q, kernels.Kernels().values(q).codes)


def test_a_kernel_computes_the_factors_of_outer_scales() -> None:
    assert_same_factors(kernels.Kernels().outer_factors)


def test_the_interpreter_finds_missing_stores_and_wrong_addresses() -> None:
    """With a kernel that copies 128 words, and two with a fault."""
    copy = """
.visible .entry copy(
	.param .u64 .ptr .align 256 copy_param_0,
	.param .u64 .ptr .align 256 copy_param_1
)
{
	ld.param.b64 	%rd1, [copy_param_0];
	ld.param.b64 	%rd2, [copy_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	ld.b32 	%r2, [%rd4];
	st.b32 	[%rd5], %r2;
	ret;
}
"""
    words = np.arange(128, dtype=np.uint32)

    def run(text: str, arguments: int, results: int) -> np.ndarray:
        program, shape = ptx.Program(text=text, buffers=[0, 1]), jax.ShapeDtypeStruct((results,), jnp.uint32)
        (result,) = ptx.run(program, (1, 1), [words[:arguments]], [shape])
        return result

    np.testing.assert_array_equal(run(copy, 128, 128), words)
    with pytest.raises(ptx.PtxError, match="not written everywhere"):
        run(copy, 128, 129)
    with pytest.raises(ptx.PtxError, match="out of bounds"):
        run(copy, 127, 128)
    with pytest.raises(ptx.PtxError, match="two threads write different bytes"):
        run(copy.replace("add.s64 	%rd5, %rd2, %rd3", "mov.b64 	%rd5, %rd2"), 128, 128)
