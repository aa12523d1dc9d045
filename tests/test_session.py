"""``pygraph.Session``: what is compiled in it is limited, frozen, measured and freed together, and nothing else is."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.errors import OptionError
from pygraph.runtime import live
from pygraph.runtime.live import owned_by
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.fake import BYTES, FakeDriver, double
from tests.small import compiled

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def session() -> Iterator[pygraph.Session]:
    with pygraph.Session() as entered:
        yield entered


def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


def program(function: Callable[..., Any] = scale) -> Callable[..., None]:
    """Call a compiled program, with so many rows, so often; results are right."""
    run = torch.compile(function, backend="pygraph", dynamic=True, options={"ledger": False})

    def call(rows: int, times: int = 1) -> None:
        for _ in range(times):
            x, w = torch.randn(rows, 8), torch.randn(8, 8)
            with torch.no_grad():
                torch.testing.assert_close(run(x, w), function(x, w))

    return call


def counted(session: pygraph.Session, what: str) -> int:
    return sum(counters.get(what, 0) for counters in session.stats().values())


def region_in(session: pygraph.Session, driver: FakeDriver, **options: Any) -> Region:
    with session.owning():
        return Region(double, driver, name="toy", options=RegionOptions(**options))


def call(region: Region, *sizes: int) -> None:
    for size in sizes:
        assert region([torch.ones(size)])[0].tolist() == [2.0] * size


# -- whose a region is -------------------------------------------------------------------------------------------------


def test_a_program_belongs_to_the_session_that_is_entered_when_it_is_compiled(session: pygraph.Session) -> None:
    inside = program()
    inside(2, 3)
    with pygraph.Session() as other:
        another = program(lambda x, w: scale(x, w) + 1)
        another(2, 3)
        inside(2, 1)
        assert [len(each.stats()) for each in (session, other)] == [1, 1]
        assert (counted(session, "replays"), counted(other, "replays")) == (2, 1)
    assert len(session.stats()) == 1


def test_a_program_that_is_prepared_in_the_background_belongs_to_the_session() -> None:
    session = pygraph.Session()
    run = torch.compile(scale, backend="pygraph", dynamic=True)
    with torch.no_grad():
        future = session.prepare(run, {(0, 0): [2, 3]}, args=(torch.randn(2, 8), torch.randn(8, 8)), background=True)
    assert future.result(60).captured == ((3,), (2,))
    assert counted(session, "captures") == 2
    assert session.memory().instances > 0
    session.close()
    assert session.memory().instances == 0


def test_a_preparation_in_the_background_captures_nothing_in_a_frozen_session() -> None:
    session = pygraph.Session()
    session.freeze()
    run = torch.compile(scale, backend="pygraph", dynamic=True)
    with torch.no_grad():
        future = session.prepare(run, {(0, 0): [2, 3]}, args=(torch.randn(2, 8), torch.randn(8, 8)), background=True)
    prepared = future.result(60)
    assert prepared.captured == ()
    assert set(prepared.refused.values()) == {"frozen"}


def test_what_is_compiled_outside_belongs_to_none(session: pygraph.Session) -> None:
    before = live.regions()  # holds them
    thread = threading.Thread(target=lambda: program()(2, 3))
    thread.start()
    thread.join()
    assert len(live.regions()) == len(before) + 1
    assert session.stats() == {}
    assert session.release() == 0


def test_the_backward_graph_belongs_to_the_session_of_the_forward_one() -> None:
    with pygraph.Session() as session:
        run = compiled(scale, ledger=False)
        w = torch.randn(8, 8, requires_grad=True)
        loss = run(torch.randn(2, 8), w).sum()
        with owned_by(live.EVERYBODY):  # as on a thread of autograd's
            loss.backward()
        assert sorted(name.split(".")[0].rpartition("_")[2] for name in session.stats()) == ["backward", "forward"]


def test_leaving_the_block_frees_its_captures_for_good() -> None:
    with pygraph.Session() as session:
        inside = program()
        inside(2, 3)
        assert counted(session, "captures") == 1
    before = pygraph.counters()["uncaptured"]
    inside(2, 4)
    assert pygraph.counters()["uncaptured"] - before == 4
    assert session.memory().instances == 0
    driver = FakeDriver()
    region = region_in(session, driver)
    call(region, 1, 1, 1)
    assert not driver.executables


def test_leaving_it_by_an_error_closes_it_too() -> None:
    with contextlib.suppress(ZeroDivisionError), pygraph.Session() as session:
        program()(2, 3)
        raise ZeroDivisionError
    assert session.memory().instances == 0
    assert live.owner() is live.EVERYBODY


def test_it_may_be_left_on_another_thread_and_is_entered_once() -> None:
    session = pygraph.Session()
    with pytest.raises(RuntimeError, match="entered once"), session, session:
        raise AssertionError
    assert session.memory().instances == 0
    other, inside, failed = pygraph.Session(), program(), list[BaseException]()

    def leave() -> None:
        try:
            other.__exit__(None, None, None)
        except ValueError as error:
            failed.append(error)

    other.__enter__()
    inside(2, 3)
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert failed == []
    assert other.memory().instances == 0
    assert live.owner() is live.EVERYBODY
    with pytest.raises(RuntimeError, match="entered once"):
        other.__enter__()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_captures_of_a_session_make_room_for_each_other_alone() -> None:
    driver = FakeDriver()
    outside = Region(double, driver, name="outside", options=RegionOptions())
    call(outside, 1, 1, 2, 2)
    session = pygraph.Session(memory_limit=2 * BYTES)
    one, other = region_in(session, driver), region_in(session, driver)
    call(one, 1, 1)
    call(other, 1, 1, 2, 2)
    assert [len(region.captures()) for region in (outside, one, other)] == [2, 0, 2]
    assert session.memory().instances == 2 * BYTES


def test_the_option_of_a_program_wins() -> None:
    driver, session = FakeDriver(), pygraph.Session(memory_limit=2 * BYTES)
    region = region_in(session, driver, memory_limit=BYTES)
    call(region, 1, 1, 2, 2)
    assert len(region.captures()) == 1


def test_memory_is_that_of_each_region(session: pygraph.Session) -> None:
    inside = program(lambda x, w: torch.cumsum(scale(x, w) @ w, 0) * 2)
    inside(4, 3)
    ((name, memory),) = session.memory().regions.items()
    record = pygraph.reports()[-1].regions[0].record
    assert record is not None
    assert name == record.name
    assert (memory.captures, memory.instances, memory.workspace) == (1, record.held_bytes, record.workspace_bytes)
    assert memory.instances > 0
    assert memory.workspace > 0
    text = str(session.memory())
    assert name in text
    assert "in all" in text


def test_regions_of_one_name_are_added_up() -> None:
    driver, session = FakeDriver(), pygraph.Session()
    regions = [region_in(session, driver) for _ in range(2)]
    for region in regions:
        call(region, 1, 1)
    assert session.memory().regions["toy"].captures == 2
    assert session.memory().instances == 2 * BYTES
    assert session.stats()["toy"]["captures"] == 2


@pytest.mark.parametrize("limit", ["much", 0, -1, True, "2 GB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: Any) -> None:
    with pytest.raises(OptionError, match="memory_limit"):
        pygraph.Session(memory_limit=limit)


# -- frozen ------------------------------------------------------------------------------------------------------------


def test_a_frozen_session_captures_nothing_more_and_says_so_once_a_size(
    session: pygraph.Session, caplog: pytest.LogCaptureFixture
) -> None:
    inside, seen = program(), list[pygraph.Event]()
    inside(2, 3)
    session.freeze()
    end = pygraph.on_event(seen.append)
    with caplog.at_level(logging.DEBUG, "pygraph.runtime"):
        inside(3, 5)
        inside(4, 5)
    end()
    assert (counted(session, "captures"), counted(session, "refused.frozen")) == (1, 2)
    assert [(event.kind, event.reason, event.sizes[0][0]) for event in seen] == [
        ("refused", "frozen", 3),
        ("refused", "frozen", 4),
    ]
    assert sum("frozen" in record.getMessage() for record in caplog.records) == 2
    before = counted(session, "replays")
    inside(2, 3)
    assert counted(session, "replays") - before == 3
    session.thaw()
    inside(3, 2)
    assert counted(session, "captures") == 2


def test_sizes_that_are_prepared_in_vain_say_why(session: pygraph.Session) -> None:
    run = torch.compile(scale, backend="pygraph", dynamic=True)
    args = (torch.randn(2, 8), torch.randn(8, 8))
    with torch.no_grad():
        assert session.prepare(run, {(0, 0): [2, 4]}, args=args).refused == {}
        session.freeze()
        prepared = session.prepare(run, {(0, 0): [2, 3]}, args=args)
    assert prepared.captured == ((2,),)
    assert "frozen" in prepared.refused[(3,)]


# -- release, and the log ----------------------------------------------------------------------------------------------


def test_released_captures_are_made_again_once_it_is_thawed(session: pygraph.Session) -> None:
    inside = program()
    inside(2, 3)
    session.freeze()
    assert session.release() == 1
    assert session.memory().instances == 0
    inside(2, 4)
    assert counted(session, "captures") == 1
    session.thaw()
    inside(2, 3)
    assert counted(session, "captures") == 2


def test_lines_about_its_regions_go_to_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pygraph.Session(log=logging.getLogger("service")):
        program()(2, 3)
    assert {record.name for record in caplog.records if "captured" in record.getMessage()} == {"service"}
