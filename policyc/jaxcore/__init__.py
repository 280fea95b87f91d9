"""The only package that uses JAX internals: jaxprs, their transformation, autodiff hooks, primitive definitions."""

from policyc.jaxcore import versions as versions  # the first import: it checks the version of JAX

__all__ = [
    "autodiff",
    "cache_keys",
    "containers",
    "dataflow",
    "define_primitive",
    "derivatives",
    "inline_ptx",
    "integer_rules",
    "jaxprs",
    "lowering",
    "partition",
    "primitives",
    "product_tags",
    "regions",
    "relocate",
    "replay",
    "shardings",
    "transform",
    "versions",
]
