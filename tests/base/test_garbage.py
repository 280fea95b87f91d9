"""The garbage collector is paused inside, and is afterwards what it was."""

from __future__ import annotations

import contextlib
import gc

import pytest

from policyc.base.garbage import paused_collection


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_paused_and_restored(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"enabled": was_enabled}
    monkeypatch.setattr(gc, "isenabled", lambda: states["enabled"])
    monkeypatch.setattr(gc, "disable", lambda: states.update(enabled=False))
    monkeypatch.setattr(gc, "enable", lambda: states.update(enabled=True))
    with contextlib.suppress(ValueError), paused_collection():
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled() is was_enabled
