"""Copies of inputs on the host: the checks that each driver passes, random regions, and replays that are under way."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime import measuring
from pygraph.runtime.capturing import Captured, capture
from pygraph.runtime.host import HostDriver, build
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.selection.queue import TrialQueue
from tests.runtime.host.test_random_regions import ARGUMENTS, check, offsets, region_of, steps
from tests.runtime.regions import RegionCall
from tests.runtime.staged import CHECKS, Check, measure, switches

CPU = torch.device("cpu")


@pytest.mark.parametrize("staged", CHECKS, ids=lambda each: each.__name__)
def test_contract(driver: HostDriver, staged: Check) -> None:
    staged(driver, CPU)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30))
def test_settings_that_change_at_random_change_no_result(driver: HostDriver, seed: int) -> None:
    switches(driver, CPU, seed, turns=16)


@settings(deadline=None, max_examples=60)
@given(
    program=steps,
    calls=st.lists(st.tuples(offsets, st.sets(st.integers(0, ARGUMENTS - 1))), min_size=2, max_size=5),
)
def test_random_regions(driver: HostDriver, program: Any, calls: list[tuple[list[int], set[int]]]) -> None:
    """Arguments overlap at random, and copies stand for any of those that are only read."""
    call = RegionCall(region_of(program), [torch.randn(3, 4) for _ in range(ARGUMENTS)])
    made = capture(call.fn, driver, call.args, RegionOptions(alignment=1))
    assert isinstance(made, Captured), made
    executable: Any = made.executable
    for seed, (places, chosen) in enumerate(calls):
        assert executable.stage(sorted(chosen - made.written)) is not None
        check(driver, call, executable, places, seed)
    executable.close()


def test_nothing_is_switched_while_a_replay_is_under_way(driver: HostDriver) -> None:
    """The only kernel of this graph is a Python function."""
    native = build.load()
    graph = native.HostGraph(0)
    seen: list[Any] = []
    kernel = ctypes.CFUNCTYPE(None, ctypes.c_int64)(lambda word: seen.append((word, graph.stage([0]), graph.moves())))
    x = torch.arange(4.0)
    source = graph.add_tensor_argument(x, False, -1, 16, 16, 0)
    graph.add_kernel(ctypes.cast(kernel, ctypes.c_void_p).value, [0], [])
    graph.add_patch(0, 0, source, 0)
    graph.set_order([0], False)
    assert graph.replay([x]) == []
    assert graph.stage([0]) == 32
    assert graph.replay([x]) == []
    assert [found[1:] for found in seen] == [(None, [1]), (None, [2])]
    assert seen[0][0] == x.data_ptr()
    assert seen[1][0] != x.data_ptr()
    assert graph.stage([]) == 0
    graph.replay([x])
    assert seen[2][0] == x.data_ptr()


def test_a_measured_region_tries_copies(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
    record = measure(driver, CPU, calls=400)
    assert not any("not copied" in note for note in record.notes), record.notes
    trial = record.trials[0]
    assert tuple(trial["candidates"]) == ("patched", "copied", "uncaptured")
    tried = {block["candidate"] for block in trial["blocks"]}
    assert {"patched", "copied"} <= tried, "what the run before the capture has told of uncaptured calls may do"
    assert record.staged_bytes == 0
