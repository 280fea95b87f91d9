"""The interpreter for other processes."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
"""Starts a command line of this Python. With `-P`, nothing is imported from the folder in which it starts."""
