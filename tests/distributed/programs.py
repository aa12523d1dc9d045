"""Programs of each kind of parallelism, against themselves without a compiler: data, tensors, experts, stages.

They compute in 64 bits, and results may differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.checks import CALLS, PASSES, captured, check, compiled, group
from tests.distributed.processes import Rank

WIDE = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model() -> nn.Sequential:
    """Two blocks, with equal weights on every rank and in each call."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def batch(number: int, call: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + call)
    return torch.randn(4, WIDE, generator=generator, dtype=torch.float64)


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def sent() -> int:
    return int(group()._get_sequence_number_for_group())


def trained(rank: Rank, wrapped: Callable[[], tuple[nn.Module, Callable[..., Any]]]) -> tuple[list[torch.Tensor], int]:
    """Losses and parameters of some steps, and how many collectives those sent after the first one, which may agree on
    more. ``wrapped`` makes a module and what is called."""
    module, run = wrapped()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, before = list[torch.Tensor](), 0
    for call in range(CALLS):
        optimizer.zero_grad()
        loss = run(batch(rank.number, call)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        before = before or sent()
    left = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters()]
    return [*losses, *left], sent() - before


def trains_alike(rank: Rank, plain: Any, ours: Any) -> None:
    expected, count = trained(rank, plain)
    before = count
    found, count = trained(rank, ours)
    close(found, expected)
    assert count == before, f"{count} collectives instead of {before}"
    captured()


# -- data --------------------------------------------------------------------------------------------------------------


def _ddp() -> tuple[nn.Module, Callable[..., Any]]:
    module = DistributedDataParallel(model())
    return module, module


@check
def ddp_around(rank: Rank) -> None:
    def ours() -> tuple[nn.Module, Callable[..., Any]]:
        module = DistributedDataParallel(compiled(model()))
        return module, module

    trains_alike(rank, _ddp, ours)


@check
def ddp_inside(rank: Rank) -> None:
    def ours() -> tuple[nn.Module, Callable[..., Any]]:
        module = DistributedDataParallel(model())
        return module, compiled(module)

    trains_alike(rank, _ddp, ours)


def _sharded() -> nn.Sequential:
    module = model()
    for block in module:
        fully_shard(block)
    fully_shard(module)
    return module


def _fsdp() -> tuple[nn.Module, Callable[..., Any]]:
    module = _sharded()
    return module, module


@check
def fsdp_per_layer(rank: Rank) -> None:
    def ours() -> tuple[nn.Module, Callable[..., Any]]:
        module = _sharded()
        for block in module:
            block.compile(backend="pygraph", options={"passes": PASSES, "ledger": False})
        return module, module

    trains_alike(rank, _fsdp, ours)


@check
def fsdp_whole(rank: Rank) -> None:
    def ours() -> tuple[nn.Module, Callable[..., Any]]:
        module = _sharded()
        return module, compiled(module)

    trains_alike(rank, _fsdp, ours)


# -- tensors -----------------------------------------------------------------------------------------------------------


