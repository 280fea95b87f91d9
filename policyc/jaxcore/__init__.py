"""The only package that uses JAX internals: jaxprs, their transformation, autodiff hooks, primitive definitions."""

from policyc.jaxcore import versions as versions  # the first import: it checks the version of JAX

__all__ = ["hooks", "jaxprs", "primitives", "shardings", "versions"]
