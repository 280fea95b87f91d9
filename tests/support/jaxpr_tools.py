"""Helpers for tests of passes that take a jaxpr and return data: nothing here compiles or runs a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from policyc.compiler import pipeline
from policyc.compiler.pipeline import LossCall
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import container_of
from policyc.jaxcore.jaxprs.transform import Address


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, without values."""
    return jax.ShapeDtypeStruct(shape, dtype)


def find_sites(loss: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Sites:
    """The sites of a loss whose first argument holds its parameters."""
    traced = LossCall(fn=loss, args=(params, *args), kwargs=kwargs, param_argnums=(0,)).trace()
    return pipeline.find_sites(traced)


def primitive_counts(jaxpr: Any) -> Counter[str]:
    """The number of equations of each primitive in a jaxpr, including nested jaxprs."""
    return Counter(jaxprs.primitive_name(eqn) for eqn in jaxprs.all_equations(jaxpr))


def addresses_of(jaxpr: Any, primitive: str, outer: Address = ()) -> Iterator[Address]:
    """Yields the addresses of the equations of a primitive, including those inside containers."""
    for number, eqn in enumerate(jaxprs.equations(jaxpr)):
        if jaxprs.primitive_name(eqn) == primitive:
            yield (*outer, number)
        if container_of(eqn) is not None:
            for index, sub in enumerate(jaxprs.sub_jaxprs(eqn)):
                yield from addresses_of(sub.jaxpr, primitive, (*outer, number, index))


def without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without the equations whose results nothing uses."""
    from jax._src.interpreters import partial_eval as pe

    live, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return live


def lowered_text(lowered: jax.stages.Lowered) -> str:
    """The text of a lowered program without its first line, which has the name of the function."""
    return lowered.as_text().partition("\n")[2]


# ---- scopes of GEMMs


def equations_with_scopes(jaxpr: Any, outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields all equations of a jaxpr, including nested ones, with the name scopes around them."""
    for eqn in jaxprs.equations(jaxpr):
        scopes = (*outer, *jaxprs.name_scopes(eqn))
        yield scopes, eqn
        for sub in jaxprs.sub_jaxprs(eqn):
            yield from equations_with_scopes(sub.jaxpr, scopes)


def is_gemm_scope(name: str) -> bool:
    """Whether a scope is that of a GEMM in a random program: g0, g1, ..."""
    return name.startswith("g") and name[1:].isdigit()


def gemm_scope(site: Site) -> str:
    (name,) = [str(n) for n in site.scope.path if is_gemm_scope(n.text)]
    return name


def count_by_scope(jaxpr: Any, primitive: str) -> Counter[str]:
    """How often a primitive occurs in a jaxpr, by the scope of the GEMM it belongs to."""
    counts: Counter[str] = Counter()
    for scopes, eqn in equations_with_scopes(jaxpr, ()):
        names = [s for s in scopes if is_gemm_scope(s)]
        if jaxprs.primitive_name(eqn) == primitive and names:
            counts[names[0]] += 1
    return counts
