"""Which arguments of a region its program takes for held, which are not worth letting go of early, and for lent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pygraph.program.program import Program
from pygraph.runtime.contract import Executable
from pygraph.runtime.host import HostDriver

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Every program that is instantiated."""
    made: list[Program] = []
    instantiate = HostDriver.instantiate

    def instantiated(self: HostDriver, program: Program) -> Executable:
        made.append(program)
        return instantiate(self, program)

    monkeypatch.setattr(HostDriver, "instantiate", instantiated)
    return made


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sizes(program: Program, *, held: bool = False, lent: bool = False) -> list[int]:
    """Bytes of the tensor arguments that are held, or lent, or neither, in order."""
    given = [a for a in program.recording.allocations if a.kind.value == "input" and a.nbytes]
    return sorted(a.nbytes for a in given if (a.index in program.held, a.index in program.lent) == (held, lent))


PARAMETERS = sorted(4 * count for count in (8 * 16, 16, 16 * 4, 4))


def test_inference_holds_everything(programs: list[Program]) -> None:
    compiled = torch.compile(model(), backend="pygraph")
    with torch.no_grad():
        for _ in range(3):
            compiled(torch.randn(5, 8))
    (program,) = programs
    assert sizes(program, held=True) == sorted([*PARAMETERS, 5 * 8 * 4])
    assert sizes(program) == sizes(program, lent=True) == []


def test_what_only_a_backward_has_is_not_held(programs: list[Program]) -> None:
    compiled: Any = torch.compile(model(), backend="pygraph")
    for _ in range(3):
        compiled(torch.randn(5, 8)).sum().backward()
    forward, backward = programs
    assert sizes(forward, held=True) == sorted([*PARAMETERS, 5 * 8 * 4])
    assert sizes(backward, held=True) == [16 * 4 * 4]
    assert sizes(backward, lent=True) == [5 * 4 * 4]
    assert 5 * 16 * 4 in sizes(backward)
