"""Hooks into JAX's transformations and caches."""
