"""The names of `policyc` itself: all of them resolve."""

from __future__ import annotations

import pytest

import policyc


@pytest.mark.parametrize("name", policyc.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(policyc, name) is not None
    assert name in dir(policyc)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        policyc.quantise  # noqa: B018
