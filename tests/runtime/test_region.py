"""The life of a region: when it captures, what it replays, what makes it give up. Most tests script the driver; the
last ones are of real regions under the host driver."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.logging_tensor import capture_logs_with_logging_tensor_mode

from pygraph.errors import CaptureError, ReplayError
from pygraph.program.recording import Origin, Use
from pygraph.runtime import life
from pygraph.runtime.events import counts
from pygraph.runtime.host import HostDriver
from pygraph.runtime.provenance import blame
from pygraph.runtime.region import Region
from pygraph.runtime.variants import MAX_TRACKED
from tests.runtime.captures import Capture
from tests.runtime.fake import BYTES, FakeDriver, accumulate, double, make
from tests.runtime.programs import region_calls
from tests.runtime.regions import RegionCall, same_bits


@pytest.fixture(autouse=True)
def _clean_counters() -> None:
    counts.clear()


@pytest.mark.parametrize("nth", [2, 4])
def test_cold_then_warm_then_captured_then_replayed(nth: int) -> None:
    region, driver = make(capture_after=nth)
    assert region.record.state == "cold"
    seen = []
    for call in range(nth + 3):
        args = [torch.full((4,), float(call))]
        outputs = region(args)
        assert args == []
        assert torch.equal(outputs[0], torch.full((4,), 2.0 * call))
        seen.append((region.record.state, driver.captures))
    assert seen == [("warm", 0)] * (nth - 1) + [("replay", 2)] * 4
    assert driver.executables[0].replays == 4  # one compared, three that answered
    assert (region.record.uncaptured, region.record.replays, region.record.captures) == (nth, 3, 1)
    assert counts == {"captures": 1, "replays": 3, "uncaptured": nth}


def test_scalars_are_keys_and_strides_are_variants() -> None:
    region, driver = make()
    square = torch.arange(16.0).view(4, 4)
    calls: list[list[Any]] = [[square, 1], [square, 2], [square.t(), 1], [square.double(), 1]]
    for _ in range(3):
        for args in calls:
            x, n = args
            assert torch.equal(region(list(args))[0], x * 2 + n)
    assert region.record.captures == 4
    assert region.record.replays == 4
    assert [e.replays for e in driver.executables] == [2, 2, 2, 2]


def test_proven_kernels_are_captured_once_at_other_sizes() -> None:
    region, driver = make()
    driver.code = "toy"
    for n in (4, 5, 6):
        for _ in range(3):
            assert torch.equal(region([torch.ones(n), n])[0], torch.full((n,), 2.0 + n))
    assert (region.record.captures, region.record.proven) == (3, 2)
    assert driver.captures == 2 + 1 + 1


def test_floats_that_change_on_each_call_cost_bounded_memory() -> None:
    region, driver = make()
    for call in range(11 * MAX_TRACKED + 400):  # each eleventh is looked at
        region([torch.ones(2), call / 7])
    assert driver.captures == 0
    assert len(region._lives.table) == MAX_TRACKED


def test_an_evicted_variant_has_to_run_twice_as_often() -> None:
    region, driver = make(memory_limit=2 * BYTES)
    captures = []
    for n in (1, 1, 2, 2, 3, 3, 1, 1, 1):
        region([torch.ones(n)])
        captures.append(region.record.captures)
    assert captures == [0, 1, 1, 2, 2, 3, 3, 3, 4]
    assert [e.closed for e in driver.executables] == [True, True, False, False]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), max_size=40))
def test_the_captures_that_were_used_last_stay(sizes: list[int]) -> None:
    region, driver = make(memory_limit=2 * BYTES)
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
    assert str(region.record.reason).startswith("argument-type")


def test_under_a_dispatch_mode_operators_are_seen() -> None:
    region, driver = make()

    def watched() -> list[str]:
        with capture_logs_with_logging_tensor_mode() as seen:
            region([torch.ones(2)])
        return seen

    assert all("aten.mul" in str(watched()) for _ in range(3))
    assert driver.captures == 0
    for _ in range(3):
        region([torch.ones(2)])
    assert "aten.mul" in str(watched())
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
    driver = FakeDriver(written=[1])
    region = Region(accumulate, driver, name="toy")

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
    call(8)
    driver.kernel = None
    call(4)  # since size 8 was called last: it makes no room for that
    driver.kernel = fail if where == "replay" else None
    call(8)
    assert not driver.executables[0].closed
    assert list(region.record.refusals) == ["capture-busy" if error is BUSY else "out-of-memory"]
    assert region.record.eager_since == {}
    driver.refuses = driver.kernel = None
    call(4)
    assert (region.record.state, region.record.replays) == ("replay", 3)
    for _ in range(4):
        call(8)
    assert (region.record.captures, region.record.replays) == (2, 4)


def test_a_comparison_that_raises_leaves_other_captures_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the replay that was compared, and less about others."""
    region, _ = make()

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a mistake in the comparison")

    for _ in range(3):
        region([torch.ones(2)])
    with monkeypatch.context() as patch:
        patch.setattr("pygraph.runtime.compare.digests", broken)
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
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16",
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
    assert driver.captures == (1 if "." not in name else 2), "an operator is tried as an eager call"
    assert len(runs) == 2


