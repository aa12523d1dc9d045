"""User code around a training step: each case against eager, in one graph, replayed."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import pygraph
from tests.training.steps import (
    BATCH,
    CLASSES,
    DEVICE,
    FEATURES,
    WIDTH,
    Setup,
    assert_equal_training,
    assert_same_state,
    basic,
    batches,
    setup,
    state,
)

Step = Callable[[torch.Tensor, torch.Tensor], Any]
Program = Callable[[Setup], tuple[Step, Callable[[int], None]]]
"""Of a setup: its step, and what is done after each call."""


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def check(
    program: Program,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    model: Callable[[], nn.Module] | None = None,
    *,
    compiled: int = 1,
    replays: int = 18,
    fullgraph: bool = True,
    fifth: int = BATCH,
    **options: Any,
) -> None:
    """20 calls of the program's step agree with eager, in so many graphs, and so many are replayed. Each fifth call
    has another batch size."""
    ours, theirs = setup(optimizer, model), setup(optimizer, model)
    (mine, after), (other, after_other) = program(ours), program(theirs)
    afters = {id(ours): after, id(theirs): after_other}

    def in_turn(step: Step) -> Step:
        calls = itertools.count(1)
        return lambda x, y: step(x[:fifth], y[:fifth]) if next(calls) % 5 == 0 else step(x, y)

    step = pygraph.train_step(mine, fullgraph=fullgraph, options=options)
    assert_equal_training(
        in_turn(step), in_turn(other), ours, theirs, steps=20, after=lambda one, index: afters[id(one)](index)
    )
    assert ours.compiled == compiled
    assert ours.replays >= replays


def nothing(index: int) -> None:
    """Nothing is done after a call."""


def plain(ours: Setup) -> Any:
    return basic(ours), nothing


def loss_of(ours: Setup, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(ours.model(x), y)


# -- rates and gradients -----------------------------------------------------------------------------------------------


def in_groups(params: Any) -> torch.optim.Optimizer:
    weights, rest = [], []
    for p in params:
        (weights if p.dim() > 1 else rest).append(p)
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.003, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01)


def schedulers_outside(ours: Setup) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: lr_scheduler.StepLR(ours.optimizer, 2),
        lambda: lr_scheduler.OneCycleLR(ours.optimizer, 0.05, total_steps=8),  # betas too
        lambda: lr_scheduler.CosineAnnealingWarmRestarts(ours.optimizer, 2),
        lambda: lr_scheduler.SequentialLR(
            ours.optimizer,
            [lr_scheduler.LinearLR(ours.optimizer), lr_scheduler.CosineAnnealingLR(ours.optimizer, 5)],
            [2],
        ),
        lambda: lr_scheduler.LambdaLR(ours.optimizer, lambda epoch: 0.9**epoch),
    ]
    made: list[Any] = [kinds[0]()]
    plateau = lr_scheduler.ReduceLROnPlateau(ours.optimizer, patience=1)

    def after(index: int) -> None:
        made[-1].step()
        if index % 4 == 3 and len(made) < len(kinds):  # the next kind takes over
            made.append(kinds[len(made)]())
        plateau.step(1.0)

    return basic(ours), after


def clipped(set_to_none: bool) -> Program:
    def program(ours: Setup) -> Any:
        one, other = lr_scheduler.StepLR(ours.optimizer, 3, 0.5), lr_scheduler.ExponentialLR(ours.optimizer, 0.95)
        group = ours.optimizer.param_groups[0]["params"]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            ours.optimizer.zero_grad(set_to_none)
            loss = loss_of(ours, x, y) * 50
            loss.backward()
            nn.utils.clip_grad_value_(group, 3.0)
            norm = nn.utils.clip_grad_norm_(ours.model.parameters(), 1.0)
            ours.optimizer.step()
            one.step()
            other.step()
            return loss.detach(), norm, [p.grad.clone() for p in group]

        def after(index: int) -> None:
            norms = [p.grad.norm() for p in ours.model.parameters() if p.grad is not None]
            assert len(norms) == 4
            assert torch.stack(norms).norm() <= 1.0001
            assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(
                0.01 * 0.5 ** ((index + 1) // 3) * 0.95 ** (index + 1)
            )

        return step, after

    return program


# -- models ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The first layer is frozen; the third has the weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.hidden = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.again, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.frozen.requires_grad_(False)
        self.again.weight = self.hidden.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.again(self.hidden(self.frozen(x)).relu()).relu())


class Averaged(nn.Module):
    """With exponential moving averages of its parameters, one by PyTorch's class and one by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tied()
        self.average = swa_utils.AveragedModel(self.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.by_hand = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Dropped(nn.Module):
    """With random numbers in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(self.first(x), 0.3)
        return functional.dropout(self.last(hidden.relu()), 0.2)


def averaged(inside: bool) -> Program:
    def program(ours: Setup) -> Any:
        model: Any = ours.model

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            ours.optimizer.zero_grad()
            total = torch.zeros((), device=DEVICE)
            for part, target in zip(x.chunk(2), y.chunk(2), strict=True):  # micro-batches
                loss = loss_of(ours, part, target) / 2
                loss.backward()
                total += loss.detach()
            ours.optimizer.step()
            with torch.no_grad():
                for kept, p in zip(model.by_hand.parameters(), model.net.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
            if inside:
                model.average.update_parameters(model.net)
            return total

        def after(index: int) -> None:
            if not inside:
                model.average.update_parameters(model.net)

        return step, after

    return program


class Normalised(nn.Sequential):
    """With batch normalisation."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def checkpointed(reentrant: bool) -> Program:
    def program(ours: Setup) -> Any:
        first, *rest = ours.model.children()
        later = nn.Sequential(*rest)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = functional.mse_loss(checkpoint(later, first(x), use_reentrant=reentrant), y)
            loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            return loss.detach()

        return step, nothing

    return program


def bfloat16(ours: Setup) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = loss_of(ours, x, y)
        loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        return loss.detach()

    return step, nothing


def scaled(autocast: torch.dtype | None, clip: bool) -> Program:
    def program(ours: Setup) -> Any:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)
        times, scales = torch.ones((), device=DEVICE), [2.0**10]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            ours.optimizer.zero_grad()
            with torch.autocast(DEVICE, autocast, enabled=autocast is not None):
                loss = loss_of(ours, x, y)
            scaler.scale(loss * times).backward()
            if clip:
                scaler.unscale_(ours.optimizer)
                nn.utils.clip_grad_norm_(ours.model.parameters(), 0.5)
            scaler.step(ours.optimizer)
            scaler.update()
            return loss.detach()

        def after(index: int) -> None:
            times.fill_(torch.inf if index % 5 == 3 else 1.0)  # the next gradients overflow
            scales.append(scaler.get_scale())
            ours.model._buffers["scale"] = torch.tensor([scales[-1], scaler._get_growth_tracker()])
            if index == 19:
                assert any(new < old for old, new in itertools.pairwise(scales))
                assert any(new > old for old, new in itertools.pairwise(scales))

        return step, after

    return program


