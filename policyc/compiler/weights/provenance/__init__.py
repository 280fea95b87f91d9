"""Exact maps from loop iterations to indices in a parameter, however a program slices, reshapes or gathers it."""

__all__ = ["elements", "graph", "integers"]
