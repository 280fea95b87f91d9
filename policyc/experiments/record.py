"""Records the loss of a program: its jaxpr, and the values of its inputs and constants in a few steps.

Search and bisect evaluate the recorded loss many times on the same batches.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.pipeline import PlannedLoss
from policyc.compiler.planning.plan import Plan
from policyc.compiler.sites.site_list import Sites
from policyc.experiments import runner
from policyc.experiments.program import Program
from policyc.experiments.taps import first_loss
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.loader import parse

KEEP = "* -> keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """The values of one call of a loss: its differentiated inputs, and what it closes over (its batch)."""

    inputs: tuple[Any, ...]
    consts: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoss:
    """A loss and its recorded calls. All calls are evaluated with the parameters of the last one."""

    planned: PlannedLoss
    calls: tuple[RecordedCall, ...]

    @property
    def plan(self) -> Plan:
        """The plan that keeps everything."""
        return self.planned.plan

    @property
    def sites(self) -> Sites:
        return self.plan.sites

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The parameters of the last call."""
        return self.calls[-1].inputs

    def loss_of(self, values: Sequence[Any]) -> jax.Array:
        """Returns the loss from the results of its jaxpr, in fp32. It is the first leaf of the function's result."""
        return first_loss(self.planned.traced.assemble_result(values)).astype(jnp.float32)

    def plain_loss(self, inputs: Sequence[Any], consts: Sequence[Any]) -> jax.Array:
        return self.loss_of(jaxprs.evaluate_with_consts(self.sites.jaxpr, consts, *inputs))


def record_loss(program: Program, batches: int, after: int = 0) -> RecordedLoss:
    """Runs a program until its first loss with a GEMM has been evaluated `batches` times, then stops it.

    The first `after` evaluations do not count.

    Raises `runner.NoLoss` if the program differentiates no loss, and ValueError if no loss has a GEMM or none is
    evaluated.
    """
    recorder = _Recorder(batches, after)
    with _stop_by_signal(recorder), contextlib.suppress(runner.StopAfterTrace):
        result = runner.run(
            program,
            parse(KEEP),
            ExecutionOptions(backend="emulate"),
            lambda _plan: None,
            compile=recorder.compile,
        )
        if result.session is None or not result.session.plans:
            raise runner.NoLoss(saw_forward_mode=result.saw_forward_mode)
    return recorder.result()


class _Recorder:
    """Collects the calls of one loss."""

    def __init__(self, batches: int, after: int) -> None:
        self._batches, self._after = batches, after
        self._planned: PlannedLoss | None = None
        self._calls: list[RecordedCall] = []
        self._impls: list[Any] = []
        self.stop: Callable[[], None] = lambda: None

    def compile(self, planned: PlannedLoss) -> Callable[..., Any]:
        """Returns the unchanged loss. The first loss with a GEMM also stores the values of its calls.

        That loss is recognized by the hash of its sites: outside `jit`, a loss is traced again at every step.
        """
        if not len(planned.plan.sites):
            return planned.compile()
        self._planned = self._planned or planned
        if planned.plan.sites.hash != self._planned.plan.sites.hash:
            return planned.compile()
        jaxpr = planned.traced.jaxpr

        def recorded(*args: Any) -> Any:
            inputs = planned.call.inputs(args)
            consts = [jnp.asarray(x) for x in jaxpr.consts]
            self._impls = [_key_impl(x) for x in consts]
            # A callback cannot take typed random keys.
            data = [
                x if i is None else jax.random.key_data(x) for x, i in zip(consts, self._impls, strict=True)
            ]
            jax.debug.callback(self._store, *jax.lax.stop_gradient([*inputs, *data]))
            return planned.traced.run(jaxpr, inputs)

        return recorded

    def _store(self, *values: Any) -> None:
        assert self._planned is not None
        if self._after:
            self._after -= 1
        elif len(self._calls) < self._batches:
            arrays = [np.array(value) for value in values]
            count = len(self._planned.traced.paths)
            self._calls.append(RecordedCall(inputs=tuple(arrays[:count]), consts=tuple(arrays[count:])))
        if len(self._calls) >= self._batches:
            self.stop()

    def result(self) -> RecordedLoss:
        jax.effects_barrier()
        planned = self._planned
        if planned is None:
            raise ValueError("no loss of the program has a GEMM")
        if not self._calls:
            raise ValueError("the program ended before its loss was evaluated")
        calls = [
            RecordedCall(inputs=call.inputs, consts=self._with_keys(call.consts)) for call in self._calls
        ]
        return RecordedLoss(planned=planned, calls=tuple(calls))

    def _with_keys(self, consts: Sequence[np.ndarray]) -> tuple[Any, ...]:
        """Restores the typed random keys among the constants."""
        return tuple(
            x if impl is None else jax.random.wrap_key_data(jnp.asarray(x), impl=impl)
            for x, impl in zip(consts, self._impls, strict=True)
        )


def _key_impl(x: Any) -> Any:
    """The PRNG implementation of an array of typed keys; None for other arrays."""
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


@contextlib.contextmanager
def _stop_by_signal(recorder: _Recorder) -> Iterator[None]:
    """Lets the recorder end the program from a callback's thread.

    The program runs compiled code and may never call policyc again. A signal handler runs in the main thread, wherever
    the program is, and raises there.
    """
    ident = threading.main_thread().ident
    assert ident is not None
    assert threading.current_thread() is threading.main_thread(), "signals are the main thread's"
    is_running = True

    def send() -> None:
        if is_running:
            signal.pthread_kill(ident, signal.SIGUSR2)

    def raise_stop(_number: int, frame: FrameType | None) -> None:
        nonlocal is_running
        if not is_running:
            return
        if _would_be_lost(frame):
            threading.Timer(_RETRY_SECONDS, send).start()
            return
        is_running = False
        raise runner.StopAfterTrace

    previous = signal.signal(signal.SIGUSR2, raise_stop)
    recorder.stop = send
    try:
        yield
    finally:
        is_running = False
        jax.effects_barrier()
        signal.signal(signal.SIGUSR2, previous)


_RETRY_SECONDS = 0.01


def _would_be_lost(frame: FrameType | None) -> bool:
    """Whether an exception raised at this frame would fail to end the program.

    A JAX callback may run in the main thread, where its exceptions become XLA errors. Python prints and ignores
    exceptions from object finalizers.
    """
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if frame.f_code is _Recorder._store.__code__ or frame.f_code.co_name == "__del__":
            return True
        if name in ("jax._src.callback", "_weakrefset", "weakref"):
            return True
        frame = frame.f_back
    return False
