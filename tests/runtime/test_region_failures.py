"""What goes wrong in a region's life, with a driver that is scripted: captures and replays that fail, and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError, ReplayError
from pygraph.runtime.provenance import Refusal, blame
from pygraph.runtime.recording import Origin, Use
from pygraph.runtime.region import Region, counts
from tests.runtime.captures import Capture
from tests.runtime.fake import FakeDriver, accumulate, double, make


@pytest.fixture(autouse=True)
def _clean_counters() -> None:
    counts.clear()


@pytest.mark.parametrize("error", [CaptureError("host-read", "item"), RuntimeError("boom"), ZeroDivisionError()])
@pytest.mark.parametrize("at", [0, 1])
def test_a_capture_that_raises_half_way_leaves_the_call_answered(error: Exception, at: int) -> None:
    def fail(capture: Capture) -> None:
        raise error

    region, driver = make(accumulate, FakeDriver(written=[1]))
    driver.edits = [lambda capture: None] * at + [fail]
    x, total = torch.ones(4), torch.zeros(4)
    region([x, total])
    before = torch.get_rng_state()
    outputs = region([x, total])
    assert torch.equal(torch.get_rng_state(), before)
    assert total.tolist() == [2.0] * 4
    assert outputs[0].tolist() == [6.0] * 4
    assert region.record.state == "uncaptured"
    reason = error.reason if isinstance(error, CaptureError) else "capture-raised"
    assert list(region.record.refusals) == [reason]
    assert counts[f"refused.{reason}"] == 1
    captures = driver.captures
    region([x, total])
    assert driver.captures == captures


SHORT = [
    MemoryError("short"),
    torch.OutOfMemoryError("CUDA out of memory. Tried …"),
    RuntimeError("CUDA error: out of memory"),
]
BUSY = CaptureError("capture-busy", "another thread captures")


@pytest.mark.parametrize(
    ("where", "error"),
    [*product(["capture", "instantiation", "replay"], SHORT), ("capture", BUSY), ("instantiation", BUSY)],
)
def test_what_may_pass_postpones_a_capture_and_nothing_else(where: str, error: Exception) -> None:
    """Captures that are there stay in use, no operator is blamed, and the variant is captured by a later call."""
    blamed: list[Refusal] = []
    driver = FakeDriver(written=[1])
    region = Region(accumulate, driver, name="toy", on_refusal=blamed.append)

    def fail(*_: Any) -> Any:
        blame("aten.add.Tensor", Origin(("add",)))
        raise error

    def call(size: int) -> None:
        x, total = torch.ones(size), torch.zeros(size)
        assert region([x, total])[0].tolist() == [3.0] * size
        assert total.tolist() == [1.0] * size

    for _ in range(3):
        call(4)
    assert region.record.replays == 1
    driver.edits = [fail] if where == "capture" else []
    driver.refuses = error if where == "instantiation" else None
    driver.kernel = fail if where == "replay" else None
    for _ in range(2):
        call(8)
    assert list(region.record.refusals) == ["capture-busy" if error is BUSY else "out-of-memory"]
    assert blamed == []
    driver.refuses = driver.kernel = None
    call(4)
    assert (region.record.state, region.record.replays) == ("replay", 2)
    for _ in range(4):
        call(8)
    assert (region.record.captures, region.record.replays) == (2, 3)


def test_a_comparison_that_raises_leaves_other_captures_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the replay that was compared, and less about others."""
    region, _ = make()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a mistake in the comparison")

    for _ in range(3):
        region([torch.ones(2)])
    with monkeypatch.context() as patch:
        patch.setattr("pygraph.runtime.compare.digest", broken)
        for _ in range(2):
            assert region([torch.ones(3)])[0].tolist() == [2, 2, 2]
    assert list(region.record.refusals) == ["comparison-raised"]
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert (region.record.state, region.record.replays) == ("replay", 2)


@pytest.mark.parametrize(
    "name",
    [
        "_c10d_functional.all_reduce.default",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        "_Z28nvshmemi_transfer_put_signalPv",
    ],
)
def test_a_collective_is_neither_captured_again_nor_compared(name: str) -> None:
    runs: list[int] = []

    def counted(args: list[Any]) -> Sequence[Any]:
        runs.append(1)
        return double(args)

    region, driver = make(counted)
    driver.edits = [lambda capture: capture.launch(name=name)] * 2
    for _ in range(2):
        region([torch.ones(2)])
    assert region.record.refusals["collective"].launch == name
    assert driver.executables == []
    assert (driver.captures, len(runs)) == (1, 2)


