"""A jitted function of somebody's program, moved to other devices before it is compiled.

In: a `Jitted`, as it was about to be lowered for the devices that are here, and the devices that it is meant for. Out:
the same, lowered for those: the first device that it uses here becomes the first there, and so on. The one trap:
devices hide in arguments, in what a function was jitted with, and in equations. One that is left behind anywhere is
an error inside JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from policyc.jaxcore import jaxprs
from policyc.jaxcore.internals import pjit, sharding_impls

Move = Callable[[Any], Any]
"""A device to the one in its place."""

PRINTS = frozenset({"debug_callback", "debug_print"})
CALLBACKS = frozenset({"pure_callback", "io_callback"})


class CallsBack(Exception):
    """The function needs Python while it runs, and elsewhere there is none. The message says where."""


@dataclass(frozen=True, slots=True)
class Jitted:
    """A jitted function that is about to be lowered: what JAX knows of its arguments, and how it was jitted."""

    args: Sequence[Any]
    options: Mapping[str, Any]
    _lower: Callable[..., Any]

    @property
    def jaxpr(self) -> Any:
        return self.options["jaxpr"]

    def lowered(self, shardings: Sequence[Any], options: Mapping[str, Any], platform: str) -> Any:
        """The function, lowered with its arguments elsewhere. A sharding of None leaves an argument's place open."""
        args = [
            a.replace(sharding=s, format=None, committed=s is not None)
            for a, s in zip(self.args, shardings, strict=True)
        ]
        return self._lower(args, **{**options, "lowering_platforms": (platform,)})


@contextlib.contextmanager
def lowering(hook: Callable[[Jitted], None]) -> Iterator[None]:
    """Shows a hook every jitted function before it is lowered, to be called or to be compiled ahead of time."""
    home: Any = pjit
    lower = home._resolve_and_lower

    def hooked(args: Sequence[Any], **options: Any) -> Any:
        hook(Jitted(args, options, lower))
        return lower(args, **options)

    home._resolve_and_lower = hooked
    try:
        yield
    finally:
        home._resolve_and_lower = lower


# ---- moving


def used(jitted: Jitted) -> list[Any]:
    """The devices that a function names, in JAX's order. None: it runs on whichever comes first."""
    found: set[Any] = set()

    def note(device: Any) -> Any:
        found.add(device)
        return device

    _moved(jitted, note)
    return sorted(found, key=lambda device: device.id)


def lowered(jitted: Jitted, devices: Sequence[Any], platform: str) -> Any:
    """A jitted function, lowered for as many other devices as it uses."""
    there = dict(zip(used(jitted), devices, strict=False))
    places, options = _moved(jitted, there.__getitem__)
    if not there:
        # Nothing says where: JAX would take what is here.
        places = [SingleDeviceSharding(devices[0])] * len(places)
    return jitted.lowered(places, options, platform)


def _moved(jitted: Jitted, move: Move) -> tuple[list[Any], dict[str, Any]]:
    """Where the arguments lie and how the function was jitted, on other devices."""
    places = [
        None if a.sharding is None or not a.committed else _sharding(a.sharding, move) for a in jitted.args
    ]
    options = {k: v if k == "jaxpr" else _value(v, move) for k, v in jitted.options.items()}
    return places, {**options, "jaxpr": _jaxpr(jitted.jaxpr, move)}


def _jaxpr(held: Any, move: Move) -> Any:
    """What a program prints stays here: it changes no result."""
    eqns = [eqn for eqn in jaxprs.body_eqns(held) if jaxprs.primitive_name(eqn) not in PRINTS]
    return jaxprs.with_eqns(held, [_eqn(eqn, move) for eqn in eqns])


def _eqn(eqn: Any, move: Move) -> Any:
    if jaxprs.primitive_name(eqn) in CALLBACKS:
        raise CallsBack(f"{jaxprs.primitive_name(eqn)} ({jaxprs.place(eqn)})")
    bodies = jaxprs.bodies(eqn)
    apart = {body.key for body in bodies}
    params = {k: v if k in apart else _value(v, move) for k, v in eqn.params.items()}
    return jaxprs.with_bodies(eqn.replace(params=params), [(b, _jaxpr(b.held, move)) for b in bodies])


def _value(value: Any, move: Move) -> Any:
    """A parameter, whatever it is."""
    if isinstance(value, Mesh):
        return _mesh(value, move)
    if isinstance(value, jax.sharding.Sharding):
        return _sharding(value, move)
    if isinstance(value, jax.Device):
        return move(value)
    if type(value) in (tuple, list):
        return type(value)(_value(v, move) for v in value)
    return value


def _mesh(mesh: Mesh, move: Move) -> Mesh:
    if mesh.empty:
        return mesh
    devices = np.array([move(d) for d in mesh.devices.flat]).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _sharding(sharding: Any, move: Move) -> Any:
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            return sharding  # of a mesh in the abstract, without devices
        return NamedSharding(_mesh(sharding.mesh, move), sharding.spec, memory_kind=_memory(sharding))
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(move(device), memory_kind=_memory(sharding))
    return _made_by_xla(sharding, move)


def _memory(sharding: Any) -> str | None:
    """The memory that was asked for, if it is not the usual one, which has other names elsewhere."""
    kind: str | None = sharding.memory_kind
    usual = next(iter(sharding.device_set)).default_memory().kind
    return None if kind == usual else kind


def _made_by_xla(sharding: Any, move: Move) -> Any:
    """A sharding that XLA has made, on other devices."""
    if not isinstance(sharding, sharding_impls.GSPMDSharding):
        raise NotImplementedError(f"{sharding} cannot be moved to other devices: use NamedSharding")
    made: Any = sharding_impls.GSPMDSharding
    return made(tuple(map(move, sharding._device_assignment)), sharding._hlo_sharding)
