"""Tracing a loss: one call, parameters as inputs, everything else as it is. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.compiler.pipeline import LossCall
from policyc.compiler.sites.site import dotted
from policyc.compiler.sites.trace import TracedFunction, jaxpr_inputs, trace
from policyc.jaxcore.jaxprs import reading as jaxprs
from tests.support.jaxpr_tools import primitive_counts, struct

W, X = np.ones((16, 32), np.float32), np.ones((8, 16), np.float32)


class Config:
    depth = 2


def trace_call(fn: Any, *args: Any, param_argnums: tuple[int, ...] = (0,), **kwargs: Any) -> TracedFunction:
    names = [f"arg{i}" for i in param_argnums]
    return trace(fn, args, kwargs, param_argnums, names, {})


def input_shapes(traced: TracedFunction) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in jaxprs.open_jaxpr(traced.jaxpr).invars]


def path_texts(traced: TracedFunction) -> list[str | None]:
    return [None if path is None else dotted(path) for path in traced.paths]


# ---- the call


def test_arguments_that_are_no_arrays_are_passed_as_they_are() -> None:
    config, seen = Config(), []

    def loss(p: Any, x: Any, config: Any, mode: Any, depth: Any, nothing: Any, *, flag: Any) -> Any:
        seen.extend([config, mode, depth, nothing, flag])
        return x @ p["w"] if flag and depth > 1 else x

    traced = trace_call(loss, {"w": W, "name": "linear"}, X, config, "train", 2, None, flag=True)
    assert seen == [config, "train", 2, None, True]
    assert primitive_counts(traced.jaxpr)["dot_general"] == 1
    assert input_shapes(traced) == [(16, 32)]


def test_parameters_that_are_no_arrays_are_passed_as_they_are() -> None:
    """Integers steer Python; floats are parameters."""
    seen = []

    def loss(p: Any) -> Any:
        seen.extend(type(leaf) for leaf in jax.tree.leaves(p))
        return p["w"] * p["scale"]

    traced = trace_call(loss, {"layers": 3, "name": "mlp", "scale": 0.5, "w": W})
    assert seen[:2] == [int, str]
    assert path_texts(traced) == ["scale", "w"]
    assert input_shapes(traced) == [(), (16, 32)]


# ---- the inputs of the jaxpr


def test_arguments_without_parameters_are_constants_unless_abstract() -> None:
    def loss(p: Any, x: Any) -> Any:
        return x @ p["w"]

    concrete, abstract = (trace_call(loss, {"w": W}, x) for x in (X, struct(8, 16)))
    assert input_shapes(concrete) == [(16, 32)]
    assert input_shapes(abstract) == [(16, 32), (8, 16)]
    assert path_texts(abstract) == ["w", None]


def test_the_names_of_arguments_come_from_the_function() -> None:
    call = LossCall(fn=lambda x, weights: x @ weights, args=(X, W), param_argnums=(1,))
    assert path_texts(call.trace()) == ["weights"]


def test_the_inputs_for_other_arguments_are_picked_as_they_were_traced() -> None:
    first = ({"b": W, "a": 3, "c": 0.5}, X, struct(4))
    inputs = jaxpr_inputs(first, (0,))
    traced = trace_call(lambda p, x, y: (p["b"] * p["c"], y), *first)
    assert [np.shape(i) if not hasattr(i, "shape") else i.shape for i in inputs] == input_shapes(traced)
    second = ({"b": W + 1, "a": 3, "c": 0.75}, X, struct(4))
    assert jaxpr_inputs(second, (0,))[1] == 0.75


# ---- the results


def test_results_that_are_not_traced_are_kept() -> None:
    config = Config()

    def loss(p: Any, x: Any) -> Any:
        return (x @ p).sum(), {"config": config, "mode": "train", "x": x, "mean": p.mean(), "none": None}

    traced = trace_call(loss, W, X)
    assert len(jaxprs.open_jaxpr(traced.jaxpr).outvars) == 2
    value, aux = traced.assemble_result(["the sum", "the mean"])
    assert value == "the sum"
    assert aux["mean"] == "the mean"
    assert aux["config"] is config
    assert aux["x"] is X
    assert (aux["mode"], aux["none"]) == ("train", None)


def test_a_result_may_be_an_input() -> None:
    traced = trace_call(lambda p: (p["w"], p["w"]), {"w": W})
    assert [r is W for r in traced.run(traced.jaxpr, [W])] == [True, True]


# ---- weights that are not differentiated


def test_a_reference_model_that_is_still_the_same_array_does_not_rename_the_model() -> None:
    def loss(params: Any, reference: Any) -> Any:
        return (X @ params["w"] - X @ reference["w"]).sum()

    model = {"w": jnp.ones(W.shape)}
    traced = LossCall(fn=loss, args=(model, model), param_argnums=(0,)).trace()
    (var,) = traced.frozen
    assert list(map(dotted, traced.frozen[var].paths)) == ["reference.w"]
    assert var not in [v for v, path in zip(traced.jaxpr.jaxpr.invars, traced.paths, strict=True) if path]