@check
def tensors_by_functional_collectives(rank: Rank) -> None:
    """A step of decoding: each rank has part of each layer, and a cache that is written in place."""
    whole, size = model(), rank.size
    parts = [
        (block.up.weight.chunk(size)[rank.number], block.down.weight.chunk(size, 1)[rank.number]) for block in whole
    ]

    def fn(x: torch.Tensor, cache: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        for up, down in parts:
            cache.index_copy_(0, place, x[:1])
            part = torch.tanh(nn.functional.layer_norm(x + cache.sum(0), [WIDE]) @ up.t()) @ down.t()
            x = x + functional.all_reduce(part, "sum", group())
        return torch.relu(x)

    ours = compiled(fn)
    caches = [torch.zeros(CALLS, WIDE, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        for call in range(CALLS):
            before = sent()
            expected = fn(batch(0, call), caches[0], torch.tensor([call]))
            count = sent() - before
            close([ours(batch(0, call), caches[1], torch.tensor([call])), caches[1]], [expected, caches[0]])
            assert sent() - before == 2 * count
    captured()


@check
def tensors_by_dtensor(rank: Rank) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (rank.size,))
    styles = {"up": ColwiseParallel, "down": RowwiseParallel}
    plan = {f"{block}.{name}": style() for block in (0, 1) for name, style in styles.items()}

    def plain() -> tuple[nn.Module, Callable[..., Any]]:
        module = parallelize_module(model(), mesh, plan)
        return module, module

    def ours() -> tuple[nn.Module, Callable[..., Any]]:
        module = parallelize_module(model(), mesh, plan)
        return module, compiled(module)

    same_batch = Rank.__new__(Rank)  # each rank has all rows
    same_batch.number, same_batch.size = 0, rank.size
    trains_alike(same_batch, plain, ours)


# -- experts -----------------------------------------------------------------------------------------------------------


def _experts(rank: Rank, ragged: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each rank has one expert. Rows go there and back, as many as there are, or a fixed number."""
    block = model()[0]
    router = torch.randn(WIDE, rank.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = block.up.weight[:WIDE].t() * (rank.number + 1)

    def fn(x: torch.Tensor) -> torch.Tensor:
        expert = (x @ router).argmax(-1)
        if not ragged:
            one_hot = nn.functional.one_hot(expert, rank.size).double()
            rows = (one_hot.t().unsqueeze(-1) * x).reshape(-1, WIDE)
            theirs = functional.all_to_all_single(rows, None, None, group())
            back = functional.all_to_all_single(torch.tanh(theirs @ weight), None, None, group())
            return x + (one_hot.t().unsqueeze(-1) * back.view(rank.size, *x.shape)).sum(0)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=rank.size)
        given = counts.tolist()
        received = functional.all_to_all_single(counts, None, None, group()).tolist()
        theirs = functional.all_to_all_single(x[order] * 2, received, given, group())
        back = functional.all_to_all_single(torch.tanh(theirs @ weight), given, received, group())
        return x.index_add(0, order, back * 3)

    return fn


def _routed(rank: Rank, ragged: bool) -> None:
    fn = _experts(rank, ragged)
    ours = compiled(fn, dynamic=ragged)
    with torch.no_grad():
        for call in range(CALLS):
            expected = fn(batch(rank.number, call))
            close([ours(batch(rank.number, call))], [expected])


@check
def experts_of_fixed_capacity(rank: Rank) -> None:
    _routed(rank, False)
    captured()


@check
def experts_with_ragged_rows(rank: Rank) -> None:
    _routed(rank, True)


# -- stages ------------------------------------------------------------------------------------------------------------


@check
def stages_that_send_and_receive(rank: Rank) -> None:
    """Each rank has a stage; activations go forward, their gradients back."""

    def steps(stage: Callable[..., Any], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        before, after = rank.number - 1, rank.number + 1
        left = list[torch.Tensor]()
        for call in range(CALLS):
            x = batch(0, call).requires_grad_()
            if before >= 0:
                x = torch.empty_like(x)
                distributed.recv(x, before)
                x.requires_grad_()
            y = stage(x)
            gradient = torch.ones_like(y)
            if after < rank.size:
                distributed.send(y.detach(), after)
                distributed.recv(gradient, after)
            y.backward(gradient)
            if before >= 0:
                assert x.grad is not None
                distributed.send(x.grad, before)
            left += [y.detach(), x.grad]  # type: ignore[list-item]
        return left + [p.grad for p in parameters]  # type: ignore[misc]

    plain, ours = model()[0], model()[0]
    expected = steps(plain, list(plain.parameters()))
    close(steps(compiled(ours), list(ours.parameters())), expected)
    captured()


@check
def collectives_in_place(rank: Rank) -> None:
    """``distributed.all_reduce`` in a compiled function, which Dynamo makes functional."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        distributed.all_reduce(y)
        return torch.relu(y * 2)

    ours = compiled(fn)
    with torch.no_grad():
        for call in range(CALLS):
            expected = fn(batch(rank.number, call))
            close([ours(batch(rank.number, call))], [expected])
    captured()
