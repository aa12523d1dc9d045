"""The life of real regions under the host driver, where a scripted driver would not show it."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.runtime.contract import Program
from pygraph.runtime.host import HostDriver
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.programs import region_calls
from tests.runtime.regions import RegionCall, copy_arguments, same_bits


def region_of(call: RegionCall, **options: Any) -> Region:
    return Region(call.fn, HostDriver(), name="real", options=RegionOptions(**options))


def check(region: Region, call: RegionCall, args: list[Any]) -> None:
    """One call of the region equals one of its uncaptured function, arguments afterwards included."""
    theirs = copy_arguments(args)
    state = torch.get_rng_state()
    expected = call.run(theirs)
    torch.set_rng_state(state)
    outputs = list(region(list(args)))
    assert same_bits(outputs, expected)
    assert all(same_bits(a, b) for a, b in zip(args, theirs, strict=True))


def test_donated_buffers_of_a_backward_are_written() -> None:
    _, (call,) = region_calls("train")
    made: list[Program] = []
    region = Region(call.fn, HostDriver(), name="real", on_capture=made.append)
    for seed in range(5):
        check(region, call, call.fresh(seed))
    before = call.fresh(1)
    after = copy_arguments(before)
    call.run(after)
    mutated = {i for i, pair in enumerate(zip(before, after, strict=True)) if not same_bits(*pair)}
    assert mutated <= made[0].written
    assert mutated or torch.__version__ < "2.13", "the memory of a saved activation is used again"
    assert region.record.replays == 3


@pytest.mark.parametrize("program", ["mlp", "train"])
def test_nothing_of_a_call_is_kept(program: str) -> None:
    for call, *_ in region_calls(program):
        region = region_of(call)
        for seed in range(4):
            args = call.fresh(seed)
            known = [weakref.ref(arg) for arg in args if isinstance(arg, torch.Tensor)]
            outputs = list(region(args))
            known += [weakref.ref(out) for out in outputs if isinstance(out, torch.Tensor)]
            del outputs
            gc.collect()
            assert [ref() for ref in known] == [None] * len(known)


def test_a_region_that_is_dropped_frees_its_captures_at_once() -> None:
    ((call, *_),) = region_calls("sized")
    region = region_of(call)
    for seed in range(3):
        check(region, call, call.fresh(seed))
    (last,) = [v.executable for v in region._variants.under(region._key.of(call.fresh(2)))]
    known = [weakref.ref(region), weakref.ref(last)]
    del region, last
    assert [ref() for ref in known] == [None, None]


def test_fake_tensors_are_not_replayed() -> None:
    ((call,),) = region_calls("fallbacks")
    region = region_of(call)
    for seed in range(3):
        check(region, call, call.fresh(seed))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) for arg in call.args]
    with pytest.raises((AssertionError, RuntimeError)):
        region(fake)
    assert (region.record.captures, region.record.replays) == (1, 1)


def test_inference_mode_gives_inference_tensors() -> None:
    ((call,),) = region_calls("mlp")
    region = region_of(call)
    for inference in (False, True, False, True):
        with torch.inference_mode(inference):
            for seed in range(3):
                outputs = list(region(call.fresh(seed)))
                assert [out.is_inference() for out in outputs] == [inference] * len(outputs)
    assert region.record.replays == 10


def test_closing_while_other_threads_replay() -> None:
    ((call,),) = region_calls("mlp")
    expected = call.run(call.fresh(1))
    for _ in range(5):
        region = region_of(call)
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
