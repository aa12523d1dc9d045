"""Placement on a real device: programs that mix the CPU and the GPU, against eager, with their CPU tensors changing.

The number of regions and the reasons of the cuts are those of the passes; results are those of eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.gpu.programs import (
    DEVICE,
    EVERYTHING,
    assert_replayed,
    assert_same,
    compiled,
    device_tensor,
    figures,
    replaying_regions,
)

CALLS = 5

pytestmark = pytest.mark.usefixtures("fresh")


COPY, CPU = "device-copy", "cpu-operator"


@dataclass(frozen=True)
class Mixed:
    """One program, or the module that it is. ``inputs(turn)`` makes the arguments of a call, ``between(program, turn)``
    changes the program's own tensors before a call. ``regions`` are replayed; ``cut`` are the reasons of what is
    outside."""

    program: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    regions: int = 1
    cut: tuple[str, ...] = (COPY,)
    between: Callable[[Any, int], None] | None = None
    dynamic: bool | None = None


def host(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size).to(dtype)


def square(turn: int) -> tuple[torch.Tensor, ...]:
    return (device_tensor(16, 16),)


# -- scalars and constants -------------------------------------------------------------------------------------------


def scalar_tensors(x: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return (x * s + t).relu() @ x.t() * s


def scalar_made_inside(x: torch.Tensor) -> torch.Tensor:
    low, half = torch.tensor(-1.5), torch.scalar_tensor(0.5, dtype=torch.float64)
    return torch.where(x > 0, x @ x, low) * half + torch.full((), 3)


def constants(x: torch.Tensor) -> torch.Tensor:
    weight = torch.tensor([[0.25, -0.5, 1.0]] * 16).to(x.device)
    bias = torch.tensor([0.5, 0.0, -2.0]).to(DEVICE)
    return (x @ weight + bias).tanh() * torch.tensor([[1, 2, 3]]).to(x.device)


def indices_in_a_list(x: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[torch.tensor([3, 0, 2])] * 2, x.relu()[order] @ x


# -- positions and masks ---------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """Learned positions, looked up by ids that are made and kept on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 16, device=DEVICE)
        self.register_buffer("ids", torch.arange(64))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kept = self.table(self.ids[: x.shape[0]].to(x.device))
        made = self.table(torch.arange(x.shape[0]).to(x.device))
        return x + kept + made * self.table(ids.to(x.device)).sigmoid()


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Angles from arithmetic on floats of the CPU, which stays there since the device would round differently."""
    frequency = 1.0 / (10.0 ** (torch.arange(0, 16, 2).float() / 16))
    angle = torch.outer(torch.arange(x.shape[0]).float(), frequency)
    cos, sin = angle.cos().to(x.device), angle.sin().to(x.device)
    a, b = x[:, ::2], x[:, 1::2]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# -- tensors left on the CPU -----------------------------------------------------------------------------------------


class LeftBehind(nn.Module):
    """A parameter and two buffers that were never moved, beside a layer that was."""

    weight: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("scale", torch.tensor(0.7))
        self.layer = nn.Linear(16, 16, device=DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.weight.to(x.device) + self.shift.to(x.device)).relu() * self.scale


def through_data(program: LeftBehind, turn: int) -> None:
    program.weight.data = torch.full((16, 16), 0.1 * turn + 0.01)
    program.shift.data.mul_(-1.5)
    program.scale.fill_(turn)


def through_numpy(program: LeftBehind, turn: int) -> None:
    program.weight.detach().numpy()[turn % 16] = 1.0 + turn
    program.shift.numpy()[:] = turn
    program.scale.numpy()[...] = turn + 0.5


def many_uploads(x: torch.Tensor, *hosts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    row, whole, column, scalar, large, nothing, transposed = (t.to(x.device) for t in hosts)
    mixed = x + row * scalar - column.float() + transposed
    return mixed @ x, large * 2 + 1, whole * 3, nothing * 2


def hosts(turn: int) -> tuple[torch.Tensor, ...]:
    """Small ones of several types (staged together), one larger than is staged, an empty one, a transposed one."""
    small = (host(16), torch.randint(0, 9, (16,)), host(16, 1, dtype=torch.float64), host())
    return (device_tensor(16, 16), *small, host(200, 200), host(0, 16), host(16, 16).t())


# -- results on the CPU ----------------------------------------------------------------------------------------------


def fetched_at_the_end(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x @ x).relu()
    return y.cpu(), (x + 1).double().cpu(), (x > 0).cpu(), y.half().to("cpu")


def fetched_without_waiting(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ x).relu()
    return y.to("cpu", non_blocking=True), y + 1


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    there = ((x @ x).relu() * 2).cpu()
    return (there.flip(0) + 1).to(x.device) @ x + 1


# -- CPU tensors that the program writes -----------------------------------------------------------------------------


def counted(x: torch.Tensor, counter: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    row.mul_(2)
    return x * counter.to(x.device) + row.to(x.device)


def written_back(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    y = (x @ x).relu()
    result.copy_(y.sum(0))
    return y + 1


def used_then_written(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    y = x + row.to(x.device)
    row.add_(1)
    return y * row.to(x.device)


def without_waiting(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x @ a.to(x.device, non_blocking=True) + b.to(x.device, non_blocking=True)


def of_any_length(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    position = torch.arange(x.shape[0]).to(x.device)
    mask = (torch.arange(x.shape[0])[None, :] <= torch.arange(x.shape[0])[:, None]).to(x.device)
    scores = (x @ x.t()).masked_fill(~mask, -1e4).softmax(-1)
    return scores @ x * position[:, None] + row.to(x.device)


LENGTHS = (5, 9, 5, 5, 9)


MIXED: dict[str, Mixed] = {
    "scalar-tensors": Mixed(scalar_tensors, lambda turn: (*square(turn), host(), host(dtype=torch.float64))),
    "scalars-made-inside": Mixed(scalar_made_inside, square, cut=(CPU,)),
    "constants": Mixed(constants, square, cut=(CPU,)),
    "indices-in-a-list": Mixed(
        indices_in_a_list, lambda turn: (*square(turn), torch.randint(0, 16, (5,))), cut=(COPY, CPU)
    ),
    "positions": Mixed(Positions, lambda turn: (*square(turn), torch.randint(0, 64, (16,))), cut=(COPY, CPU)),
    "rotary": Mixed(rotary, square, cut=(CPU, COPY)),
    "changed-through-data": Mixed(LeftBehind, square, between=through_data),
    "changed-through-numpy": Mixed(LeftBehind, square, between=through_numpy),
    "many-uploads": Mixed(many_uploads, hosts),
    "fetched-at-the-end": Mixed(fetched_at_the_end, square),
    "fetched-without-waiting": Mixed(fetched_without_waiting, square),
    "there-and-back": Mixed(there_and_back, square, regions=2, cut=(COPY, CPU)),
    "counted": Mixed(counted, lambda turn: (*square(turn), torch.tensor(float(turn)), host(16)), cut=(COPY, CPU)),
    "written-back": Mixed(written_back, lambda turn: (*square(turn), torch.zeros(16)), cut=(COPY, CPU)),
    "used-then-written": Mixed(used_then_written, lambda turn: (*square(turn), host(16)), cut=(COPY, CPU)),
    "without-waiting": Mixed(without_waiting, lambda turn: (*square(turn), host(16, 16), host(16))),
    "pinned": Mixed(without_waiting, lambda turn: (*square(turn), host(16, 16).pin_memory(), host(16).pin_memory())),
    "of-any-length": Mixed(of_any_length, lambda turn: (device_tensor(LENGTHS[turn], 16), host(16)), dynamic=True),
}


# -- against eager ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in MIXED] + [(name, {"verify": "always"}) for name in tuple(MIXED)[::2]],
    ids=str,
)
def test_a_program_of_two_devices_equals_eager(name: str, options: dict[str, Any]) -> None:
    """Fresh values at fresh addresses in each call; results, devices, and what the program mutates are eager's."""
    case = MIXED[name]
    torch.manual_seed(1)
    program: Any = case.program() if isinstance(case.program, type) else case.program
    twin = copy.deepcopy(program)
    ours = compiled(program, dynamic=case.dynamic, **EVERYTHING, **options)
    held: list[Any] = []
    sizes: list[torch.Size] = []
    for turn in range(CALLS):
        torch.manual_seed(turn)
        mine = case.inputs(turn)
        yours = copy.deepcopy(mine)
        sizes.append(mine[0].shape)
        if case.between is not None and turn:
            case.between(program, turn)
            case.between(twin, turn)
        actual, expected = ours(*mine), twin(*yours)
        torch.cuda.synchronize()  # copies that were not waited for are there
        assert_same(actual, expected, call=turn)
        assert_same(mine, yours, call=f"{turn}, in its arguments")
        held.append((mine, actual))

    assert_replayed(case.regions)
    (report,) = pygraph.reports()
    assert len(replaying_regions()) == case.regions, figures()
    assert {left.reason for left in report.uncaptured()} <= set(case.cut), figures()
    assert report.emitted is not None
    assert not [kernel for kernel in report.emitted.outside if kernel.startswith("triton_")], report.emitted.outside
    # the first call of a set of sizes warms a region up, the second is captured, all others are replayed
    replayed = sum(sizes[:turn].count(size) >= 2 for turn, size in enumerate(sizes))
    assert [region.record and region.record.replays for region in replaying_regions()] == [replayed] * case.regions


