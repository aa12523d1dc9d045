"""Guard zones around the workspace and every output stay untouched, whatever lay where while capturing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph.runtime.cuda import CudaDriver
from pygraph.runtime.stepped_memory import POISON, SteppedMemory
from pygraph.runtime.tensors import blocks, take
from tests.gpu.replays import captured, fresh_arguments
from tests.gpu.test_operators import CASES, region


def step_through(driver: CudaDriver, fn: Callable[[list[Any]], Sequence[Any]], args: list[Any]) -> SteppedMemory:
    """The memory of a captured region between guards, after each launch ran in it."""
    program = captured(driver, fn, args).program
    stepper = driver.stepper(program, fn, args)
    arguments = take(args, blocks(args, program.recording.offset_sensitive))
    memory = SteppedMemory(program, arguments, stepper.device)
    for launch in program.order:
        slots = [slot for slot in program.slots if slot.launch == launch]
        stepper.run(launch, {slot.word: memory.address(slot) for slot in slots})
    torch.cuda.synchronize()
    for index in program.layout.fresh:
        made = next(a for a in program.recording.allocations if a.index == index and a.kind.name == "POOL")
        written = memory.bytes(made.key, 0, made.nbytes)
        assert written is not None
        assert not written.numel() or bool((written != POISON).any()), "an output was not written"
    return memory


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("sort_flat",)])
def test_nothing_is_written_beside_an_allocation(driver: CudaDriver, name: str) -> None:
    function, make = CASES[name]
    args = make()
    for seed in range(2):
        again = fresh_arguments(args, seed)
        memory = step_through(driver, region(function), again)
        assert memory.intact, "bytes beside an allocation were written"