def test_refusals_at_several_keys_end_the_region() -> None:
    region, driver = make()
    driver.refuses = CaptureError("no")
    for n in (1, 2, 3):
        for _ in range(2):
            assert torch.equal(region([torch.ones(n), n])[0], torch.full((n,), 2.0 + n))
    assert driver.captures == 4
    assert region.record.state == "uncaptured"


@pytest.mark.parametrize("refused", [True, False])
def test_the_end_of_an_iterator_reaches_the_caller_as_it_is(refused: bool) -> None:
    """Where the capture was refused, or is compared. A generator of the user's own makes a RuntimeError of it."""
    calls = []

    def ends(args: list[Any]) -> Any:
        calls.append(args)
        next(iter(args[:0]) if len(calls) > 1 else iter(args))
        return double(args)

    def in_generator(args: list[Any]) -> Any:
        return next(ends(args) for _ in range(1))

    for fn, kind in ((ends, StopIteration), (in_generator, RuntimeError)):
        calls.clear()
        driver = FakeDriver(double)
        driver.edits = [_refuse] * refused
        region, _ = make(fn, driver)
        region([torch.ones(2)])
        with pytest.raises(kind) as caught:
            region([torch.ones(2)])
        assert type(caught.value) is kind
        assert region.record.captures == 0


def _refuse(_: Capture) -> None:
    raise CaptureError("host-read", "scripted")


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


@pytest.mark.parametrize("capturing", [False, True])
def test_close_frees_everything_and_leaves_the_region_usable(capturing: bool) -> None:
    """Also while it captures."""
    region, driver = make()
    for n in (2, 3):
        for _ in range(3):
            region([torch.ones(n)])
    region([torch.ones(4)])
    driver.edits = [lambda capture: region.close()]
    if capturing:
        assert region([torch.ones(4)])[0].tolist() == [2] * 4
    else:
        region.close()
    assert all(executable.closed for executable in driver.executables)
    assert len(region._lives.table) == 0
    replays = region.record.replays
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    assert (region.record.state, region.record.reason) == ("uncaptured", "closed")
    assert region.record.replays == replays


def test_many_threads_get_their_own_results() -> None:
    region, _ = make(memory_limit=3 * BYTES)
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


@pytest.mark.parametrize("error", [ReplayError("launch failed"), IndexError("index out of bounds")])
def test_what_a_replay_raises_propagates_and_one_that_broke_its_contract_is_the_last(error: Exception) -> None:
    region, driver = make()
    for _ in range(2):
        region([torch.ones(2)])

    def fail(args: list[Any]) -> Sequence[Any]:
        raise error

    driver.kernel = fail
    args = [torch.ones(2)]
    with pytest.raises(type(error), match=str(error)):
        region(args)
    assert args == []
    driver.kernel = None
    assert region([torch.ones(2)])[0].tolist() == [2, 2]
    last = isinstance(error, ReplayError)
    assert (region.record.state, region.record.replays) == (("uncaptured", 0) if last else ("replay", 1))
    assert driver.executables[0].closed == last