# -- what happens between two calls ------------------------------------------------------------------------------------


def interrupted(ours: Setup) -> Any:
    """A checkpoint after the sixth call; parameters replaced; a loss that is no number, which spoils all; then the
    checkpoint is loaded, from a file or from memory."""
    kept: list[io.BytesIO] = []
    times = torch.ones((), device=DEVICE)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = loss_of(ours, x, y) * times
        loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        return torch.nan_to_num(loss.detach(), -1.0)

    def after(index: int) -> None:
        if index == 5:
            kept.append(io.BytesIO())
            torch.save((ours.model.state_dict(), ours.optimizer.state_dict()), kept[0])
        if index in (3, 7, 14):
            for p in ours.model.parameters():
                p.data = p.data * 0.5
        times.fill_(torch.nan if index == 8 else 1.0)
        if index in (11, 16):
            assert index == 16 or all(p.isnan().all() for p in ours.model.parameters())
            kept[0].seek(0)
            model, optimizer = torch.load(kept[0])
            ours.model.load_state_dict(model)
            ours.optimizer.load_state_dict(optimizer)

    return step, after


def evaluated(ours: Setup) -> Any:
    def after(index: int) -> None:
        if index % 4 == 2:
            ours.model.eval()
            with torch.no_grad():
                ours.model._buffers["eval"] = ours.model(batches(1)[0][0])
            ours.model.train()

    return basic(ours), after


ROUNDED = {"inductor": {"emulate_precision_casts": True}}
"""Inductor rounds to half precision wherever eager does."""

CASES: dict[str, tuple[Program, dict[str, Any]]] = {
    "interrupted": (interrupted, {"optimizer": sgd, "model": lambda: nn.Linear(FEATURES, CLASSES)}),
}
SWEEP: dict[str, tuple[Program, dict[str, Any]]] = {
    "scaler": (scaled(torch.float16, True), {"optimizer": sgd, **ROUNDED}),
    "schedulers": (schedulers_outside, {"optimizer": in_groups}),
    "clipping": (clipped(True), {"optimizer": in_groups}),
    "averages": (averaged(False), {"optimizer": sgd, "model": Averaged}),
    "normalised": (evaluated, {"optimizer": sgd, "model": Normalised, "fifth": 4, "compiled": 2, "replays": 14}),
    # the first call finds no gradients
    "zeros": (clipped(False), {"optimizer": in_groups, "compiled": 2, "replays": 17}),
    # AveragedModel reads on the host how often it was called: the graph ends there
    "averages-inside": (averaged(True), {"optimizer": sgd, "model": Averaged, "fullgraph": False, "compiled": 2}),
    "checkpoint": (checkpointed(False), {}),
    "checkpoint-reentrant": (checkpointed(True), {}),
    "bfloat16": (bfloat16, {"optimizer": sgd, **ROUNDED}),
    "scaler-float32": (scaled(None, False), {}),
    "scaler-float32-clipping": (scaled(None, True), {}),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEEP)])
