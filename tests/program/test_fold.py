"""Bodies of branches and loops, made of a capture that ran each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import ProgramError
from pygraph.program.nested import ARGUMENTS
from pygraph.program.program import Program
from pygraph.program.recording import AllocationKind, Launch, LaunchKind
from pygraph.program.verify import verify
from pygraph.runtime.control import cond, while_loop
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver


def one(args: list[Any]) -> Sequence[Any]:
    (x,) = args
    return [torch.sin(torch.mm(x, x)), x + 1]


def other(args: list[Any]) -> Sequence[Any]:
    (x,) = args
    y = torch.cos(x)
    return [y * 2, torch.mm(y, x)]


def branch(args: list[Any]) -> Sequence[Any]:
    x, predicate = args
    args.clear()
    x = torch.tanh(x)
    first, second = cond(predicate, one, other, [x])
    return [first + second, x]


def below(args: list[Any]) -> Sequence[Any]:
    count, _, most = args
    return [count < most]


def further(args: list[Any]) -> Sequence[Any]:
    count, x, _ = args
    return [count + 1, cond(count % 2 == 0, one, other, [x])[0]]


def loop(args: list[Any]) -> Sequence[Any]:
    x, most = args
    args.clear()
    return [*while_loop(below, further, [torch.zeros((), dtype=torch.int64), x * 2], [most])]


def captured(fn: Any, *args: Any) -> Captured:
    made = capture(fn, HostDriver(), list(args))
    assert isinstance(made, Captured), made
    return made


def owners(program: Program) -> list[Launch]:
    return [launch for launch in program.recording.launches if launch.bodies]


@pytest.mark.parametrize("order", ["program", "dependences"])
def test_a_branch_is_one_launch_with_a_body_for_each_outcome(order: str) -> None:
    made = capture(branch, HostDriver(), [torch.randn(4, 4), torch.tensor(True)], order=order)
    assert isinstance(made, Captured)
    (owner,) = owners(made.program)
    assert (owner.kind, len(owner.bodies), made.bodies) == (LaunchKind.IF, 2, {"one", "other"})
    assert [launch.name.split(".")[1] for launch in made.program.recording.launches if launch is not owner] == [
        "tanh",
        "add",
    ]
    for predicate in (True, False, True):
        args = [torch.randn(4, 4), torch.tensor(predicate)]
        for actual, expected in zip(made.executable.replay(list(args)) or (), branch(list(args)), strict=True):
            assert torch.equal(actual, expected)


def test_a_branch_in_a_loop_is_a_launch_of_its_body() -> None:
    made = captured(loop, torch.randn(4, 4), torch.tensor(3))
    (owner,) = owners(made.program)
    assert (owner.kind, made.bodies) == (LaunchKind.WHILE, {"further", "one", "other"})
    assert [inner.kind for inner in owners(owner.bodies[0])] == [LaunchKind.IF]
    for most in (0, 1, 2, 5):
        args = [torch.randn(4, 4), torch.tensor(most)]
        for actual, expected in zip(made.executable.replay(list(args)) or (), loop(list(args)), strict=True):
            assert torch.equal(actual, expected)


def test_arguments_of_bodies_are_there_from_the_beginning() -> None:
    (owner,) = owners(captured(branch, torch.randn(4, 4), torch.tensor(True)).program)
    for body in owner.bodies:
        inputs = [each for each in body.recording.allocations if each.kind is AllocationKind.INPUT]
        assert inputs
        assert {each.born for each in inputs} == {0}


def _changed(program: Program, **facts: Any) -> Program:
    launches = tuple(replace(e, **facts) if e.bodies else e for e in program.recording.launches)
    return replace(program, recording=replace(program.recording, launches=launches))


def test_the_verifier_names_what_a_fold_forgets() -> None:
    program = captured(branch, torch.randn(4, 4), torch.tensor(True)).program
    (owner,) = owners(program)
    assert owner.uses is not None
    unread = tuple(use for use in owner.uses if use.word != ARGUMENTS)
    with pytest.raises(ProgramError, match="which its launch does not say"):
        verify(_changed(program, uses=unread))
    slots = tuple(slot for slot in program.slots if (slot.launch, slot.word) != (owner.index, 0))
    with pytest.raises(
        ProgramError, match=r"decided by 1 bytes, to which its first word does not point|without a slot"
    ):
        verify(replace(program, slots=slots))
    small = tuple(
        replace(each, nbytes=1) if each.kind is AllocationKind.POOL else each for each in program.recording.allocations
    )
    with pytest.raises(ProgramError, match="which has 1"):
        verify(replace(program, recording=replace(program.recording, allocations=small)))