# -- real regions ------------------------------------------------------------------------------------------------------


def real(call: RegionCall, calls: int = 0) -> Region:
    """A region that was called so often."""
    region = Region(call.fn, HostDriver(), name="real")
    for seed in range(calls):
        region(call.fresh(seed))
    return region


@pytest.mark.parametrize("program", ["mlp", "train"])
def test_nothing_of_a_call_is_kept(program: str) -> None:
    calls = [versions[0] for versions in region_calls(program)]
    regions, known = [real(call) for call in calls], list[weakref.ref[Any]]()
    for seed in range(4):
        for call, region in zip(calls, regions, strict=True):
            args = call.fresh(seed)
            known += [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
            outputs = list(region(args))
            known += [weakref.ref(out) for out in outputs if isinstance(out, torch.Tensor)]
            del outputs
        gc.collect()
        assert [ref() for ref in known] == [None] * len(known)


def test_a_region_that_is_dropped_frees_its_captures_at_once() -> None:
    ((call, *_),) = region_calls("sized")
    region = real(call, 3)
    (last,) = [v.held[0] for v in region._lives.table.under(region._lives.key.of(call.fresh(2)))]
    known = [weakref.ref(region), weakref.ref(last)]
    del region, last
    assert [ref() for ref in known] == [None, None]


def test_fake_tensors_are_not_replayed() -> None:
    ((call,),) = region_calls("fallbacks")
    region = real(call, 3)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) for arg in call.args]
    with pytest.raises((AssertionError, RuntimeError)):
        region(fake)
    assert (region.record.captures, region.record.replays) == (1, 1)


@pytest.mark.parametrize("first", [False, True])
def test_inference_mode_gives_inference_tensors(first: bool) -> None:
    """Whichever mode the region was captured in."""
    ((call,),) = region_calls("mlp")
    region = real(call)
    for inference in (first, not first, first, not first):
        with torch.inference_mode(inference):
            for seed in range(3):
                outputs = list(region(call.fresh(seed)))
                assert [out.is_inference() for out in outputs] == [inference] * len(outputs)
    assert region.record.replays == 10


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ordinary_tensors_stay_so_in_inference_mode(mode: Any) -> None:
    """They are written, and views of them are ordinary, too."""

    def halved(args: list[Any]) -> list[Any]:
        (x,) = args
        args.clear()
        x.mul_(0.5)
        return [x[1:].t(), x.sin()]

    region = Region(halved, HostDriver(), name="halved")
    for call in range(5):
        ours, theirs = (torch.full((3, 4), float(call)) for _ in range(2))
        with mode():
            outputs, expected = list(region([ours])), halved([theirs])
            assert same_bits([*outputs, ours], [*expected, theirs])
            assert [out.is_inference() for out in outputs] == [out.is_inference() for out in expected]
            assert outputs[0].untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
    assert region.record.replays == 3, region.record


def test_closing_while_other_threads_replay() -> None:
    ((call,),) = region_calls("mlp")
    expected = call.run(call.fresh(1))
    for _ in range(5):
        region = real(call)
        wrong: list[int] = []
        stop = threading.Event()

        def work(region: Region = region, wrong: list[int] = wrong, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                if not same_bits(list(region(call.fresh(1))), expected):
                    wrong.append(1)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        while region.record.replays < 20:
            pass
        region.close()
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize("collects", [False, True])
def test_no_garbage_is_collected_while_a_region_is_captured(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    """Not between its two captures either: what is made and dropped there is not to be taken for what stays."""
    states = []

    def capture(*args: Any, **facts: Any) -> Any:
        states.append(gc.isenabled())
        return original(*args, **facts)

    original = life.capture
    monkeypatch.setattr(life, "capture", capture)
    region = Region(double, FakeDriver(), name="toy")
    (gc.enable if collects else gc.disable)()
    try:
        for _ in range(3):
            assert region([torch.ones(4)])[0].tolist() == [2.0] * 4
            assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert states == [False]
    assert (region.record.captures, region.record.replays) == (1, 1)
