"""All private modules of JAX that policyc uses. No other module imports from `jax._src`.

They may change with any release of JAX. docs/reference/internals.md says what each is used for.
"""

from __future__ import annotations

from jax._src import config, core, dispatch, pjit, sharding_impls
from jax._src import source_info_util as sources
from jax._src import traceback_util as tracebacks
from jax._src.interpreters import ad, partial_eval
from jax._src.sharding_impls import UNSPECIFIED  # type: ignore[attr-defined]  # JAX does not export it

try:
    from jax._src import flattree  # type: ignore[attr-defined]  # not in JAX 0.10
except ImportError:
    flattree: object = None  # type: ignore[no-redef]

__all__ = [
    "UNSPECIFIED",
    "ad",
    "config",
    "core",
    "dispatch",
    "flattree",
    "partial_eval",
    "pjit",
    "sharding_impls",
    "sources",
    "tracebacks",
]
