"""Small losses whose layers are stacked, chosen and run in unusual ways. Tests trace them and never compile them."""

from tests.support.stacks import choices, devices, lists, loops, weights
from tests.support.stacks.base import PROGRAMS, Program, X

__all__ = ["PROGRAMS", "Program", "X", "choices", "devices", "lists", "loops", "weights"]
