"""Transformer Engine's NVFP4 kernels as functions of matrices on one device.

The calls bypass Transformer Engine's own sharding rules, which need its own kind of mesh and do not reduce maxima over
all devices.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from policyc.numerics.backends import te_one_pass
from policyc.numerics.quantize.reference.hadamard import SIGNS

INSTALL = (
    'pip install "jax[cuda13]" nvidia-nvtx nvidia-curand nvidia-cudnn-frontend pybind11 && NVTE_FRAMEWORK=jax '
    'NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install --no-build-isolation "transformer-engine[core-cu13,jax]"'
)

_MODULES = {
    "gemm": "cpp_extensions.gemm",
    "quantization": "cpp_extensions.quantization",
    "quantize": "quantize",
}


class QuantizedMatrix(NamedTuple):
    """Rows of float4 codes, and a float8 scale for each 16 of them."""

    codes: jax.Array
    scales: jax.Array


class QuantizedOrders(NamedTuple):
    """A matrix that is quantized along its rows, along its columns (which gives rows of its transpose), or both.

    `maximum` is the plain maximum after the call, which may have overwritten it. A call that rotates leaves it intact.
    """

    rows: QuantizedMatrix | None
    columns: QuantizedMatrix | None
    maximum: jax.Array


class Maxima(NamedTuple):
    """The largest magnitude of a matrix, and the one after the rotation if its columns are rotated."""

    plain: jax.Array
    rotated: jax.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerOutput:
    """Outputs to request from a quantizer: rows, columns or both, with one scale per block or per 2D tile."""

    rows: bool
    columns: bool
    two_d: bool = False


class TransformerEngine:
    """Binds the primitives of Transformer Engine that call its kernels."""

    def __init__(self, **modules: Any) -> None:
        quantization, gemms = modules["quantization"], modules["gemm"]
        parts = modules["quantize"]
        self.primitives: tuple[Any, Any] = quantization.QuantizePrimitive, gemms.GemmPrimitive
        self._quantize, self._gemm = (primitive.impl for primitive in self.primitives)
        self._no_collective = gemms.CollectiveOp.NONE
        self._modes, self._layouts = parts.ScalingMode, parts.QuantizeLayout
        self._split_accumulator = gemms._get_high_precision_accumulation_from_env
        if tuple(parts.get_wgrad_sign_vector()) != SIGNS:
            raise ImportError("this Transformer Engine rotates with different signs than the recipe")
        with jax.ensure_compile_time_eval():
            self._matrix = np.asarray(parts.get_rht_matrix())

    def rotation_matrix(self) -> np.ndarray:
        """The matrix of the random Hadamard transform, 16 x 16."""
        return self._matrix

    def joins_rotation(self) -> bool:
        """Whether one call can write rows and rotated columns."""
        return not te_one_pass.find_obstacle()

    def quantize(
        self,
        x: jax.Array,
        maxima: Maxima,
        state: jax.Array | None,
        rotation: jax.Array | None,
        output: QuantizerOutput,
    ) -> QuantizedOrders:
        """Quantizes a matrix.

        `state` is the state of the random generator, four words. `rotation` is the matrix that rotates columns. Rows
        can be written together with rotated columns only if `joins_rotation`.
        """
        if rotation is not None and output.rows:
            assert maxima.rotated is not None
            codes, column_codes, *both_scales = te_one_pass.quantize(
                x, maxima.plain, maxima.rotated, state, rotation
            )
            return QuantizedOrders(
                QuantizedMatrix(codes, both_scales[0]),
                QuantizedMatrix(column_codes, both_scales[1]),
                maxima.plain,
            )
        rows, column, scales, column_scales, maximum, *_ = self._quantize(
            x,
            jnp.zeros((1,), jnp.float32),  # a scale that NVFP4 does not use
            maxima.plain,
            jnp.zeros((0,), jnp.uint32) if state is None else state,
            jnp.zeros((1,), jnp.float32) if maxima.rotated is None else maxima.rotated,
            jnp.zeros((1, 1), jnp.bfloat16) if rotation is None else rotation,
            out_dtype=jnp.float4_e2m1fn,
            scaling_mode=(
                self._modes.NVFP4_2D_SCALING if output.two_d else self._modes.NVFP4_1D_SCALING
            ).value,
            q_layout=self._layout(output, rotates=rotation is not None),
            flatten_axis=1,
            scale_dtype=jnp.float8_e4m3fn,
            is_dbias=False,
            is_outer=False,
            stochastic_rounding=state is not None,
            use_rht=rotation is not None,
        )
        return QuantizedOrders(
            QuantizedMatrix(rows, scales) if output.rows else None,
            QuantizedMatrix(column, column_scales) if output.columns else None,
            maximum,
        )

    def _layout(self, output: QuantizerOutput, *, rotates: bool) -> Any:
        """Transformer Engine's name for the output. Only the rotating kernel can write columns alone."""
        if not output.columns:
            return self._layouts.ROWWISE
        return self._layouts.COLWISE if rotates else self._layouts.ROWWISE_COLWISE

    def gemm(self, left: QuantizedMatrix, right: QuantizedMatrix, alpha: jax.Array, out: Any) -> jax.Array:
        """The product of both, contracted along their rows, times alpha."""
        (product,) = self._gemm(
            left.codes,
            left.scales,
            right.codes,
            right.scales,
            jnp.zeros((0,), out),  # no bias
            alpha.reshape(1),
            jnp.zeros((1,), jnp.float32),
            out_dtype=out,
            contracting_dims=((1,), (1,)),
            scaling_mode=self._modes.NVFP4_1D_SCALING,
            use_split_accumulator=self._split_accumulator(),
            transpose_batch_sequence=False,
            sequence_dim=-1,
            is_outer=False,
            collective_op=self._no_collective,
        )
        result: jax.Array = product
        return result


def load() -> TransformerEngine:
    """Transformer Engine. Raises ImportError if it is missing, or if its kernels are switched off."""
    engine = _import()
    if not all(primitive.enabled() for primitive in engine.primitives):
        raise ImportError(
            "Transformer Engine's kernels are switched off, and its own JAX code for them is wrong: unset "
            "NVTE_JAX_CUSTOM_CALLS and NVTE_JAX_CUSTOM_CALLS_RE"
        )
    return engine


@cache
def _import() -> TransformerEngine:
    try:
        modules = {
            name: importlib.import_module(f"transformer_engine.jax.{path}") for name, path in _MODULES.items()
        }
        return TransformerEngine(**modules)
    except (ImportError, OSError, AttributeError) as error:
        raise ImportError(
            f"--backend te needs Transformer Engine 2.20 for JAX ({error}). To install it: {INSTALL}"
        ) from error