@pytest.mark.usefixtures("fresh")
def test_a_step_agrees_with_eager(name: str) -> None:
    program, expected = (CASES | SWEEP)[name]
    check(program, **expected)


def scored(ours: Setup) -> Any:
    """A step that computes its result behind the optimizer, from results of the model before the update."""

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = ours.model(x)
        loss = functional.mse_loss(out, y)
        loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        return loss.detach() * 2 + (out.detach() - y).abs().mean()

    return step, nothing


@pytest.mark.skipif(DEVICE != "cuda", reason="Inductor adds the bias of a linear layer by itself on GPUs only")
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.usefixtures("fresh")
def test_metrics_are_those_of_the_weights_before(optimizer: Any) -> None:
    check(scored, optimizer=optimizer)


@pytest.mark.sweep
@pytest.mark.usefixtures("fresh")
def test_gradients_are_accumulated_by_one_step_and_used_by_another() -> None:
    def program(ours: Setup) -> Any:
        def accumulate(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = loss_of(ours, x, y) / 2
            loss.backward()
            return loss.detach()

        def update() -> None:
            ours.optimizer.step()
            ours.optimizer.zero_grad()

        return accumulate, update

    ours, theirs = setup(), setup()
    (accumulate, update), (other, other_update) = program(ours), program(theirs)
    accumulate, update = pygraph.train_step(accumulate, fullgraph=True), pygraph.train_step(update, fullgraph=True)
    for index, (x, y) in enumerate(batches(40)):
        torch.testing.assert_close(accumulate(x, y), other(x, y), rtol=1e-4, atol=1e-5)
        if index % 2:
            update()
            other_update()
        assert_same_state(ours, theirs)
    assert ours.compiled == 3  # a first micro-batch, another, and the update
    assert ours.replays >= 54


@pytest.mark.sweep
@pytest.mark.usefixtures("fresh")
def test_random_numbers_are_those_of_compiled_training_and_replays_equal_uncaptured_calls() -> None:
    def train(step: Step) -> torch.Tensor:
        torch.manual_seed(3)
        return torch.stack([step(x, y).clone() for x, y in batches(20)])

    replayed = setup(adamw, Dropped)
    losses = train(pygraph.train_step(basic(replayed), fullgraph=True))
    assert replayed.compiled == 1
    assert replayed.replays >= 18

    uncaptured = setup(adamw, Dropped)
    never = {"capture_after": 1000}
    assert torch.equal(losses, train(pygraph.train_step(basic(uncaptured), fullgraph=True, options=never)))
    assert uncaptured.replays == 0
    assert all(torch.equal(value, state(uncaptured)[name]) for name, value in state(replayed).items())

    compiled = setup(adamw, Dropped)
    compiled.model.forward = torch.compile(compiled.model.forward)
    torch.testing.assert_close(losses, train(basic(compiled)), rtol=1e-4, atol=1e-5)
    assert_same_state(replayed, compiled)


@pytest.mark.sweep
@pytest.mark.parametrize(("traced", "compiled", "replays"), [(False, 4, 54), (True, 5, 16)])
@pytest.mark.usefixtures("fresh")
def test_training_goes_on_after_an_exception(traced: bool, compiled: int, replays: int) -> None:
    """An untraced callback may read the learning rate, so the scheduler ends the graph, where the loss is still needed:
    the step is forward, backward, update, and the detached loss, of which three are captured. A traced callback leaves
    one graph; of the calls in which it raises, Dynamo compiles some functions that they call, four in all."""
    fails = [False]

    def callback() -> None:
        if fails[0]:
            raise ValueError("the user's")

    if not traced:
        callback = torch.compiler.disable(callback)

    def program(ours: Setup) -> Step:
        scheduler = lr_scheduler.ExponentialLR(ours.optimizer, 0.8)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            ours.optimizer.zero_grad()
            loss = loss_of(ours, x, y)
            loss.backward()
            ours.optimizer.step()
            scheduler.step()
            value = loss.detach()
            callback()
            return value

        return step

    ours, theirs = setup(), setup()
    step, other = pygraph.train_step(program(ours)), program(theirs)
    for index, (x, y) in enumerate(batches(20)):
        fails[0] = index in (6, 11)
        for one in (step, other):
            if fails[0]:
                with pytest.raises(ValueError, match="the user's"):
                    one(x, y)
            if index in (3, 12):
                with pytest.raises(RuntimeError):
                    one(x[:, 1:], y)
        if not fails[0]:
            torch.testing.assert_close(step(x, y), other(x, y), rtol=1e-4, atol=1e-5)
        assert_same_state(ours, theirs)
        assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]
    assert ours.compiled <= compiled  # no program again after an exception
    assert ours.replays >= replays
