"""Where a capture is, and what it failed in: by the line of the traced function, on its own thread alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pygraph.program.recording import UNKNOWN, Origin
from pygraph.runtime.provenance import Refusal, blame, here, reset_blame, tracing

FIRST, SECOND = Origin(("mm",), ("m.py:1",)), Origin(("late",), ("m.py:2",))


def region(note: Callable[[], Any]) -> list[Any]:
    return [
        note(),
        note(),
    ]


START = region.__code__.co_firstlineno
ORIGINS = {START + 2: FIRST, START + 3: SECOND}


def blamed(error: Exception) -> tuple[str | None, str | None, tuple[str, ...]]:
    """The call that a capture which raised ``error`` is said to have failed in."""
    refusal = Refusal.of(error)
    return refusal.launch, refusal.loc, refusal.nodes


NOBODY = (None, None, ())


def test_the_line_of_the_traced_function_is_found_from_below_but_on_no_other_thread() -> None:
    found: list[Any] = []
    with tracing(region, ORIGINS):
        assert region(lambda: here()) == [FIRST, SECOND]
        thread = threading.Thread(target=lambda: found.extend(region(here)))
        thread.start()
        thread.join()
    assert found == [UNKNOWN, UNKNOWN]


def of_many_lines(probe: Callable[[], int]) -> list[int]:
    found = [probe()]
    for _ in range(2):
        found.append(
            probe()
            + max(
                0,
                probe() * 0,
            )
        )
        try:
            found.append(probe())
            found.append(probe())
        finally:
            found += [probe() for _ in range(1)]
    with threading.Lock():
        found.append(probe())
    return found


def test_lines_are_those_that_python_tells() -> None:
    def probe() -> int:
        frame = sys._getframe(1)
        while frame.f_code is not of_many_lines.__code__:
            frame = frame.f_back
        lines.append(frame.f_lineno)
        assert here() == Origin((str(frame.f_lineno),))
        return 1

    lines: list[int] = []
    start = of_many_lines.__code__.co_firstlineno
    with tracing(of_many_lines, {line: Origin((str(line),)) for line in range(start, start + 30)}):
        of_many_lines(probe)
    assert len(set(lines)) == 7


def test_functions_that_are_alike_but_for_their_lines_are_told_apart() -> None:
    origins = {line: Origin((str(line),)) for line in range(1, 6)}
    for between in (0, 3):
        module: dict[str, Any] = {}
        exec("def twice(probe):\n    first = probe()\n" + "\n" * between + "    return first, probe()\n", module)
        with tracing(module["twice"], origins):
            assert module["twice"](here) == (origins[2], origins.get(3 + between, UNKNOWN))


def test_the_first_call_is_blamed_until_it_is_forgiven() -> None:
    with tracing(region, ORIGINS):
        region(lambda: blame("late"))
        blame("another", SECOND)
        assert blamed(RuntimeError()) == ("late", "m.py:1", ("mm",))
        reset_blame()
        assert blamed(RuntimeError()) == NOBODY
        blame("another", SECOND)
        assert blamed(RuntimeError()) == ("another", "m.py:2", ("late",))
    assert blamed(RuntimeError()) == NOBODY


def test_without_blame_the_line_that_raised_is_named() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError) as raised:
        region(fail)
    with tracing(region, ORIGINS):
        assert blamed(raised.value) == ("mm", "m.py:1", ("mm",))
    with tracing(region, {}):
        assert blamed(raised.value) == NOBODY
