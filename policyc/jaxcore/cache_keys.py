"""What policyc adds to the key of JAX's caches of traced and compiled functions.

A context that is made during a trace is part of the key only after it, and the next call would trace again. So all are
made here, when policyc is imported in a process that has JAX. Options of Pallas, which new versions of `jax.extend`
import, are such contexts too.

Each is a context manager, which sets its value in one thread. `set_global` sets it in all threads that have no value of
their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core

_make: Any = jax.make_user_context

POLICY = _make()
"""The policies that are active."""
PHASES = _make()
"""The phases of all schedules."""
ROUNDING_STEP = _make()
"""The `rounding_step` that is entered."""