def test_copies_of_one_cpu_value_are_memory_of_their_own() -> None:
    """The caller writes to each result, as it may to eager's: no other result changes."""

    def copied(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        position = torch.arange(16)
        one, other = (torch.empty_like(row, device=x.device).copy_(row) for _ in range(2))
        return position.to(x.device), position.to(x.device), one, other, x * 2

    call = compiled(copied, **EVERYTHING)
    for turn in range(CALLS):
        x, row = device_tensor(16, 16), torch.randn(16)
        ours, theirs = call(x, row), copied(x, row)
        for place, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            mine.add_(place + 1)
            yours.add_(place + 1)
        assert_same(ours, theirs, call=turn)
    assert_replayed()


def test_a_callers_own_capture_holds_the_numbers_of_then() -> None:
    """As with eager and with Inductor: a CPU number is an argument of the kernels, and stays what it was."""

    def scaled(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return (x * rate).sin() - rate * 0.5

    call = compiled(scaled, **EVERYTHING)
    x, rate = torch.randn(64, device="cuda"), torch.tensor(0.25)
    for _ in range(4):
        assert_same(call(x, rate), scaled(x, rate))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x, rate)
    expected = scaled(x, rate)
    rate.fill_(3.0)
    junk = [torch.full((16,), 7.0).pin_memory() for _ in range(64)]
    graph.replay()
    assert_same(result, expected)
    del junk
