"""Parts of parameters that nobody sets hold whatever the stack or the heap held: they stop no operator of ATen, and
what may be hidden memory stops a custom one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.compat import storage_from_address
from pygraph.program.program import NonPointerWord
from pygraph.program.recording import AllocationKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda.addresses import SCRATCH
from pygraph.runtime.discover import capture
from pygraph.runtime.provenance import Refusal
from tests.gpu.replays import assert_replays
from tests.runtime.host.replays import make_program

Region = Callable[[list[Any]], tuple[Any, ...]]

_WORDS = 1 << 11

_kept: list[torch.Tensor] = []
"""What the custom operator below keeps to itself."""


@torch.library.custom_op("pygraph_unset_words::add_hidden", mutates_args=())
def add_hidden(x: torch.Tensor) -> torch.Tensor:
    """Adds memory that no argument shows."""
    return x + _kept[0]


def rand(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda")


class _Filled(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * _WORDS),)


_ignore = ctypes.PyDLL(None).getpid
_ignore.argtypes = [_Filled]


def dirty(tensor: torch.Tensor) -> None:
    """Fill what is free of the stack and of the heap with the address of a live tensor."""
    sizes = [_WORDS, *(n for n in (4, 8, 16, 32, 64, 128, 512) for _ in range(100))]
    stack, *_heap = [(ctypes.c_uint64 * n)(*[tensor.data_ptr()] * n) for n in sizes]
    _ignore(_Filled(stack))


def refused(driver: Driver, region: Region, args: list[Any]) -> Refusal:
    region(list(args))
    torch.cuda.synchronize()
    found = capture(region, driver, args)
    assert isinstance(found, Refusal), (
        f"captured, with slots {found.table.slots} and inert words {found.table.non_pointers}"
    )
    return found


def test_a_custom_operator_with_memory_of_its_own_is_refused(driver: Driver) -> None:
    _kept[:] = [rand(64)]
    refusal = refused(driver, lambda args: (add_hidden(args[0]) * 2,), [rand(64)])
    assert refusal.reason == "foreign-address", str(refusal)
    assert f"{_kept[0].data_ptr():#x}" in refusal.detail, str(refusal)


@pytest.mark.parametrize("offset", [0, 16])
def test_an_operator_that_is_given_a_tensor_of_nobodys_is_refused(driver: Driver, offset: int) -> None:
    """A region that holds a tensor in a closure goes on using it after its owner gave it up."""
    held = rand(256)[offset : offset + 64]
    refusal = refused(driver, lambda args: (args[0] + held,), [rand(64)])
    assert refusal.reason == "foreign-address", str(refusal)
    assert f"{held.data_ptr():#x}" in refusal.detail, str(refusal)


def foreach(args: list[Any]) -> tuple[Any, ...]:
    return tuple(torch._foreach_add(args, 1.0))


CASES: dict[str, tuple[Region, tuple[tuple[int, ...], ...]]] = {
    "sum": (lambda args: (args[0].sum(), args[0].sum(0), args[0].amax(1)), ((300, 700),)),
    "topk": (lambda args: tuple(torch.topk(args[0], 5)), ((16, 5000),)),
    "foreach": (foreach, ((100,), (7, 3), (65536,))),
    "sgemm": (lambda args: (args[0] @ args[1] @ args[0],), ((96, 96), (96, 96))),
    "convolution": (lambda args: (torch.nn.functional.conv2d(args[0], args[1]),), ((2, 3, 32, 32), (8, 3, 3, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_captures_on_a_dirty_stack_and_heap_replay_as_uncaptured(driver: Driver, name: str) -> None:
    function, sizes = CASES[name]
    live = rand(1000)
    before = live.clone()

    def region(args: list[Any]) -> tuple[Any, ...]:
        dirty(live)
        first = function(list(args))
        dirty(live)
        return (*first, *function(list(args)))

    for _ in range(4):
        assert_replays(driver, region, [rand(*size) for size in sizes])
        assert torch.equal(live, before), "a replay wrote into memory that it was not given"


def test_addresses_of_captures_are_no_pairs_of_small_numbers(driver: Driver) -> None:
    """Two numbers of 32 bits in one word (a count and 4, say) must not read as an address of a capture."""
    recordings = [driver.capture(lambda args: (args[0] + 1,), [rand(64)]) for _ in range(3)]
    kind = AllocationKind.INPUT
    lowest = min(a.address for recording in recordings for a in recording.allocations if a.kind is kind)
    assert lowest >= 1 << 44, f"the driver reserved address space at {lowest:#x}, not where it was asked for"


def test_scratch_can_be_read_and_written_far_around(driver: Driver) -> None:
    recording = driver.capture(lambda args: (args[0] + 1,), [rand(64)])
    for distance in (-SCRATCH // 2, -(1 << 20), 0, 1 << 20, SCRATCH // 2 - 4096):
        storage = storage_from_address(
            recording.scratch + distance, torch.device("cuda", torch.cuda.current_device()), 4096
        )
        page = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage, 0, (4096,), (1,))
        page.fill_(0xFF)
        assert bool((page == 0xFF).all())
    torch.cuda.synchronize()


def test_an_unset_entry_of_a_list_may_point_at_scratch(driver: Driver) -> None:
    """Of the addresses that a fused list kernel takes by value, those behind the last tensor are never used."""
    foreach([rand(100), rand(7, 3)])
    made = make_program(driver, foreach, [rand(100), rand(7, 3)])
    places = {(slot.launch, slot.word) for slot in made.slots} | {
        (word.launch, word.word) for word in made.non_pointers
    }
    launch = next(found for found in made.recording.launches if "multi_tensor_apply" in found.name)
    assert (launch.index, 20) not in places, launch.words[:64]
    marked = replace(made, non_pointers=(*made.non_pointers, NonPointerWord(launch.index, 20, scratch=True)))
    executable = driver.instantiate(marked)
    for _ in range(3):
        args = [rand(100), rand(7, 3)]
        outputs = executable.replay(list(args))
        assert outputs is not None
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, foreach(args), strict=True))


def test_an_operand_that_pointed_at_scratch_would_show(driver: Driver) -> None:
    made = make_program(driver, lambda args: (args[0] * 2,), [rand(1000)])
    operand = next(slot for slot in made.slots if slot.kind is AllocationKind.INPUT)
    slots = tuple(slot for slot in made.slots if slot is not operand)
    assert len(slots) == len(made.slots) - 1
    executable = driver.instantiate(
        replace(made, slots=slots, non_pointers=(NonPointerWord(operand.launch, operand.word, scratch=True),))
    )
    x = rand(1000)
    outputs = executable.replay([x])
    torch.cuda.synchronize()
    assert outputs is not None
    assert not torch.equal(outputs[0], x * 2)
