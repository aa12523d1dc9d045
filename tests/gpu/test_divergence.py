"""The launch that makes a replay on CUDA wrong is named. Faults are put into slots, and stay within guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import pygraph
from pygraph.backend import pygraph as backend
from pygraph.debug.diagnose import Finding, diagnose
from pygraph.program.program import Program
from pygraph.program.recording import AllocationKind
from pygraph.runtime.contract import Driver
from pygraph.runtime.cuda import CudaDriver
from tests.gpu.replays import Function, captured
from tests.gpu.test_operators import CASES, rand, region
from tests.runtime.regions import copy_arguments, same_bits


def found(driver: Driver, fn: Function, args: Sequence[Any], program: Program) -> Finding:
    """The diagnosis, after which arguments and random state are what they were."""
    before, state = copy_arguments(args), torch.cuda.get_rng_state()
    finding = diagnose(fn, driver, program, args)
    assert same_bits(list(args), before), "an argument was written"
    assert torch.equal(torch.cuda.get_rng_state(), state), "the random state moved"
    return finding


# -- plain operators ----------------------------------------------------------------------------------------------


def steps(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """No index and no semaphore among the operands: a wrong one cannot lead anywhere else."""
    both = torch.cat([x.sin(), y])
    total.add_(both.sum(0))
    kept = F.dropout(torch.softmax(both, -1), 0.3)
    return kept[1:], both.clone(), total, x, torch.empty(0, 3, device=x.device)


SHIFTED = {name: CASES[name] for name in ("pointwise", "views", "copies")}
SHIFTED["steps"] = (steps, lambda: (rand(12, 16), rand(8, 16), rand(16)))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found_in_a_right_program(driver: Driver, name: str) -> None:
    function, make = CASES[name]
    fn, args = region(function), make()
    finding = found(driver, fn, args, captured(driver, fn, args).program)
    assert finding.right, finding.text


@pytest.mark.parametrize("name", SHIFTED)
def test_the_launch_with_a_wrong_slot_is_named(driver: Driver, name: str) -> None:
    function, make = SHIFTED[name]
    fn, args = region(function), make()
    program = captured(driver, fn, args).program
    for slot in program.slots:
        slots = (replace(each, offset=each.offset + 64) if each is slot else each for each in program.slots)
        finding = found(driver, fn, args, replace(program, slots=tuple(slots)))
        where = f"slot {slot} of {program.recording.launches[slot.launch].name}: {finding.text}"
        assert finding.launch is not None, where
        assert finding.launch.index == slot.launch, where


# -- Triton kernels -----------------------------------------------------------------------------------------------


def compiled_program(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One fused kernel at first, then a product, then another."""
    total.add_(x.sin() * y)
    return torch.softmax(total @ x, -1), total


@pytest.mark.usefixtures("fresh")
def test_a_refused_capture_of_a_compiled_program_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CudaDriver.instantiate

    def instantiate(driver: CudaDriver, program: Program) -> Any:
        """The first launch is given its first two arguments in each other's place."""
        slots = [s for s in program.slots if s.launch == 0 and s.kind is AllocationKind.INPUT]
        one, two = slots[0], next(s for s in slots if s.index != slots[0].index)
        swapped = {
            one: replace(one, index=two.index, offset=two.offset),
            two: replace(two, index=one.index, offset=one.offset),
        }
        object.__setattr__(program, "slots", tuple(swapped.get(slot, slot) for slot in program.slots))
        with mock.patch("pygraph.runtime.cuda.executable.verify", new=id):  # which refuses it
            return right(driver, program)

    monkeypatch.setattr(CudaDriver, "instantiate", instantiate)
    call, plain = torch.compile(compiled_program, backend=backend), torch.compile(compiled_program)
    for _ in range(4):
        ours = [rand(64, 64) for _ in range(3)]
        theirs = copy_arguments(ours)
        torch.testing.assert_close(call(*ours), plain(*theirs))
        torch.testing.assert_close(ours[2], theirs[2])
    (why,) = [region.why for report in pygraph.reports() for region in report.regions if region.wrapped]
    assert why is not None
    assert "comparison-failed" in why, why
    assert "; launch 0 of " in why, why
    assert "[triton_" in why, why
