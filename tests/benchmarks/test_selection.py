"""The benchmark of measured selection, on the host driver: a candidate that is far faster is picked."""

from __future__ import annotations

import pytest

from benchmarks.selection import Program, decide


@pytest.mark.parametrize("caller", ["steady", "waits each 16"])
def test_a_replay_that_is_far_slower_is_not_used(caller: str) -> None:
    found = decide(Program({"cpu": (16, 40)}, slowed=30.0), caller, "cpu")
    assert (found["choice"], found["right"]) == ("uncaptured", True)
    assert found["measured_us"]["replay"] > 10 * found["measured_us"]["uncaptured"]
    assert found["apart_us"]["replay"] > 10 * found["apart_us"]["uncaptured"]
