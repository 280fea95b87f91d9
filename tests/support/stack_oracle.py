"""Which slices of parameters each GEMM of a loss reads, found by running the loss.

An interpreter of jaxprs evaluates the loss equation by equation and records the operands of every GEMM. It runs once
unchanged, once with other data and other GEMM results, and once for each slice with other numbers in this slice. The
weight of a GEMM is the operand that does not change with the data. The slices it reads are those that change it. This
needs no per-primitive rules about weights, so it shares nothing with the analysis that it checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.transform import Address

Lanes = list[Any]
"""One value for each device of the enclosing shard_map; outside of one, a single value."""

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Execution:
    """One run of a GEMM: its equation, the iteration of each enclosing scan, and the device."""

    address: Address
    iterations: tuple[tuple[Address, int], ...]
    device: int


@dataclass(frozen=True)
class Mesh:
    """The devices of a shard_map, with the coordinates of each."""

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @cached_property
    def places(self) -> list[dict[str, int]]:
        return [
            dict(zip(self.names, place, strict=True)) for place in itertools.product(*map(range, self.sizes))
        ]

    def index(self, device: int, axes: Sequence[str]) -> int:
        sizes = dict(zip(self.names, self.sizes, strict=True))
        index = 0
        for axis in axes:
            index = index * sizes[axis] + self.places[device][axis]
        return index

    def group(self, device: int, axes: Sequence[str]) -> list[int]:
        """The devices that differ from this one only along these axes, in order."""
        others = [name for name in self.names if name not in axes]
        here = self.places[device]
        group = [d for d, place in enumerate(self.places) if all(place[n] == here[n] for n in others)]
        return sorted(group, key=lambda d: self.index(d, axes))


class Interpreter:
    """Evaluates a jaxpr. `gemms` has the operands of every GEMM that ran, in order."""

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor
        """Multiplies the result of every product, so that another factor changes whatever comes from a product."""
        self.gemms: list[tuple[Execution, tuple[np.ndarray, np.ndarray]]] = []
        self._mesh = Mesh()
        self._iterations: dict[Address, int] = {}
        self._devices = [0]
        """The devices that run the current equations: inside a branch, only those that take it."""
        self._special = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
            "psum": self._psum,
            "psum_invariant": self._psum,
            "ppermute": self._ppermute,
            "axis_index": self._axis_index,
            "all_gather": self._all_gather,
        }

    def run(self, jaxpr: Any, inputs: Sequence[Lanes], address: Address = ()) -> list[Lanes]:
        opened = jaxprs.open_jaxpr(jaxpr)
        consts = [[c] * len(self._devices) for c in jaxprs.constants(jaxpr)]
        values: dict[Any, Lanes] = dict(zip(opened.constvars, consts, strict=True))
        values |= dict(zip(opened.invars, inputs, strict=True))

        def read(atom: Any) -> Lanes:
            return [atom.val] * len(self._devices) if isinstance(atom, Literal) else values[atom]

        for number, eqn in enumerate(opened.eqns):
            results = self._equation(eqn, [read(a) for a in eqn.invars], (*address, number))
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(a) for a in opened.outvars]

    def _equation(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        name = jaxprs.primitive_name(eqn)
        if name in self._special:
            return self._special[name](eqn, operands, address)
        if name in ("pvary", "pcast", "sharding_constraint"):
            return operands
        if name == "dot_general":
            iterations = tuple(self._iterations.items())
            for device, lhs, rhs in zip(self._devices, *operands, strict=True):
                execution = Execution(address, iterations, device)
                self.gemms.append((execution, (np.asarray(lhs), np.asarray(rhs))))
        for number, sub in enumerate(() if name in _NUMPY else jaxprs.sub_jaxprs(eqn)):
            if sub.param in _CALLS:
                return self.run(sub.jaxpr, operands, (*address, number))
        lanes = zip(*operands, strict=True) if operands else [()] * len(self._devices)
        by_lane = [_evaluate(eqn, values) for values in lanes]
        if name == "dot_general":
            by_lane = [[result * self._factor] for (result,) in by_lane]
        return [list(results) for results in zip(*by_lane, strict=True)]

    # ---- control flow

    def _scan(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        params = eqn.params
        if "ft_in" in params:
            consts_end, carry_count, _ = (len(list(part)) for part in params["ft_in"].unpack())
        else:
            consts_end, carry_count = params["num_consts"], params["num_carry"]
        carry_end = consts_end + carry_count
        (body,) = jaxprs.sub_jaxprs(eqn)
        consts, carry, xs = operands[:consts_end], operands[consts_end:carry_end], operands[carry_end:]
        stacked: dict[int, list[Lanes]] = {}
        order = range(params["length"])
        for index in reversed(order) if params["reverse"] else order:
            self._iterations[address] = index
            slices = [[x[index] for x in lanes] for lanes in xs]
            results = self.run(body.jaxpr, [*consts, *carry, *slices], (*address, 0))
            carry, stacked[index] = results[: len(carry)], results[len(carry) :]
        self._iterations.pop(address, None)  # a scan may have no iterations
        ys = [
            [_stack([stacked[i][y][lane] for i in order]) for lane in range(len(self._devices))]
            for y in range(len(eqn.outvars) - len(carry))
        ]
        return [*carry, *ys]

    def _while(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        params = eqn.params
        names = [sub.param for sub in jaxprs.sub_jaxprs(eqn)]
        tests, bodies = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = operands[bodies:]
        while True:
            (goes_on,) = self.run(
                params["cond_jaxpr"], [*operands[:tests], *carry], (*address, names.index("cond_jaxpr"))
            )
            if not goes_on[0]:
                return carry
            carry = self.run(
                params["body_jaxpr"], [*operands[tests:bodies], *carry], (*address, names.index("body_jaxpr"))
            )

    def _cond(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        branches, devices = eqn.params["branches"], self._devices
        results: list[Lanes] = [[None] * len(devices) for _ in eqn.outvars]
        last = len(branches) - 1
        taken = [min(max(int(index), 0), last) for index in operands[0]]
        for number in sorted(set(taken)):
            lanes = [lane for lane, branch in enumerate(taken) if branch == number]
            self._devices = [devices[lane] for lane in lanes]
            inputs = [[values[lane] for lane in lanes] for values in operands[1:]]
            for result, values in zip(
                results, self.run(branches[number], inputs, (*address, number)), strict=True
            ):
                for lane, value in zip(lanes, values, strict=True):
                    result[lane] = value
        self._devices = devices
        return results

    # ---- devices

    def _shard_map(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        params = eqn.params
        shape = params["mesh"].shape
        self._mesh = Mesh(tuple(shape), tuple(shape.values()))
        self._devices = list(range(len(self._mesh.places)))
        inputs = []
        for (array,), spec in zip(operands, params["in_specs"], strict=True):
            inputs.append([self._shard(np.asarray(array), spec, device) for device in self._devices])
        results = self.run(params["jaxpr"], inputs, (*address, 0))
        whole = [
            [self._unshard(lanes, spec)] for lanes, spec in zip(results, params["out_specs"], strict=True)
        ]
        self._mesh, self._devices = Mesh(), [0]
        return whole

    def _shard(self, array: np.ndarray, spec: Any, device: int) -> np.ndarray:
        for dim, axes in _axes_by_dim(spec):
            parts = len(self._mesh.group(device, axes))
            array = np.split(array, parts, dim)[self._mesh.index(device, axes)]
        return array

    def _unshard(self, lanes: Lanes, spec: Any) -> np.ndarray:
        def join(device: int, dims: list[tuple[int, tuple[str, ...]]]) -> np.ndarray:
            if not dims:
                return np.asarray(lanes[device])
            (dim, axes), *others = dims
            return np.concatenate([join(d, others) for d in self._mesh.group(device, axes)], dim)

        return join(0, list(_axes_by_dim(spec)))

    def _psum(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        del address
        axes = eqn.params["axes"]
        return [
            [sum(np.asarray(lanes[d]) for d in self._mesh.group(device, axes)) for device in self._devices]
            for lanes in operands
        ]

    def _ppermute(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        del address
        axes, sources = _names(eqn.params["axis_name"]), {to: from_ for from_, to in eqn.params["perm"]}
        (lanes,) = operands
        results = []
        for device in self._devices:
            group, index = self._mesh.group(device, axes), self._mesh.index(device, axes)
            value = np.asarray(lanes[device])
            results.append(lanes[group[sources[index]]] if index in sources else np.zeros_like(value))
        return [results]

    def _axis_index(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        del operands, address
        axes = _names(eqn.params["axis_name"])
        return [[np.int32(self._mesh.index(device, axes)) for device in self._devices]]

    def _all_gather(self, eqn: Any, operands: list[Lanes], address: Address) -> list[Lanes]:
        del address
        params = eqn.params
        join = np.concatenate if params["tiled"] else np.stack
        return [
            [
                join(
                    [np.asarray(lanes[d]) for d in self._mesh.group(device, _names(params["axis_name"]))],
                    params["all_gather_dimension"],
                )
                for device in self._devices
            ]
            for lanes in operands
        ]


def _evaluate(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation. NumPy evaluates common primitives, which JAX would have to compile."""
    has_keys = not all(isinstance(v.aval.dtype, np.dtype) for v in (*eqn.invars, *eqn.outvars))
    if eqn.primitive.name in _NUMPY and not has_keys:
        result = _NUMPY[eqn.primitive.name](eqn.params, *map(np.asarray, values))
        (out,) = eqn.outvars
        assert result.shape == out.aval.shape, eqn
        return [np.asarray(result).astype(out.aval.dtype)]
    results = eqn.primitive.bind(*values, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _dot(params: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    (x_dims, y_dims), (x_batch, y_batch) = params["dimension_numbers"]
    names = iter("abcdefghijklmnopqrstuvwxyz")
    of_x = {dim: next(names) for dim in range(x.ndim)}
    of_y = {b: of_x[a] for a, b in zip((*x_dims, *x_batch), (*y_dims, *y_batch), strict=True)}
    of_y |= {dim: next(names) for dim in range(y.ndim) if dim not in of_y}
    free_x = [n for dim, n in of_x.items() if dim not in (*x_dims, *x_batch)]
    free_y = [of_y[dim] for dim in range(y.ndim) if dim not in (*y_dims, *y_batch)]
    result = "".join([*(of_x[dim] for dim in x_batch), *free_x, *free_y])
    x_names, y_names = ("".join(of[dim] for dim in range(len(of))) for of in (of_x, of_y))
    return np.einsum(f"{x_names},{y_names}->{result}", x, y)


def _broadcast(params: Any, x: np.ndarray) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for size, dim in zip(x.shape, params["broadcast_dimensions"], strict=True):
        shape[dim] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _slice(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _dynamic_slice(params: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = params["slice_sizes"]
    firsts = [
        min(max(int(start), 0), whole - size)
        for start, whole, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return x[tuple(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True))]


_NUMPY: dict[str, Any] = {
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "mul": lambda _, x, y: x * y,
    "lt": lambda _, x, y: x < y,
    "le": lambda _, x, y: x <= y,
    "gt": lambda _, x, y: x > y,
    "ge": lambda _, x, y: x >= y,
    "eq": lambda _, x, y: x == y,
    "ne": lambda _, x, y: x != y,
    "and": lambda _, x, y: x & y,
    "or": lambda _, x, y: x | y,
    "not": lambda _, x: ~x,
    "rem": lambda _, x, y: np.fmod(x, y),
    "sign": lambda _, x: np.sign(x),
    "square": lambda _, x: x * x,
    "sqrt": lambda _, x: np.sqrt(x),
    "iota": lambda params: np.indices(params["shape"])[params["dimension"]],
    "max": lambda _, x, y: np.maximum(x, y),
    "min": lambda _, x, y: np.minimum(x, y),
    "tanh": lambda _, x: np.tanh(x),
    "convert_element_type": lambda _, x: x,
    "copy": lambda _, x: x,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "stack": lambda params, *xs: np.stack(xs, params["axis"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "reduce_sum": lambda params, x: x.sum(tuple(params["axes"])),
    "select_n": lambda _, which, *cases: np.choose(which.astype(int), cases),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dot_general": _dot,
}


def _stack(values: Sequence[Any]) -> Any:
    has_keys = any(isinstance(v, jax.Array) for v in values) and jnp.issubdtype(
        values[0].dtype, jax.dtypes.prng_key
    )
    return jnp.stack(values) if has_keys else np.stack(list(map(np.asarray, values)))


def _names(axes: Any) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def _axes_by_dim(spec: Any) -> Iterator[tuple[int, tuple[str, ...]]]:
    return ((dim, _names(axes)) for dim, axes in enumerate(spec) if axes is not None)


Slice = tuple[int, tuple[tuple[int, int], ...]]
"""A slice of an input of the loss: the number of the input, and an (axis, index) pair for each sliced axis."""


def read_slices(jaxpr: Any, slices: Collection[Slice]) -> dict[Execution, frozenset[Slice]]:
    """The slices that the weight of each GEMM reads. Inputs without slices are data.

    Leaves out GEMMs that read no slice, and GEMMs of two weights, since either weight may give the name.
    """
    params = {number for number, _ in slices}
    rng = np.random.default_rng(0)
    inputs = [_numbers(rng, v.aval) for v in jaxpr.jaxpr.invars]
    base = _operands(jaxpr, inputs)
    data = _operands(jaxpr, [a if n in params else _numbers(rng, a) for n, a in enumerate(inputs)], 0.5)
    reads: dict[tuple[Execution, int], set[Slice]] = {}
    fixed = {
        (execution, side)
        for execution in base
        for side in (0, 1)
        if np.array_equal(base[execution][side], data[execution][side])
    }
    for number, indices in slices:
        array = inputs[number].copy()
        place = tuple(dict(indices).get(axis, slice(None)) for axis in range(array.ndim))
        array[place] = rng.standard_normal(array[place].shape)
        changed = _operands(jaxpr, [array if n == number else a for n, a in enumerate(inputs)])
        for execution, side in fixed:
            if not np.array_equal(base[execution][side], changed[execution][side]):
                reads.setdefault((execution, side), set()).add((number, indices))
    return {
        execution: frozenset(read)
        for (execution, side), read in reads.items()
        if (execution, 1 - side) not in reads
    }


def _numbers(rng: np.random.Generator, like: Any) -> np.ndarray:
    return rng.standard_normal(like.shape).astype(like.dtype)


def _operands(
    jaxpr: Any, inputs: Sequence[Any], factor: float = 1.0
) -> dict[Execution, tuple[np.ndarray, np.ndarray]]:
    interpreter = Interpreter(factor)
    interpreter.run(jaxpr, [[a] for a in inputs])
    # The runs of a GEMM in a while loop count as one execution, because their number is unknown to the analysis.
    joined: dict[Execution, list[tuple[np.ndarray, np.ndarray]]] = {}
    for execution, operands in interpreter.gemms:
        joined.setdefault(execution, []).append(operands)
    return {e: (np.stack([o[0] for o in all_]), np.stack([o[1] for o in all_])) for e, all_ in joined.items()}
