"""Where a capture is, and what it failed in: by the line of the traced function, on its own thread alone."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.errors import CaptureError
from pygraph.runtime.provenance import (
    UNKNOWN,
    Failure,
    Origin,
    Refusal,
    blame,
    blamed,
    here,
    merged,
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


def test_a_copy_of_the_function_counts_as_it() -> None:
    copy = types.FunctionType(region.__code__, {})
    with tracing(region, ORIGINS):
        assert copy(here) == [FIRST, SECOND]


def test_outside_of_it_nothing_is_known() -> None:
    assert region(here) == [UNKNOWN, UNKNOWN]
    with tracing(region, ORIGINS):
        assert here() == UNKNOWN
    with tracing(region, {}):
        assert region(here) == [UNKNOWN, UNKNOWN]
    with tracing(len, ORIGINS):
        assert region(here) == [UNKNOWN, UNKNOWN]


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


def test_a_refusal_says_where_it_failed() -> None:
    refusal = Refusal.of(CaptureError("host-read", "it reads"), Failure("lib.late.default", SECOND))
    assert (refusal.launch, refusal.loc, refusal.nodes) == ("lib.late.default", "m.py:2", ("late",))
    assert str(refusal) == "host-read: it reads [lib.late.default at m.py:2]"
    assert Refusal.of(ValueError("no")) == Refusal("capture-raised", "ValueError: no")


def test_many_lines_are_counted() -> None:
    both = merged([FIRST, SECOND, FIRST])
    assert both == Origin(("mm", "late"), ("m.py:1", "m.py:2"))
    assert both.loc == "m.py:1, m.py:2"
    assert Origin((), tuple(f"m.py:{i}" for i in range(5))).loc == "m.py:0, m.py:1, m.py:2, and 2 more"
    assert UNKNOWN.loc is None
