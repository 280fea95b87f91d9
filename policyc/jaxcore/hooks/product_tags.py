"""Tags equations with their addresses, so that each equation of a gradient says which equation of the loss it is from.

A tag is a name scope, which JAX copies to everything it derives from an equation. A product is wrapped in a primitive
that applies JAX's own derivative to one operand at a time, each under its own scope. So the gradient also says which of
its products belongs to which operand. The gradient has the same equations as without tags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.source_info_util import NameStack
from jax.interpreters import ad

from policyc.jaxcore.internals import sources
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr, J
from policyc.jaxcore.jaxprs.transform import Address

_TAG = "policyc:"
_PART = "policyc."
_RECOMPUTED = "rematted_computation"  # the scope that jax.checkpoint gives to recomputed equations

Part = Literal["result", "lhs", "rhs", ""]
_PARTS: tuple[Part, ...] = ("result", "lhs", "rhs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """The origin of an equation of a gradient.

    Attributes:
      address: the equation of the loss; None if JAX did not derive it from any.
      part: for a product: its result, or the gradient of lhs or rhs.
      is_backward: whether it belongs to the backward pass of its jaxpr.
      is_recomputed: whether `jax.checkpoint` recomputes it.
    """

    address: Address | None = None
    part: Part = ""
    is_backward: bool = False
    is_recomputed: bool = False


def is_tag(name: str) -> bool:
    """Whether a name scope comes from tagging or from `jax.checkpoint`, not from the program."""
    return name.startswith((_TAG, _PART)) or name == _RECOMPUTED


class TaggedLoss:
    """A loss with a tag on every equation, and with its products wrapped.

    A tag has the number of a jaxpr in the loss, and the number of the equation in it. Containers with the same jaxpr
    (layers that are not scanned) keep sharing it, so that JAX differentiates it once. The tags around an equation of
    the gradient, or the container that holds it there, tell which of these containers it belongs to.
    """

    def __init__(self, jaxpr: ClosedJaxpr, products: Collection[Address]) -> None:
        # The numbers of jaxprs, by the address of the container and the index in it.
        self._numbers: dict[Address, int] = {(): 0}
        # The containers of each jaxpr: (number of the jaxpr that holds the container, number of the container's
        # equation) -> index of the jaxpr in the container.
        self._containers: dict[int, dict[tuple[int, int], int]] = {}
        # Tagged jaxprs and their numbers, by the original, its index in its container, and the products inside.
        self._tagged: dict[tuple[int, int, frozenset[Address]], tuple[int, Any]] = {}
        # The name stacks of containers, by the number of the jaxpr that holds them and their equation number.
        self._stacks: dict[tuple[int, int], Any] = {}
        self._products = products
        self.jaxpr: Any = self._tag(jaxpr, (), 0)

    def tag_site(self, eqn: JaxprEqn, address: Address) -> JaxprEqn:
        """The equation with its tag, and with the scopes and tags of the containers around it.

        Parts of a site are moved out of its containers, and must still be recognized there.
        """
        return self._tag_equation(
            _replace_stack(eqn, self._around(address) + eqn.source_info.name_stack), address
        )

    def scope_equation(self, eqn: JaxprEqn, address: Address) -> JaxprEqn:
        """An equation in the same jaxpr as the one at `address`, with the scopes of their containers but no tags."""
        around = self._around(address)
        stack = around + eqn.source_info.name_stack
        scopes = tuple(s for s in stack.stack if not s.name.startswith(_TAG))
        return _replace_stack(eqn, type(around)(scopes))

    def _around(self, address: Address) -> Any:
        """The name stacks of the containers around an address, one after another."""
        stack = NameStack()
        for length in range(1, len(address) - 1, 2):
            stack = stack + self._stacks[self._numbers[address[: length - 1]], address[length - 1]]
        return stack

    def _tag_equation(self, eqn: JaxprEqn, address: Address) -> JaxprEqn:
        tag = f"{_TAG}{self._numbers[address[:-1]]}.{address[-1]}"
        return _replace_stack(eqn, eqn.source_info.name_stack.extend(tag))

    def _tag(self, jaxpr: J, outer: Address, number: int) -> J:
        eqns: list[JaxprEqn] = []
        for position, eqn in enumerate(jaxprs.equations(jaxpr)):
            address = (*outer, position)
            tagged = self._tag_equation(eqn, address)
            if container_of(eqn) is not None:
                self._stacks[number, position] = tagged.source_info.name_stack
                subs = enumerate(jaxprs.sub_jaxprs(eqn))
                tagged = jaxprs.replace_sub_jaxprs(
                    tagged,
                    [(sub, self._tag_body(sub.jaxpr, (*address, index), number)) for index, sub in subs],
                )
            elif address in self._products:
                params = {"primitive": eqn.primitive, "params": tuple(eqn.params.items())}
                tagged = jaxprs.replace_eqn(tagged, primitive=_wrapped_product_p, params=params)
            eqns.append(tagged)
        return jaxprs.replace_equations(jaxpr, eqns)

    def _tag_body(self, jaxpr: J, outer: Address, holder: int) -> J:
        """The jaxpr of a container, tagged once for all containers that have it."""
        depth = len(outer)
        products = frozenset(address[depth:] for address in self._products if address[:depth] == outer)
        key = (id(jaxpr), outer[-1], products)  # the index tells branches of a cond apart that share a jaxpr
        is_new = key not in self._tagged
        number = len(self._containers) + 1 if is_new else self._tagged[key][0]
        self._containers.setdefault(number, {})[holder, outer[-2]] = outer[-1]
        self._numbers[outer] = number
        if is_new:
            self._tagged[key] = (number, self._tag(jaxpr, outer, number))
        else:
            self._number_inside(outer)
        tagged: J = self._tagged[key][1]
        return tagged

    def _number_inside(self, outer: Address) -> None:
        """Numbers the jaxprs inside a jaxpr that was tagged before, with the numbers they got then."""
        first = next(address for address, number in self._numbers.items() if number == self._numbers[outer])
        for address, number in list(self._numbers.items()):
            if len(address) > len(first) and address[: len(first)] == first:
                self._numbers[(*outer, *address[len(first) :])] = number

    def read_tag(self, eqn: JaxprEqn, container: Address = ()) -> Tag:
        """Reads the origin of an equation of the gradient. `container`: the address of the loss equation around it."""
        stack = eqn.source_info.name_stack.stack
        names = [s.name for s in stack if isinstance(s, sources.Scope)]
        tags = [_read_numbers(name) for name in names if name.startswith(_TAG)]
        last_part = next((name for name in reversed(names) if name.startswith(_PART)), "")
        return Tag(
            address=self._resolve(tags, container) if tags else None,
            part=next((part for part in _PARTS if last_part == f"{_PART}{part}"), ""),
            is_backward=any(not isinstance(s, sources.Scope) and s.name == "transpose" for s in stack),
            is_recomputed=_RECOMPUTED in names,
        )

    def _resolve(self, tags: Sequence[tuple[int, int]], container: Address) -> Address:
        """The address that the last tag stands for, given the tags and the container around it."""
        number, position = tags[-1]
        if number == 0:
            return (position,)
        holders = self._containers[number]
        for count in range(len(tags) - 1, 0, -1):
            if tags[count - 1] in holders:
                return (*self._resolve(tags[:count], container), holders[tags[count - 1]], position)
        for length in range(len(container), 0, -1):  # the innermost container around it that has this jaxpr
            for index in {*holders.values()}:
                if self._numbers.get((*container[:length], index)) == number:
                    return (*container[:length], index, position)
        # JAX dropped the tags around it. Harmless if only one container holds this jaxpr.
        ((holder, index),) = holders.items()
        return (*self._resolve([holder], container), index, position)


def _replace_stack(eqn: JaxprEqn, stack: Any) -> JaxprEqn:
    """The equation with another name stack."""
    return jaxprs.replace_eqn(eqn, source_info=eqn.source_info.replace(name_stack=stack))


def _read_numbers(name: str) -> tuple[int, int]:
    number, _, position = name.removeprefix(_TAG).partition(".")
    return int(number), int(position)


def trace_gradient(
    function: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    jaxpr: ClosedJaxpr,
    others: Sequence[AbstractValue],
    differentiated: tuple[Collection[int], Collection[int]],
) -> AnyJaxpr:
    """The jaxpr of a function's results and gradient, without dead code.

    Args:
      function: takes inputs of the same types as the jaxpr, and other arrays. Returns results of the jaxpr's types.
      jaxpr: the loss.
      others: the types of the other arrays.
      differentiated: the numbers of the inputs and of the results that are differentiated.
    """
    numbers, results = differentiated
    count = len(jaxpr.jaxpr.invars)

    def gradient(*values: Any) -> Any:
        def loss(*replaced: Any) -> list[Any]:
            merged = dict(zip(numbers, replaced, strict=True))
            inputs = [merged.get(number, value) for number, value in enumerate(values[:count])]
            return list(function(inputs, values[count:]))

        outputs, pullback = jax.vjp(loss, *(values[number] for number in numbers))
        cotangents = [_cotangent(value, number in results) for number, value in enumerate(outputs)]
        return outputs, pullback(cotangents)

    traced = jax.make_jaxpr(gradient)(*(v.aval for v in jaxpr.jaxpr.invars), *others)
    return jaxprs.eliminate_dead_code(_unwrap(traced))


def _cotangent(value: Any, is_differentiated: bool) -> Any:
    """Ones for a result that is differentiated, else zeros."""
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
        return jax.numpy.zeros(value.shape, jax.dtypes.float0)
    return jax.numpy.full_like(value, float(is_differentiated))


def _unwrap(jaxpr: Any) -> Any:
    """Replaces wrapped products that were not differentiated with the original ones."""

    def change(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is not _wrapped_product_p:
            return eqn
        return jaxprs.replace_eqn(eqn, primitive=eqn.params["primitive"], params=dict(eqn.params["params"]))

    return jaxprs.map_equations(jaxpr, change)


# ---- the wrapped product

_wrapped_product_p = Primitive("policyc_tagged_product")
_Zero: Any = vars(ad)["Zero"]  # JAX does not export it


def _abstract_product(*avals: Any, primitive: Any, params: Any) -> Any:
    return primitive.abstract_eval(*avals, **dict(params))[0]


def _differentiate_product(
    primals: Sequence[Any], tangents: Sequence[Any], *, primitive: Any, params: Any
) -> tuple[Any, Any]:
    """JAX's derivative of a product, one operand at a time."""
    rule = ad.primitive_jvps[primitive]
    with jax.named_scope(f"{_PART}result"):
        result = primitive.bind(*primals, **dict(params))
    total: Any = _zero(result)
    for number, part in enumerate(("lhs", "rhs")):
        if type(tangents[number]) is _Zero:
            continue
        only = [
            t if i == number else _zero(p) for i, (p, t) in enumerate(zip(primals, tangents, strict=True))
        ]
        with jax.named_scope(f"{_PART}{part}"):
            _, tangent = rule(primals, only, **dict(params))
        total = ad.add_tangents(total, tangent)
    return result, total


def _zero(value: Any) -> Any:
    return _Zero(jax.typeof(value).to_tangent_aval())


_wrapped_product_p.def_abstract_eval(_abstract_product)
ad.primitive_jvps[_wrapped_product_p] = _differentiate_product
