"""Compares the signedness of integers in Mosaic with the types of the jaxpr, while kernels are lowered for CUDA.

Mosaic stores the signedness of an array along with its registers. It determines how numbers are compared, divided and
converted. Lowering rules sometimes take it from the wrong operand. The interpreter of kernels uses the jaxpr's types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest import mock

import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class SignRecord:
    """The arrays that were compared.

    Attributes:
      checked: how many integer arrays of each primitive were compared.
      wrong: the primitive and type of each array with the wrong signedness. The first one causes the others.
    """

    checked: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def compare(self, primitive: str, values: Sequence[Any], avals: Sequence[Any]) -> None:
        from jax.experimental.mosaic import gpu

        for value, aval in zip(values, avals, strict=True):
            if not isinstance(value, gpu.FragmentedArray) or not jnp.issubdtype(aval.dtype, jnp.integer):
                continue
            self.checked[primitive] += 1
            if value.is_signed != jnp.issubdtype(aval.dtype, jnp.signedinteger):
                self.wrong.append(f"{primitive}: {aval.str_short()}")


@contextmanager
def record_signs() -> Iterator[SignRecord]:
    """Compares the operands and results of each equation that Mosaic lowers inside the `with`."""
    from jax._src.pallas.mosaic_gpu import lowering

    # Importing this adds rules. If it happened inside the patch, they would be lost.
    import_module("jax.experimental.pallas.mosaic_gpu")
    record = SignRecord()

    def check(primitive: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
        def lower(context: Any, *operands: Any, **params: Any) -> Any:
            record.compare(primitive.name, operands, context.avals_in)
            results = rule(context, *operands, **params)
            outs = results if primitive.multiple_results else [results]
            record.compare(primitive.name, outs, context.avals_out)
            return results

        return lower

    checked = {
        semantics: {primitive: check(primitive, rule) for primitive, rule in rules.items()}
        for semantics, rules in lowering.mosaic_lowering_rules.items()
    }
    with mock.patch.dict(lowering.mosaic_lowering_rules, checked):
        yield record
