"""Fixtures for tests of regions: trials of one test are none of the next one's."""

from __future__ import annotations

import pytest


@pytest.fixture
def own_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other tests are none of ours."""
    from pygraph.runtime import measuring
    from pygraph.runtime.selection.queue import TrialQueue

    monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
