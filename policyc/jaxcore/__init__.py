"""The only package that uses JAX internals: jaxprs, their transformation, autodiff hooks, primitive definitions."""

__all__ = [
    "autodiff",
    "batching",
    "containers",
    "dataflow",
    "define_primitive",
    "derivatives",
    "jaxprs",
    "lowering",
    "partition",
    "product_tags",
    "relocate",
    "shardings",
    "transform",
    "versions",
]
