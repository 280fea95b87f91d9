"""The only package that uses JAX internals: jaxprs, their transformation, autodiff hooks, primitive definitions."""

__all__ = [
    "autodiff",
    "containers",
    "define_primitive",
    "jaxprs",
    "relocate",
    "shardings",
    "transform",
    "versions",
]
