"""Regions as an operator of a service sees them: log lines, events, and counters by region and reason."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import CaptureError, ReplayError
from pygraph.report import model
from pygraph.runtime.reasons import REASONS
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import BYTES, FakeDriver, double

ROOT = Path(pygraph.__file__).parent


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    pygraph.reset()


@pytest.fixture
def events() -> Iterator[list[pygraph.Event]]:
    seen: list[pygraph.Event] = []
    end = pygraph.on_event(seen.append)
    yield seen
    end()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def region(driver: FakeDriver, name: str = "graph0.region0", clock: Clock | None = None, **options: Any) -> Region:
    return Region(double, driver, name=name, clock=clock or Clock(), options=RegionOptions(**options))


def refusing(reason: str) -> FakeDriver:
    driver = FakeDriver()
    driver.refuses = CaptureError(reason, "as asked")
    return driver


def call(made: Region, size: int, *scalars: int) -> None:
    assert made([torch.ones(size), *scalars])[0].tolist() == [2.0 + sum(scalars)] * size


def facts(events: Sequence[pygraph.Event]) -> list[tuple[Any, ...]]:
    return [(each.kind, each.reason, each.sizes) for each in events]


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "pygraph.runtime" and each.levelno == level]


def test_captures_and_evictions_are_events_and_lines(
    events: list[pygraph.Event], caplog: pytest.LogCaptureFixture
) -> None:
    clock, driver = Clock(), FakeDriver()

    def slow(_: object) -> None:
        clock.now += 0.25

    made = region(driver, clock=clock, memory_limit=BYTES)
    driver.edits = [slow]
    with caplog.at_level(logging.INFO, "pygraph.runtime"):
        for size in (3, 4):
            for _ in range(4):
                call(made, size)
    assert facts(events) == [
        ("captured", "", ((3,),)),
        ("evicted", "memory-limit", ((3,),)),
        ("captured", "", ((4,),)),
    ]
    first = events[0]
    assert (first.region, first.duration_us, first.nbytes) == ("graph0.region0", 250_000, 64)
    assert events[2].duration_us == 0
    assert lines(caplog, logging.INFO) == [
        "graph0.region0: captured for (3,) in 250.0 ms",
        "graph0.region0: evicted for (3,): memory-limit",
        "graph0.region0: captured for (4,) in 0.0 ms",
    ]
    assert pygraph.region_counters()["graph0.region0"] == {
        "captures": 2,
        "evicted": 1,
        "evicted.memory-limit": 1,
        "replays": 4,
        "uncaptured": 4,
    }
    assert pygraph.counters()["evicted.memory-limit"] == 1


def test_sizes_of_parameters_are_left_out(events: list[pygraph.Event]) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    made = Region(lambda args: [args[0] @ args[1]], FakeDriver(), name="linear")
    with torch.no_grad():
        for _ in range(2):
            made([torch.ones(3, 2), weight])
    assert [event.sizes for event in events] == [((3, 2),)]


def test_a_region_that_is_left_uncaptured_warns_once_with_what_to_do(
    events: list[pygraph.Event], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "pygraph.runtime"):
        made = region(refusing("host-read"))
        for _ in range(6):
            call(made, 3)
    assert facts(events) == [("refused", "host-read", ((3,),)), ("left-uncaptured", "host-read", ())]
    assert "as asked" in events[1].detail
    (warning,) = lines(caplog, logging.WARNING)
    assert warning.startswith("graph0.region0 is left uncaptured for good: host-read: as asked")
    assert REASONS["host-read"].advice in warning
    assert lines(caplog, logging.DEBUG) == ["graph0.region0: not captured for (3,): host-read: as asked"]
    assert pygraph.region_counters()["graph0.region0"]["left-uncaptured.host-read"] == 1


def test_sizes_that_are_left_uncaptured_warn_once_while_the_region_goes_on(
    events: list[pygraph.Event], caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    made = region(driver)
    for _ in range(3):
        call(made, 2)
    driver.refuses = CaptureError("survivor")
    with caplog.at_level(logging.INFO, "pygraph.runtime"):
        for size in (3, 4):
            for _ in range(3):
                call(made, size)
    left = [event for event in events if event.kind == "left-uncaptured"]
    assert facts(left) == [("left-uncaptured", "survivor", ((3,),)), ("left-uncaptured", "survivor", ((4,),))]
    assert [line[:44] for line in lines(caplog, logging.WARNING)] == ["graph0.region0 is left uncaptured for (3,): "]
    assert [line[:44] for line in lines(caplog, logging.INFO)] == ["graph0.region0 is left uncaptured for (4,): "]
    call(made, 2)
    assert made.record.replays == 2


def test_a_replay_that_broke_its_contract_is_an_event(
    events: list[pygraph.Event], caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    made = region(driver)

    def fail(args: list[Any]) -> Sequence[Any]:
        raise ReplayError("launch failed")

    for _ in range(3):
        call(made, 2)
    driver.kernel = fail
    with pytest.raises(ReplayError):
        made([torch.ones(2)])
    assert facts(events)[1:] == [("refused", "replay-failed", ()), ("left-uncaptured", "replay-failed", ())]
    assert "launch failed" in lines(caplog, logging.WARNING)[0]


def test_a_region_that_waits_as_long_as_ever_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    made = region(refusing("out-of-memory"))
    with caplog.at_level(logging.INFO, "pygraph.runtime"):
        for _ in range(300):
            call(made, 3)
    assert lines(caplog, logging.INFO) == []
    (warning,) = lines(caplog, logging.WARNING)
    assert "out-of-memory" in warning
    assert "tried again every 64 calls or 30 s" in warning


def test_all_regions_together_warn_ten_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, driver = Clock(), refusing("host-read")
    with caplog.at_level(logging.INFO, "pygraph.runtime"):
        for number in range(25):
            made = region(driver, f"region{number}", clock)
            for _ in range(3):
                call(made, 3)
        assert (len(lines(caplog, logging.WARNING)), len(lines(caplog, logging.INFO))) == (10, 15)
        clock.now += 61
        made = region(driver, "later", clock)
        for _ in range(3):
            call(made, 3)
    assert lines(caplog, logging.WARNING)[10].startswith("later is left uncaptured")


def test_a_callback_that_raises_breaks_no_call_and_is_logged_once(
    events: list[pygraph.Event], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: pygraph.Event) -> None:
        raise ValueError("a mistake of the user's")

    end = pygraph.on_event(broken)
    made = region(FakeDriver())
    for size in (3, 4):
        for _ in range(3):
            call(made, size)
    end()
    with pytest.raises(TypeError, match="not 3"):
        pygraph.on_event(3)  # type: ignore[arg-type]
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert [each.exc_info[1].args for each in errors if each.exc_info] == [("a mistake of the user's",)]
    assert [event.kind for event in events] == ["captured", "captured"]


def test_a_callback_is_told_nothing_by_replays_and_after_its_end() -> None:
    seen: list[pygraph.Event] = []
    end, made = pygraph.on_event(seen.append), region(FakeDriver())
    for _ in range(50):
        call(made, 3)
    assert len(seen) == 1
    end()
    end()
    for _ in range(2):
        call(made, 4)
    assert (len(seen), made.record.captures) == (1, 2)


def test_a_callback_may_free_what_it_is_told_of() -> None:
    def free(event: pygraph.Event) -> None:
        pygraph.release()

    end, made = pygraph.on_event(free), region(FakeDriver())
    for _ in range(6):
        call(made, 3)
    end()
    for _ in range(3):
        call(made, 3)
    assert made.record.replays == 1
    assert made.record.state == "replay"


def test_every_reason_that_the_runtime_gives_is_known_and_documented() -> None:
    given = re.compile(r'(?:CaptureError|Refusal|_unsteady)\(\s*"([a-z-]+)"|Refusal\.at\(\w+, "([a-z-]+)"')
    folders = ("runtime/**/*.py", "debug/*.py", "graphs/*.py")
    texts = [path.read_text() for folder in folders for path in ROOT.glob(folder)]
    found = {first or second for text in texts for first, second in given.findall(text)}
    assert len(found) > 40
    assert found - REASONS.keys() == {"strict", "uncaptured"}  # of graphs: an error for the caller, and a state
    page = (ROOT.parent / "docs/debugging.md").read_text()
    assert {code for code in REASONS if f"`{code}`" not in page} == set()


# -- compiled programs -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_a_compiled_program_that_is_alive_keeps_its_report(events: list[pygraph.Event]) -> None:
    compiled = torch.compile(lambda x: (x @ x).relu(), backend="pygraph")
    x = torch.ones(4, 4)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    first = pygraph.reports()[0].name
    name = f"{first}.region0"
    assert [(event.kind, event.region, event.sizes) for event in events] == [("captured", name, ((4, 4),))]
    for _ in range(300):
        model.open_report("inference")
    assert pygraph.reports()[0].name == first
    assert len(pygraph.reports()) == 257
    assert pygraph.region_counters()[name]["replays"] == 1
    del compiled
    torch._dynamo.reset()
    gc.collect()
    assert pygraph.reports()[0].name != first
    assert name not in pygraph.region_counters()
