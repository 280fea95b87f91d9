"""The only package that uses JAX internals: jaxprs, their transformation, autodiff hooks, primitive definitions."""

__all__ = ["autodiff", "define_primitive", "jaxprs", "relocate"]
