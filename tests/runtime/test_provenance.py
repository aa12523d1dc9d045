"""Where a capture is, and what it failed in: by the line of the traced function, on its own thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.runtime.provenance import (
    UNKNOWN,
    Failure,
    Origin,
    blame,
    blamed,
    here,
    reset_blame,
    tracing,
)

FIRST, SECOND = Origin(("mm",), ("m.py:1",)), Origin(("late",), ("m.py:2",))


def region(note: Callable[[], Any]) -> list[Any]:
    return [
        note(),
        note(),
    ]


START = region.__code__.co_firstlineno
ORIGINS = {START + 2: FIRST, START + 3: SECOND}


def test_the_line_of_the_traced_function_is_found_from_below() -> None:
    with tracing(region, ORIGINS):
        assert region(lambda: here()) == [FIRST, SECOND]


def test_other_threads_are_not_traced() -> None:
    found: list[Any] = []
    with tracing(region, ORIGINS):
        thread = threading.Thread(target=lambda: found.extend(region(here)))
        thread.start()
        thread.join()
    assert found == [UNKNOWN, UNKNOWN]


def test_the_first_call_is_blamed_until_it_is_forgiven() -> None:
    with tracing(region, ORIGINS):
        region(lambda: blame("late"))
        blame("another", SECOND)
        assert blamed(RuntimeError()) == Failure("late", FIRST)
        reset_blame()
        assert blamed(RuntimeError()) is None
        blame("another", SECOND)
        assert blamed(RuntimeError()) == Failure("another", SECOND)
    assert blamed(RuntimeError()) is None


def test_without_blame_the_line_that_raised_is_named() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError) as raised:
        region(fail)
    with tracing(region, ORIGINS):
        assert blamed(raised.value) == Failure("mm", FIRST)
    with tracing(region, {}):
        assert blamed(raised.value) is None
