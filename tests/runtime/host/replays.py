"""From a region call to an executable, without the region layer: capture twice, find slots, lay out, instantiate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pygraph.program.program import Program
from pygraph.program.recording import Recording
from pygraph.program.steps import with_steps
from pygraph.runtime.contract import Driver, Executable
from pygraph.runtime.host import HostDriver
from pygraph.runtime.slots import SlotTable, discover
from tests.program.layouts import plan
from tests.runtime.regions import RegionCall, copy_arguments, same_bits

__all__ = ["assert_replays", "make_executable", "make_program", "replay_and_compare"]


def make_program(driver: Driver, fn: Any, args: Sequence[Any], **changes: Any) -> Program:
    """A program for ``fn`` on ``args``, from two captures; ``changes`` replace its fields."""
    first, second = driver.capture(fn, args), driver.capture(fn, args)
    table = discover(first, second)
    assert isinstance(table, SlotTable), table
    return with_steps(replace(Program(first, table.slots, plan(first, table.slots), table.non_pointers), **changes))


def make_executable(driver: HostDriver, call: RegionCall, **options: Any) -> tuple[Executable, Recording]:
    """An executable for one region call, and its recording."""
    program = make_program(driver, call.fn, call.args, **options)
    return driver.instantiate(program), program.recording


def replay_and_compare(driver: HostDriver, call: RegionCall, executable: Executable, args: Sequence[Any]) -> list[Any]:
    """Replay on copies of ``args``: outputs, mutated arguments and generator state are those of the uncaptured run."""
    theirs, ours = copy_arguments(args), copy_arguments(args)
    start = torch.get_rng_state()
    expected = call.run(theirs)
    after = torch.get_rng_state()
    torch.set_rng_state(start)
    outputs = executable.replay(list(ours))
    assert outputs is not None, "the replay turned its arguments away"
    assert same_bits(outputs, expected)
    assert same_bits(ours, theirs)
    assert torch.equal(torch.get_rng_state(), after)
    return outputs


def assert_replays(driver: HostDriver, call: RegionCall, **options: Any) -> Recording:
    """Capture ``call`` and replay it on its own arguments, twice, and on new values at new addresses."""
    executable, recording = make_executable(driver, call, **options)
    for args in (call.args, call.args, call.fresh(seed=1), call.fresh(seed=2)):
        replay_and_compare(driver, call, executable, args)
    executable.close()
    return recording