def test_refusals_at_several_keys_end_the_region() -> None:
    region, driver = make()
    driver.refuses = CaptureError("no")
    for n in (1, 2, 3):
        for _ in range(2):
            assert torch.equal(region([torch.ones(n), n])[0], torch.full((n,), 2.0 + n))
    assert driver.captures == 4
    assert region.record.state == "uncaptured"


def test_what_the_uncaptured_function_raises_propagates_and_nothing_is_captured() -> None:
    failing = [False]

    def fragile(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        if failing[0]:
            raise ValueError("bad input")
        return [x + 1]

    region, driver = make(fragile)
    region([torch.ones(2)])
    failing[0] = True
    args = [torch.ones(2)]
    with pytest.raises(ValueError, match="bad input"):
        region(args)
    assert args == []
    assert region.record.captures == 0
    assert [e.closed for e in driver.executables] == [True]
    failing[0] = False
    for _ in range(3):
        region([torch.ones(2)])
    assert (region.record.captures, region.record.replays) == (1, 1)


def test_a_replay_that_broke_its_contract_is_the_last() -> None:
    region, driver = make()
    for _ in range(2):
        region([torch.ones(2)])

    def fail(args: list[Any]) -> Sequence[Any]:
        raise ReplayError("launch failed")

    driver.kernel = fail
    with pytest.raises(ReplayError, match="launch failed"):
        region([torch.ones(2)])
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert region.record.state == "uncaptured"
    assert driver.executables[0].closed


def test_nothing_of_a_refused_call_is_kept() -> None:
    def fail(capture: Capture) -> None:
        raise RuntimeError("boom")

    region, driver = make()
    driver.edits = [fail]
    for _ in range(2):
        x = torch.ones(4)
        known = weakref.ref(x)
        args = [x]
        del x
        region(args)
        gc.collect()
        assert known() is None


def test_a_region_closed_while_it_captures_keeps_nothing() -> None:
    region, driver = make()
    region([torch.ones(2)])
    driver.edits = [lambda capture: region.close()]
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert all(executable.closed for executable in driver.executables)
    assert len(region._variants) == 0
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert region.record.replays == 0


def test_many_threads_get_their_own_results() -> None:
    region, _ = make(max_captures=3)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for call in range(60):
            n = 1 + (seed + call) % 5
            out = region([torch.full((n,), float(seed)), n])[0]
            if not torch.equal(out, torch.full((n,), 2.0 * seed + n)):
                wrong.append((seed, call))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    record = region.record
    assert record.replays + record.uncaptured == 360
    assert counts["replays"] == record.replays


@pytest.mark.parametrize(
    ("offset", "start", "nbytes", "inside"),
    [(0, 0, 64, True), (8, 0, 56, True), (8, 0, 57, False), (8, -8, 8, True), (0, -1, 1, False), (64, 0, 0, True)],
)
def test_an_access_outside_of_its_allocation_is_refused(offset: int, start: int, nbytes: int, inside: bool) -> None:
    """The launch accesses ``nbytes`` from ``start`` on, from a word that lies ``offset`` bytes into 64."""

    def edit(capture: Capture) -> None:
        launch = capture.launches[0]
        use, words = Use(0, start, nbytes, reads=True, writes=False), (launch.words[0] + offset, *launch.words[1:])
        capture.launches[0] = replace(launch, uses=(use,), words=words)

    region, driver = make()
    driver.edits = [edit, edit]
    for _ in range(2):
        region([torch.ones(16)])
    assert list(region.record.refusals) == ([] if inside else ["outside-allocation"])


def test_a_word_that_points_to_the_callers_tensor_is_refused() -> None:
    x = torch.ones(4)
    region, driver = make()
    driver.edits = [lambda capture: capture.launch(x.data_ptr() + 4, name="baked")] * 4
    for _ in range(2):
        region([x])
    assert region.record.refusals["unmoved-address"].launch == "baked"


def test_what_a_replayed_kernel_raises_propagates() -> None:
    region, driver = make()
    for _ in range(2):
        region([torch.ones(2)])

    def fail(args: list[Any]) -> Sequence[Any]:
        raise IndexError("index out of bounds")

    for _ in range(2):
        driver.kernel = fail
        args = [torch.ones(2)]
        with pytest.raises(IndexError, match="out of bounds"):
            region(args)
        assert args == []
    driver.kernel = None
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert region.record.replays == 1
