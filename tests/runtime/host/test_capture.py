"""Recordings of captures, which have no other effect: nothing runs, nothing is touched, nothing stays behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from pygraph.errors import CaptureError
from pygraph.program.recording import AllocationKind, LaunchKind
from pygraph.runtime.calls import OperatorCall, fake_results
from pygraph.runtime.host import HostDriver, operators
from tests.runtime.host.replays import make_executable, replay_and_compare
from tests.runtime.regions import RegionCall, compile_regions, copy_arguments, same_bits


def perceptron(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    seen.add_(1)
    return torch.nn.functional.dropout(torch.relu(torch.addmm(b, x, w)), 0.5)


@pytest.fixture(scope="module")
def call() -> RegionCall:
    with torch.no_grad():
        compiled = compile_regions(perceptron)
        compiled.call(torch.randn(8, 16), torch.randn(16, 4), torch.randn(4), torch.zeros(1))
    return compiled.regions[0]


def mapped(address: int) -> bool:
    """True if any mapping of this process holds ``address``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_capturing_runs_nothing(driver: HostDriver, call: RegionCall) -> None:
    args = call.fresh()
    before, state = copy_arguments(args), torch.get_rng_state()
    driver.capture(call.fn, args)
    assert same_bits(args, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(args) == len(call.args)


def test_every_word_of_a_tensor_is_its_address(driver: HostDriver, call: RegionCall) -> None:
    recording = driver.capture(call.fn, call.args)
    starts = {a.address: a for a in recording.allocations}
    addmm = next(launch for launch in recording.launches if launch.name == "aten.addmm.out")
    owners = [starts[word].kind for word in addmm.words]
    assert owners == [AllocationKind.INPUT] * 3 + [AllocationKind.POOL]
    assert addmm.uses is not None
    assert [(a.reads, a.writes) for a in addmm.uses] == [(True, False)] * 3 + [(False, True)]
    assert [a.nbytes for a in addmm.uses] == [starts[word].nbytes for word in addmm.words]
    randint = next(launch for launch in recording.launches if "randint" in launch.name)
    assert randint.random
    assert not addmm.random


def test_kernels_say_what_they_read_and_write(driver: HostDriver, call: RegionCall) -> None:
    recording = driver.capture(call.fn, call.args)
    kernels = [launch for launch in recording.launches if launch.kind is LaunchKind.KERNEL]
    assert kernels
    seen = next(i for i, a in enumerate(call.args) if a.numel() == 1)
    owners = {a.address: a.index for a in recording.allocations if a.kind is AllocationKind.INPUT}
    written = {owners.get(k.words[use.word]) for k in kernels for use in k.uses or () if use.writes}
    assert written - {None} == {seen}


def test_allocations_are_disjoint_and_aligned(driver: HostDriver, call: RegionCall) -> None:
    recordings = [driver.capture(call.fn, call.args) for _ in range(3)]
    ranges = sorted((a.address, a.address + a.nbytes) for r in recordings for a in r.allocations)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(start % 64 == 0 for start, _ in ranges)


def test_born_counts_the_launches_before(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        a = torch.empty(3)
        torch.add(args[0], 1, out=a)
        b = torch.empty(3)
        torch.add(a, 1, out=b)
        return (b,)

    recording = driver.capture(region, [torch.randn(3)])
    assert [a.born for a in recording.allocations] == [0, 0, 1]
    assert len(recording.launches) == 2


def test_an_executable_outlives_its_recording_and_lets_go_when_closed(driver: HostDriver, call: RegionCall) -> None:
    executable, recording = make_executable(driver, call)
    address = recording.payload.arena.chunks[0][0]
    holder = weakref.ref(recording.payload)
    del recording
    gc.collect()
    assert holder() is None
    assert not mapped(address)
    args = call.fresh()
    watched = [weakref.ref(a) for a in args]
    outputs = executable.replay(list(args))
    watched += [weakref.ref(o) for o in outputs]
    del args, outputs
    gc.collect()
    assert all(ref() is None for ref in watched)
    kept = [weakref.ref(each) for each in executable._kept]  # type: ignore[attr-defined]
    assert kept
    executable.close()
    assert executable.replay(call.fresh()) is None
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_a_failed_capture_leaves_nothing(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        y = args[0] * 2
        raise ValueError("not today")
        return (y,)

    def reserved() -> int:
        return Path("/proc/self/maps").read_text().count("---p 00000000 00:00 0")

    before = reserved()
    with pytest.raises(CaptureError) as caught:
        driver.capture(region, [torch.randn(3)])
    assert caught.value.reason == "capture-failed"
    assert "not today" in caught.value.detail
    assert reserved() <= before
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


def test_other_threads_are_not_recorded(driver: HostDriver, call: RegionCall) -> None:
    results: list[Any] = []

    def other() -> None:
        with torch.no_grad():
            results.extend(call.run(call.fresh()))

    def region(args: list[Any]) -> tuple[Any, ...]:
        worker = threading.Thread(target=other)
        worker.start()
        worker.join()
        return (args[0] + 1,)

    assert len(driver.capture(region, [torch.randn(3)]).launches) == 1
    assert len(results) == len(call.run(call.fresh()))


def test_storage_offsets_do_not_show(driver: HostDriver, call: RegionCall) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        storage = torch.zeros(tensor.numel() + 5, dtype=tensor.dtype)
        view = torch.as_strided(storage, tensor.size(), tensor.stride(), 5)
        return view.copy_(tensor)

    plain = driver.capture(call.fn, call.args)
    moved = driver.capture(call.fn, [shifted(a) for a in call.args])
    assert [launch.signature for launch in plain.launches] == [launch.signature for launch in moved.launches]
    assert not plain.offset_sensitive
    assert all(a.address % 64 == 0 for a in moved.allocations)


def test_absolute_offsets_make_an_argument_sensitive(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        return (torch.ops.aten.as_strided.default(x, [2], [1], 6) * 2,)

    def argument(offset: int) -> torch.Tensor:
        return torch.arange(20.0)[offset : offset + 8]

    recording = driver.capture(region, [argument(4)])
    assert recording.offset_sensitive == {0}
    assert recording.launches[0].words[0] == recording.allocations[0].address + 2 * 4
    executable, _ = make_executable(driver, RegionCall(region, [argument(4)]))
    outputs = executable.replay([argument(4)])
    assert outputs[0].tolist() == [12.0, 14.0]
    assert executable.replay([argument(3)]) is None


def test_a_returned_view_of_another_item_size_makes_its_argument_sensitive(driver: HostDriver) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        return (torch.ops.aten.view.dtype(x, torch.int16), x * 2)

    def argument(offset: int) -> torch.Tensor:
        return torch.arange(20.0)[offset : offset + 8]

    assert driver.capture(region, [argument(4)]).offset_sensitive == {0}
    executable, _ = make_executable(driver, RegionCall(region, [argument(4)]))
    outputs = executable.replay([argument(4)])
    assert same_bits(list(outputs), list(region([argument(4)])))
    assert executable.replay([argument(3)]) is None


def test_helpers_of_the_module_are_recorded_too(driver: HostDriver) -> None:
    scope: dict[str, Any] = {"torch": torch}
    source = "def helper(x):\n    return torch.relu(x)\ndef region(args):\n    return (helper(args[0]) + 1,)\n"
    exec(compile(source, "helpers.py", "exec"), scope)
    recording = driver.capture(scope["region"], [torch.randn(3)])
    assert [launch.name for launch in recording.launches] == ["aten.relu.default", "aten.add.Tensor"]


def test_fake_kernels_are_asked_once_about_calls_that_do_the_same(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def region(args: list[Any]) -> tuple[Any, ...]:
        x, y, z = args
        # z is laid out otherwise, and the second half of x lies otherwise than the first
        made = [torch.add(x, 1), torch.add(y, 1), torch.add(z, 1), torch.add(x, 2), torch.abs(x[:2]), torch.abs(x[2:])]
        torch.add(x, y, out=x)
        torch.add(x, x, out=x)
        torch.add(y, x, out=y)
        return (*made, x)

    asked: list[str] = []

    def counted(call: OperatorCall) -> list[Any]:
        asked.append(call.name)
        return fake_results(call)

    monkeypatch.setattr(operators, "fake_results", counted)
    call = RegionCall(region, [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4).t()])
    recording = driver.capture(call.fn, call.args)
    assert [launch.name for launch in recording.launches].count("aten.add.out") == 3
    assert len(asked) == 7
    replay_and_compare(driver, call, make_executable(driver, call)[0], call.args)


def test_a_tensor_that_shows_other_memory_from_one_call_to_the_next_is_looked_at_again(driver: HostDriver) -> None:
    def region(args: list[Any]) -> list[Any]:
        x, y = args
        shown = x.view(-1)
        first = torch.relu(shown)
        shown.data = y.view(-1)  # which no mode sees
        return [first, torch.relu(shown)]

    recording = driver.capture(region, [torch.randn(8), torch.randn(8)])
    starts = {a.address: a for a in recording.allocations}
    read = [starts[launch.words[0]] for launch in recording.launches]
    assert [(each.kind, each.index) for each in read] == [(AllocationKind.INPUT, 0), (AllocationKind.INPUT, 1)]
