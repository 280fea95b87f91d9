"""Scans of random programs, split into ranges of layers: the same bits.

The programs are compiled in full. Compiled quickly, a split and an unsplit program may differ in the last bit of a sum,
and stochastic rounding then draws other random bits.
"""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.compiler.test_properties import DEEP, check_splitting, seeds


@pytest.mark.slow
@DEEP
@given(seeds)
def test_a_split_scan_equals_the_unsplit_one_in_any_program(seed: int) -> None:
    check_splitting(seed)
