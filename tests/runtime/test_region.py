"""The life of a region, with a driver that is scripted: when it captures, what it replays, what makes it give up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.runtime.region import counts
from pygraph.runtime.variants import MAX_TRACKED
from tests.runtime.fake import FakeDriver, make


@pytest.fixture(autouse=True)
def _clean_counters() -> None:
    counts.clear()


def test_cold_then_warm_then_captured_then_replayed() -> None:
    region, driver = make()
    assert region.record.state == "cold"
    seen = []
    for call in range(5):
        args = [torch.full((4,), float(call))]
        outputs = region(args)
        assert args == []
        assert torch.equal(outputs[0], torch.full((4,), 2.0 * call))
        seen.append((region.record.state, driver.captures))
    assert seen == [("warm", 0), ("replay", 2), ("replay", 2), ("replay", 2), ("replay", 2)]
    assert driver.executables[0].replays == 4  # one compared, three that answered
    assert (region.record.uncaptured, region.record.replays, region.record.captures) == (2, 3, 1)
    assert counts == {"captures": 1, "replays": 3, "uncaptured": 2}


def test_captured_at_the_nth_occurrence() -> None:
    region, driver = make(capture_after=4)
    captures = []
    for _ in range(5):
        region([torch.ones(4)])
        captures.append(driver.captures)
    assert captures == [0, 0, 0, 2, 2]


def test_scalars_are_keys_and_strides_are_variants() -> None:
    region, driver = make()
    square = torch.arange(16.0).view(4, 4)
    calls: list[list[Any]] = [[square, 1], [square, 2], [square.t(), 1], [square.double(), 1]]
    for _ in range(3):
        for args in calls:
            x, n = args
            assert torch.equal(region(list(args))[0], x * 2 + n)
    assert region.record.captures == 4
    assert region.record.keys == 2
    assert region.record.replays == 4
    assert [e.replays for e in driver.executables] == [2, 2, 2, 2]


def test_slots_are_reused_across_sizes() -> None:
    region, driver = make()
    for n in (4, 5, 6):
        for _ in range(3):
            assert torch.equal(region([torch.ones(n), n])[0], torch.full((n,), 2.0 + n))
    assert region.record.captures == 3
    assert driver.captures == 2 + 1 + 1


def test_floats_that_change_on_each_call_cost_bounded_memory() -> None:
    region, driver = make()
    for call in range(MAX_TRACKED + 50):
        region([torch.ones(2), call / 7])
    assert driver.captures == 0
    assert len(region._variants) == MAX_TRACKED
    assert region.record.keys == MAX_TRACKED + 50


def test_an_evicted_variant_has_to_run_twice_as_often() -> None:
    region, driver = make(max_captures=2)
    captures = []
    for n in (1, 1, 2, 2, 3, 3, 1, 1, 1):
        region([torch.ones(n)])
        captures.append(region.record.captures)
    assert captures == [0, 1, 1, 2, 2, 3, 3, 3, 4]
    assert [e.closed for e in driver.executables] == [True, True, False, False]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), max_size=40))
def test_the_captures_that_were_used_last_stay(sizes: list[int]) -> None:
    region, driver = make(max_captures=2)
    recent: list[int] = []
    for n in sizes:
        assert torch.equal(region([torch.ones(n)])[0], torch.full((n,), 2.0))
        signatures: list[Any] = [executable.expected for executable in driver.executables if not executable.closed]
        held = sorted(size for (((size,), *_),) in signatures)
        recent = [*(size for size in recent if size != n), *([n] if n in held else [])][-2:]
        assert held == sorted(recent)
    region.close()
    assert all(executable.closed for executable in driver.executables)


def test_an_executable_that_declines_runs_uncaptured() -> None:
    region, driver = make()
    for _ in range(2):
        region([torch.ones(2)])
    driver.declines = lambda args: True
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert (region.record.replays, region.record.uncaptured, driver.captures) == (0, 3, 2)
    driver.declines = lambda args: False
    region([torch.ones(2)])
    assert region.record.replays == 1


@pytest.mark.parametrize(("sensitive", "captures"), [(frozenset(), 1), (frozenset({0}), 2)])
def test_storage_offsets_are_variants_only_where_they_were_baked(sensitive: frozenset[int], captures: int) -> None:
    data = torch.arange(64.0)
    driver = FakeDriver()
    driver.sensitive = sensitive
    region, _ = make(driver=driver)
    for offset in (0, 0, 0, 16, 16, 16, 0, 16):
        x = data[offset : offset + 8]
        assert torch.equal(region([x])[0], x * 2)
    assert region.record.captures == captures
    assert region.record.replays == 8 - 2 * captures


@pytest.mark.parametrize(
    "odd", [torch.ones(2, 2).to_sparse(), torch.Generator(), "text", torch.ones(2, dtype=torch.complex64).conj()]
)
def test_arguments_that_are_no_plain_tensors_are_never_captured(odd: object) -> None:
    def ignore(args: list[Any]) -> Sequence[Any]:
        x = args[0]
        args.clear()
        return [x + 1]

    region, driver = make(ignore)
    for _ in range(4):
        assert region([torch.ones(2), odd])[0].tolist() == [2, 2]
    assert driver.captures == 0
    assert counts["refused.argument-type"] == 1


class _Counting(TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_operators_are_seen() -> None:
    region, driver = make()
    for _ in range(3):
        with _Counting() as mode:
            region([torch.ones(2)])
        assert mode.operators > 1
    assert driver.captures == 0
    for _ in range(3):
        region([torch.ones(2)])
    with _Counting() as mode:
        region([torch.ones(2)])
    assert mode.operators > 1
    assert region.record.replays == 2  # a watched call counts as one that ran uncaptured


def test_under_a_function_transform_nothing_is_captured_or_replayed() -> None:
    region, driver = make()
    xs = torch.arange(6.0).view(3, 2)
    for _ in range(3):
        assert torch.equal(torch.vmap(lambda x: region([x])[0])(xs), xs * 2)
    assert driver.captures == 0
    for _ in range(3):
        region([torch.ones(2)])
    assert torch.equal(torch.vmap(lambda x: region([x])[0])(xs), xs * 2)


def test_close_frees_everything_and_leaves_the_region_usable() -> None:
    region, driver = make()
    for n in (2, 3):
        for _ in range(3):
            region([torch.ones(n)])
    region.close()
    assert all(executable.closed for executable in driver.executables)
    assert len(region._variants) == 0
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert (region.record.state, region.record.reason) == ("uncaptured", "closed")
