"""Training steps of several ranks, compiled whole: DistributedDataParallel averages in the graph what its reducer would
have averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pygraph
from tests.distributed.checks import check, sent
from tests.distributed.processes import Rank

STEPS = 20
FEATURES = 8
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6} if not torch.cuda.is_available() else {"rtol": 1e-4, "atol": 1e-5}
"""Inductor and eager round otherwise, and each of them on each device."""

Step = Callable[[int, torch.Tensor, torch.Tensor], Any]
"""The n-th step on inputs and targets."""


class Twins:
    """A model trained by eager, and the same one by ``train_step``."""

    def __init__(self, rank: Rank, model: Callable[[], nn.Module], **options: Any) -> None:
        self.rank = rank
        self.models: list[DistributedDataParallel] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        for _ in range(2):
            torch.manual_seed(0)
            made = DistributedDataParallel(model().to(rank.device), **options)
            self.models.append(made)
            self.optimizers.append(torch.optim.AdamW(made.parameters(), lr=0.01))

    def train(self, make: Callable[[DistributedDataParallel, torch.optim.Optimizer], Callable[..., Any]]) -> list[int]:
        """Each step is compared. Returns how many collectives each step of ours sent, and forgets none of eager's."""
        eager = make(self.models[0], self.optimizers[0])
        ours = pygraph.train_step(make(self.models[1], self.optimizers[1]))
        counts = []
        for number in range(STEPS):
            x, y = inputs(self.rank, number)
            expected = eager(x, y)
            before = sent()
            found = ours(x, y)
            counts.append(sent() - before)
            torch.testing.assert_close(found, expected, **TOLERANCE)
            self.same()
        return counts

    def same(self) -> None:
        theirs, mine = ([*m.parameters(), *m.buffers()] for m in self.models)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)


def inputs(rank: Rank, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Others on each rank and step."""
    generator = torch.Generator().manual_seed(2 * number + rank.number)
    x, y = torch.randn(6, FEATURES, generator=generator), torch.randn(6, 2, generator=generator)
    return x.to(rank.device), y.to(rank.device)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def basic(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole() -> Any:
    """The report of the one graph that there is, with one region that replays."""
    (report,) = pygraph.reports()
    assert report.notes == []
    (region,) = report.regions
    assert region.record.state == "replay"
    assert region.record.replays == STEPS - 2
    return report


def apart(why: str) -> None:
    """The model ran outside of graphs, as the reports say."""
    notes = [note for report in pygraph.reports() for note in report.notes]
    assert f"DistributedDataParallel runs outside of the graph: {why}" in notes, notes


def order(report: Any) -> str:
    """What the program does with collectives, in order: s(end), w(ait), and . for any other step."""
    kinds = {"all_reduce": "s", "wait_tensor": "w"}
    steps = [step for run in report.record.runs for step in run]
    found = [next((kind for name, kind in kinds.items() if s.origins[0].startswith(name)), ".") for s in steps]
    return "".join(found)


@check
def a_step_is_one_graph(rank: Rank) -> None:
    counts = Twins(rank, layers).train(basic)
    whole()
    if rank.device == "cpu":
        assert counts == [1] * STEPS, "gradients fit into one bucket"


@check
def gradients_are_sent_as_soon_as_they_are_known(rank: Rank) -> None:
    """Bucket by bucket, the last layer first, before the backward pass is over; waits come at the end."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    counts = Twins(rank, layers, bucket_cap_mb=0.001).train(step)
    if rank.device == "cpu":
        assert set(counts) == {3}
    did = order(whole())
    sends = [at for at, kind in enumerate(did) if kind == "s"]
    assert len(sends) == 3, did
    assert did.index("w") > sends[-1], did
    assert "." in did[sends[0] : sends[-1]], did


@check
def buffers_are_those_of_rank_0(rank: Rank) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    Twins(rank, model).train(basic)
    assert len(pygraph.reports()) == 1


@check
def micro_batches_send_once(rank: Rank) -> None:
    """Gradients of the first stay on their rank until those of the last are added."""

    def step(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with model.no_sync():
                nn.functional.mse_loss(model(x[:3]), y[:3]).backward()
            loss = nn.functional.mse_loss(model(x[3:]), y[3:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    counts = Twins(rank, layers).train(step)
    whole()
    if rank.device == "cpu":
        assert counts == [1] * STEPS


@check
def gradients_are_kept(rank: Rank) -> None:
    """They are read after the step, and set to zero before the next."""
    twins = Twins(rank, layers)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    twins.train(step)
    for mine, theirs in zip(twins.models[1].parameters(), twins.models[0].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)


@check
def a_backward_pass_in_another_graph(rank: Rank) -> None:
    """The reducer averages what autograd's engine computes."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(model(x), y)
            torch._dynamo.graph_break()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    Twins(rank, layers).train(step)
    apart("its backward pass is not in the same graph")


@check
def a_backward_pass_outside_of_the_step(rank: Rank) -> None:
    """What the step returns is gone back from by the caller: averaged all the same."""
    twins = Twins(rank, layers)
    steps = [lambda x, y, model=model: nn.functional.mse_loss(model(x), y) for model in twins.models]
    steps[1] = pygraph.train_step(steps[1])
    for number in range(6):
        x, y = inputs(rank, number)
        for step, optimizer in zip(steps, twins.optimizers, strict=True):
            step(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        twins.same()
    apart("its backward pass is not in the same graph")


@check
def evaluation_between_steps(rank: Rank) -> None:
    twins = Twins(rank, layers)
    eager = basic(twins.models[0], twins.optimizers[0])
    ours = pygraph.train_step(basic(twins.models[1], twins.optimizers[1]))
    for number in range(6):
        x, y = inputs(rank, number)
        torch.testing.assert_close(ours(x, y), eager(x, y), **TOLERANCE)
        twins.same()
        with torch.no_grad():
            torch.testing.assert_close(twins.models[1](x), twins.models[0](x), **TOLERANCE)
    for _ in range(3):  # the reducer takes over where the step is left
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
            basic(model, optimizer)(x, y)
        twins.same()


def quarter(_state, bucket):  # type: ignore[no-untyped-def] # DDP looks at annotations, which are no strings
    """A communication hook that sends nothing."""
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer().mul_(0.25))
    return done


@check
def what_the_reducer_has_to_do(rank: Rank) -> None:
    """A communication hook, and parameters that not every step uses, are left to it."""

    twins = Twins(rank, layers)
    for model in twins.models:
        model.register_comm_hook(None, quarter)
    twins.train(basic)
    apart("it has a communication hook")
    pygraph.reset()
    torch._dynamo.reset()
    Twins(rank, layers, find_unused_parameters=True).train(basic)
    apart("which parameters are used is found in each step")


@check
def a_hook_that_comes_later(rank: Rank) -> None:
    """What was traced without it is not used any more."""
    twins = Twins(rank, layers)
    eager = basic(twins.models[0], twins.optimizers[0])
    ours = pygraph.train_step(basic(twins.models[1], twins.optimizers[1]))

    for number in range(8):
        if number == 4:
            for model in twins.models:
                model.register_comm_hook(None, quarter)
        x, y = inputs(rank, number)
        torch.testing.assert_close(ours(x, y), eager(x, y), **TOLERANCE)
        twins.same()
