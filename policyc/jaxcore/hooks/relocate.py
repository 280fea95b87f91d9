"""Moves a jitted function to other devices before it is compiled.

The first device that the function uses is replaced with the first new device, and so on. Devices occur in the
arguments, in the options of `jit` and in the parameters of equations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from policyc.jaxcore.internals import pjit, sharding_impls
from policyc.jaxcore.jaxprs import reading as jaxprs

DeviceMap = Callable[[jax.Device], jax.Device]
"""Maps a device to the one that replaces it."""

PRINTS = frozenset({"debug_callback", "debug_print"})
CALLBACKS = frozenset({"pure_callback", "io_callback"})


class HasCallback(Exception):
    """The function calls back into Python at run time, which a relocated program cannot. The message says where."""


@dataclass(frozen=True, slots=True)
class JittedFunction:
    """A jitted function that is about to be lowered: what JAX knows about its arguments, and the options of `jit`."""

    args: Sequence[Any]
    options: Mapping[str, Any]
    _lower: Callable[..., Any]

    @property
    def jaxpr(self) -> ClosedJaxpr:
        jaxpr: ClosedJaxpr = self.options["jaxpr"]
        return jaxpr

    def lower(self, shardings: Sequence[Sharding | None], options: Mapping[str, Any], platform: str) -> Any:
        """Lowers the function with these shardings of its arguments. None leaves the choice to JAX."""
        args = [
            a.replace(sharding=s, format=None, committed=s is not None)
            for a, s in zip(self.args, shardings, strict=True)
        ]
        return self._lower(args, **{**options, "lowering_platforms": (platform,)})


@contextlib.contextmanager
def intercept_lowering(hook: Callable[[JittedFunction], None]) -> Iterator[None]:
    """Calls `hook` with every jitted function before JAX lowers it, for a call or for ahead-of-time compilation.

    Patches `pjit._resolve_and_lower` while active.
    """
    module: Any = pjit
    lower = module._resolve_and_lower

    def hooked(args: Sequence[Any], **options: Any) -> Any:
        hook(JittedFunction(args, options, lower))
        return lower(args, **options)

    module._resolve_and_lower = hooked
    try:
        yield
    finally:
        module._resolve_and_lower = lower


# ---- relocation


def devices_used(function: JittedFunction) -> list[jax.Device]:
    """The devices that a function names, sorted by id. If empty, it runs on the default device."""
    devices: set[jax.Device] = set()

    def record(device: jax.Device) -> jax.Device:
        devices.add(device)
        return device

    _relocate(function, record)
    return sorted(devices, key=lambda device: device.id)


def lower_for(function: JittedFunction, devices: Sequence[jax.Device], platform: str) -> Any:
    """Lowers a jitted function for as many other devices as it uses."""
    replacements = dict(zip(devices_used(function), devices, strict=False))
    shardings, options = _relocate(function, replacements.__getitem__)
    if not replacements:
        # No argument names a device: JAX would choose a local one.
        shardings = [SingleDeviceSharding(devices[0])] * len(shardings)
    return function.lower(shardings, options, platform)


def _relocate(function: JittedFunction, move: DeviceMap) -> tuple[list[Sharding | None], dict[str, Any]]:
    """The shardings of the arguments and the options of `jit`, with their devices replaced."""
    shardings = [
        None if a.sharding is None or not a.committed else _move_sharding(a.sharding, move)
        for a in function.args
    ]
    options = {k: v if k == "jaxpr" else _move_value(v, move) for k, v in function.options.items()}
    jaxpr = jaxprs.map_equations(function.jaxpr, lambda eqn: _move_equation(eqn, move))
    return shardings, {**options, "jaxpr": jaxpr}


def _move_equation(eqn: JaxprEqn, move: DeviceMap) -> JaxprEqn | None:
    name = jaxprs.primitive_name(eqn)
    if name in PRINTS:
        return None  # it changes no result
    if name in CALLBACKS:
        raise HasCallback(f"{name} ({jaxprs.source_place(eqn)})")
    with_jaxpr = {sub.param for sub in jaxprs.sub_jaxprs(eqn)}
    params = {k: v if k in with_jaxpr else _move_value(v, move) for k, v in eqn.params.items()}
    return jaxprs.replace_eqn(eqn, params=params)


def _move_value(value: Any, move: DeviceMap) -> Any:
    """A parameter of any type, with the devices in it replaced."""
    if isinstance(value, Mesh):
        return _move_mesh(value, move)
    if isinstance(value, Sharding):
        return _move_sharding(value, move)
    if isinstance(value, jax.Device):
        return move(value)
    if type(value) in (tuple, list):
        return type(value)(_move_value(v, move) for v in value)
    return value


def _move_mesh(mesh: Mesh, move: DeviceMap) -> Mesh:
    if mesh.empty:
        return mesh
    devices = np.array([move(d) for d in mesh.devices.flat]).reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def _move_sharding(sharding: Sharding, move: DeviceMap) -> Sharding:
    if isinstance(sharding, NamedSharding):
        if not isinstance(sharding.mesh, Mesh):
            return sharding  # an abstract mesh has no devices
        mesh = _move_mesh(sharding.mesh, move)
        return NamedSharding(mesh, sharding.spec, memory_kind=_memory_kind(sharding))
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(move(device), memory_kind=_memory_kind(sharding))
    return _move_xla_sharding(sharding, move)


def _memory_kind(sharding: Sharding) -> str | None:
    """The memory kind, unless it is the default one, whose name differs between platforms."""
    kind: str | None = sharding.memory_kind
    device: Any = next(iter(sharding.device_set))
    default = device.default_memory().kind
    return None if kind == default else kind


def _move_xla_sharding(sharding: Any, move: DeviceMap) -> Sharding:
    """Moves a sharding that XLA has chosen."""
    if not isinstance(sharding, sharding_impls.GSPMDSharding):
        raise NotImplementedError(f"{sharding} cannot be moved to other devices: use NamedSharding")
    make: Any = sharding_impls.GSPMDSharding
    moved: Sharding = make(tuple(map(move, sharding._device_assignment)), sharding._hlo_sharding)
    return moved
