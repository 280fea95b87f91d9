"""User contexts that policyc adds to the key of JAX's caches of traced and compiled functions.

A context created during a trace enters the key only after that trace, so the next call would trace again. All contexts
are therefore created here, when policyc is first imported in a process that has JAX. `jax.extend` is imported for the
same reason: new versions of it import Pallas, whose options are such contexts too.

Each is a context manager that sets its value in one thread. `set_global` sets it in all threads that have no value of
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
"""The active `rounding_step`."""
