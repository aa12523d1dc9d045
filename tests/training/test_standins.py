"""Dynamo's traces of training steps that are not plain: with hooks that come and go, in several graphs, twice.

The trace matters here, not the compiled code: these run on ``aot_eager``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests import forked
from tests.training.steps import (
    CLASSES,
    DEVICE,
    FEATURES,
    Setup,
    assert_equal_training,
    assert_same_state,
    basic,
    batches,
    mlp,
    setup,
    state,
)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``backend="pygraph"`` is ``aot_eager``: nothing is compiled below AOTAutograd."""
    compile = torch.compile

    def traced(step: Any, *, backend: str, options: object, fullgraph: bool) -> Any:
        return compile(step, backend="aot_eager" if backend == "pygraph" else backend, fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", traced)
    yield
    torch._dynamo.reset()


def linear() -> nn.Module:
    """One layer: Dynamo traces each parameter's update."""
    return nn.Linear(FEATURES, CLASSES)


def sgd(model: Callable[[], nn.Module] = linear) -> Setup:
    return setup(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), model)


def check(make: Callable[[Setup], Step], *, fullgraph: bool = False, steps: int = 4) -> None:
    ours, theirs = sgd(), sgd()
    step = pygraph.train_step(make(ours), fullgraph=fullgraph)
    assert_equal_training(step, make(theirs), ours, theirs, steps=steps)


# -- hooks that come and go --------------------------------------------------------------------------------------------


def doubled(of: Setup) -> None:
    of.model[2].bias.grad.mul_(2)  # type: ignore[index, union-attr]


HOOKS: dict[str, Callable[[Setup], Any]] = {
    "parameter": lambda of: of.model[0].weight.register_hook(lambda grad: grad * 2),  # type: ignore[index, union-attr]
    "forward": lambda of: of.model[0].register_forward_hook(lambda *a: a[2] * 2),  # type: ignore[index]
    "backward": lambda of: of.model[2].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,)),  # type: ignore[index]
    "optimizer": lambda of: of.optimizer.register_step_pre_hook(lambda *_: doubled(of)),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "backward" else pytest.mark.sweep) for kind in HOOKS]
)
def test_a_hook_counts_from_the_call_after_it_is_registered_until_it_is_removed(kind: str) -> None:
    handles: dict[Setup, Any] = {}

    def change(of: Setup, index: int) -> None:
        if index == 1:
            handles[of] = HOOKS[kind](of)
        if index == 3:
            handles[of].remove()

    ours, theirs = sgd(mlp), sgd(mlp)
    assert_equal_training(pygraph.train_step(basic(ours)), basic(theirs), ours, theirs, steps=6, after=change)


@pytest.mark.sweep
def test_hooks_of_saved_tensors_around_a_call_count() -> None:
    def doubled(one: Any) -> Any:
        def call(x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                return one(x, y)

        return call

    ours, theirs = sgd(), sgd()
    assert_equal_training(doubled(pygraph.train_step(basic(ours))), doubled(basic(theirs)), ours, theirs, steps=3)


@pytest.mark.sweep
def test_a_step_of_the_optimizer_that_was_replaced_is_called() -> None:
    ours = sgd()
    calls = []
    own = ours.optimizer.step
    step = pygraph.train_step(basic(ours))

    def counted() -> None:
        calls.append(1)
        own()

    for x, y in batches(2):
        step(x, y)
    ours.optimizer.step = counted  # type: ignore[assignment, method-assign]
    for x, y in batches(2):
        step(x, y)
    assert len(calls) == 2


# -- graphs that end midway --------------------------------------------------------------------------------------------


def breaks_everywhere(ours: Setup) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(ours.model(x), y)
        print(end="")
        loss.backward()
        print(end="")
        ours.optimizer.step()
        print(end="")
        ours.optimizer.zero_grad()
        return loss.detach()

    return step


def reads_its_loss(ours: Setup) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(ours.model(x), y)
        loss.backward()
        if loss.item() > 0.5:
            ours.optimizer.step()
        ours.optimizer.zero_grad()
        return loss

    return step


def computed_before(ours: Setup) -> Step:
    compiled_apart = torch.no_grad()(lambda y: y * 2)

    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return ours.model(x)  # type: ignore[no-any-return]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(outside(x), compiled_apart(y))
        loss.backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "make",
    [breaks_everywhere, *(pytest.param(one, marks=pytest.mark.sweep) for one in (reads_its_loss, computed_before))],
)
def test_where_a_graph_ends_the_step_goes_on(make: Callable[[Setup], Step]) -> None:
    check(make)


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_a_gradient_read_as_none_does_not_become_the_none_of_later_programs() -> None:
    def reads_none(ours: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = basic(ours)(x, y)
            assert all(p.grad is None and p.requires_grad for p in ours.model.parameters())
            return loss

        return step

    check(reads_none, fullgraph=True, steps=2)
    kept = sgd().model  # its gradients are not those that it had
    ours = Setup(kept, torch.optim.SGD(kept.parameters(), lr=0.05))
    step = pygraph.train_step(basic(ours), fullgraph=True)
    for x, y in batches(2):
        step(x, y)
        assert [p.grad for p in kept.parameters()] == [None] * 2


def test_gradients_with_a_graph_of_their_own_are_those_of_torch_compile() -> None:
    def penalty(ours: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(ours.model(x), y)
            loss.backward(create_graph=True)
            (loss + sum(p.grad.square().sum() for p in ours.model.parameters())).backward()  # type: ignore[union-attr]
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            return loss.detach()

        return step

    def run(compiled: Callable[[Step], Step]) -> str | dict[str, torch.Tensor]:
        of = sgd()
        step = compiled(penalty(of))
        try:
            for x, y in batches(3):
                step(x, y)
        except RuntimeError as error:
            return str(error)
        return state(of)

    ours = run(pygraph.train_step)
    plain = run(lambda step: torch.compile(step, backend="aot_eager", options=None, fullgraph=False))
    if isinstance(plain, str):  # AOTAutograd has no double backward
        assert ours == plain
    else:  # torch 2.11 leaves its second order out, with no word
        torch.testing.assert_close(ours, plain)


@pytest.mark.sweep
def test_a_gradient_penalty_is_part_of_the_graph() -> None:
    def penalty(ours: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x = x.detach().clone().requires_grad_()
            out = ours.model(x)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = nn.functional.mse_loss(out, y) + slope.square().mean()
            loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            return loss.detach()

        return step

    check(penalty)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3 * ctx.saved_tensors[0] ** 2


def test_a_gradient_penalty_of_a_custom_function_has_its_second_order() -> None:
    """AOTAutograd would take the function's backward for a constant."""

    def penalty(ours: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(Cube.apply(ours.model(x).tanh()), y)
            weights = list(ours.model.parameters())
            slopes = torch.autograd.grad(loss, weights, create_graph=True)
            (loss + sum(slope.square().sum() for slope in slopes)).backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            return loss.detach()

        return step

    check(penalty)


@pytest.mark.parametrize("written", [pytest.param("number", marks=pytest.mark.sweep), "tensor"])
def test_attributes_are_written_behind_a_hook_of_a_result(written: str) -> None:
    """Dynamo of torch 2.13 forgets such writes, if there was one before the hook."""

    def noting(ours: Setup) -> Step:
        ours.model.calls, ours.model.seen = 0, torch.zeros(())  # type: ignore[assignment]

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if written == "number":
                ours.model.calls += 1  # type: ignore[operator]
            else:
                ours.model.seen = ours.model.seen + 1  # type: ignore[operator, assignment]
            out = ours.model(x)
            out.register_hook(lambda grad: grad * 0.5)
            nn.functional.mse_loss(out, y).backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
            ours.model.seen = ours.model.seen + out.detach().sum()  # type: ignore[operator, assignment]
            return ours.model.seen + ours.model.calls  # type: ignore[operator, return-value]

        return step

    check(noting)


# -- optimizers and schedulers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, *(pytest.param(one, marks=pytest.mark.sweep) for one in (None, False))])
def test_gradients_are_after_nesterovs_update_what_they_are_in_eager(foreach: bool | None) -> None:
    """The form ``foreach`` writes into them; they are added to in the next step."""

    def accumulating(ours: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(ours.model(x), y)
            loss.backward()
            ours.optimizer.step()
            return loss.detach()

        return step

    def nesterov() -> Setup:
        return setup(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=foreach), linear)

    ours, theirs = nesterov(), nesterov()
    assert_equal_training(pygraph.train_step(accumulating(ours)), accumulating(theirs), ours, theirs, steps=4)


def test_some_parameters_have_a_momentum_before_others() -> None:
    """The first one is not what zeros lead to: it is dampened."""

    def change(of: Setup, index: int) -> None:
        if index == 1:
            of.model[0].requires_grad_(True)  # type: ignore[index]
        if index == 4:
            of.optimizer.state.pop(of.model[0].bias)  # type: ignore[index]
        if index == 7:
            of.optimizer.state[of.model[0].weight]["momentum_buffer"] = None  # type: ignore[index]

    ours, theirs = (setup(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1)) for _ in range(2))
    for one in (ours, theirs):
        one.model[0].requires_grad_(False)  # type: ignore[index]
    assert_equal_training(pygraph.train_step(basic(ours)), basic(theirs), ours, theirs, steps=10, after=change)


def test_parameters_that_share_memory_are_updated_one_after_the_other() -> None:
    def overlapping() -> tuple[list[nn.Parameter], Step]:
        flat = torch.arange(20.0, dtype=torch.float64) / 20
        pair = [nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[8:].view(3, 4))]
        optimizer = torch.optim.SGD(pair, lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(x @ pair[0].t() + (x @ pair[1].t()).tanh(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return pair, step

    (ours, step), (theirs, eager) = overlapping(), overlapping()
    step = pygraph.train_step(step)
    for call in range(4):
        x, y = torch.full((5, 4), 1.0 + call, dtype=torch.float64), torch.zeros(5, 3, dtype=torch.float64)
        torch.testing.assert_close(step(x, y), eager(x, y))
    torch.testing.assert_close(ours, theirs)


def test_two_steps_may_share_a_scheduler() -> None:
    def pair(wrap: Callable[[Step], Step]) -> tuple[Setup, Callable[[int], Any]]:
        of = sgd()
        scheduler = torch.optim.lr_scheduler.StepLR(of.optimizer, 2, 0.5)

        def scaled(scale: float) -> Step:
            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                loss = nn.functional.mse_loss(of.model(x), y) * scale
                loss.backward()
                of.optimizer.step()
                of.optimizer.zero_grad()
                scheduler.step()
                return loss.detach()

            return wrap(step)

        steps = scaled(1.0), scaled(0.5)

        def run(call: int) -> Any:
            x, y = next(iter(batches(1)))
            return steps[call % 4 == 1](x, y), scheduler.last_epoch, scheduler.get_last_lr()

        return of, run

    (ours, run), (theirs, eager) = pair(pygraph.train_step), pair(lambda step: step)
    for call in range(8):
        torch.testing.assert_close(run(call), eager(call))
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict())


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_a_learning_rate_that_the_step_sets_or_reads_is_that_of_the_moment() -> None:
    def own_rates(ours: Setup) -> Callable[..., Any]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(ours.optimizer, 0.5)

        def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> Any:
            ours.optimizer.param_groups[0]["lr"] = rate
            loss = basic(ours)(x, y)
            scheduler.step()
            return loss, torch.tensor(scheduler.get_last_lr())

        return step

    ours, theirs = sgd(), sgd()
    step, eager = pygraph.train_step(own_rates(ours)), own_rates(theirs)
    rates = iter([0.1, 0.1, 0.02, 0.02, 0.3, 0.3])  # for each call of both
    assert_equal_training(
        lambda x, y: step(x, y, next(rates)), lambda x, y: eager(x, y, next(rates)), ours, theirs, steps=3
    )


@pytest.mark.parametrize("read", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_an_optimizer_whose_state_was_loaded_is_traced(read: bool) -> None:
    """Its groups begin with their numbers, and not with their parameters."""

    def adam() -> Setup:
        of = setup(model=linear)
        of.optimizer.load_state_dict(of.optimizer.state_dict())
        return of

    def make(of: Setup) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            rate = min(of.optimizer.param_groups[0]["lr"], 0.5) if read else 0.5
            return basic(of)(x, y) * rate

        def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            of.optimizer.param_groups[0]["lr"] = next(rates)
            return wrapped(x, y)

        wrapped = pygraph.train_step(step, fullgraph=True) if of is ours else step
        return call

    ours, theirs = adam(), adam()
    rates = iter([1, 1, 0.02, 0.02, 0.3, 0.3])  # for each call of both
    torch._dynamo.utils.counters.clear()
    assert_equal_training(make(ours), make(theirs), ours, theirs, steps=3)
    assert read or torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -- optimizers that several steps use, and overflows ------------------------------------------------------------------


def test_two_steps_of_one_optimizer_each_have_todays_learning_rate() -> None:
    def steps(of: Setup, wrap: Callable[[Step], Step]) -> list[Step]:
        def absolute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.l1_loss(of.model(x), y)
            loss.backward()
            of.optimizer.step()
            of.optimizer.zero_grad()
            return loss.detach()

        return [wrap(basic(of)), wrap(absolute)]

    ours, theirs = sgd(), sgd()
    mine, other = steps(ours, pygraph.train_step), steps(theirs, lambda step: step)
    for number, (x, y) in enumerate(batches(8)):
        for one in (ours, theirs):
            one.optimizer.param_groups[0]["lr"] = (0.1, 0.001)[number % 2]
        torch.testing.assert_close(mine[number % 2](x, y), other[number % 2](x, y))
    assert_same_state(ours, theirs)


def scaled(of: Setup, scaler: torch.amp.GradScaler | None = None) -> Callable[..., torch.Tensor]:
    """A step under a GradScaler whose third argument may have its gradients overflow."""
    by = torch.amp.GradScaler(DEVICE, init_scale=1024.0) if scaler is None else scaler

    def step(x: torch.Tensor, y: torch.Tensor, times: torch.Tensor | float = 1.0) -> torch.Tensor:
        loss = nn.functional.mse_loss(of.model(x), y)
        by.scale(loss * times).backward()
        by.step(of.optimizer)
        by.update()
        of.optimizer.zero_grad()
        return loss.detach()

    return step


READS: dict[str, Callable[[torch.optim.Optimizer, Any], Any]] = {
    "group": lambda optimizer, _: optimizer.param_groups[0]["lr"],
    "twice": lambda optimizer, _: 2 * optimizer.param_groups[0]["lr"],
    "last rate": lambda _, scheduler: scheduler.get_last_lr()[0],
    "epoch": lambda _, scheduler: scheduler.last_epoch,
    "state": lambda _, scheduler: scheduler.state_dict()["_last_lr"][0],
}
DAILY = (("group", True), ("last rate", False))


@pytest.mark.parametrize(
    ("how", "before"),
    [
        pytest.param(how, before, marks=[] if (how, before) in DAILY else pytest.mark.sweep)
        for how in READS
        for before in (False, True)
    ],
)
def test_what_is_read_behind_a_scheduler_is_todays(how: str, before: bool) -> None:
    """Also where the step has read it before."""

    def logging(of: Setup) -> Callable[..., Any]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(of.optimizer, 0.5)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            earlier = READS[how](of.optimizer, scheduler) if before else 0
            loss = basic(of)(x, y)
            scheduler.step()
            return loss, torch.tensor(earlier), torch.tensor(READS[how](of.optimizer, scheduler))

        return step

    ours, theirs = sgd(), sgd()
    assert_equal_training(pygraph.train_step(logging(ours)), logging(theirs), ours, theirs, steps=5)


def test_a_whole_graph_cannot_read_a_rate_behind_a_scheduler() -> None:
    of = sgd()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(of.optimizer, 0.5)

    @pygraph.train_step(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = basic(of)(x, y)
        scheduler.step()
        return loss, of.optimizer.param_groups[0]["lr"]

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        step(*batches(1)[0])


EXACT: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("tensor", "radam", "nadam") else pytest.mark.sweep) for name in EXACT],
)
def test_parameters_of_float64_are_updated_as_exactly_as_in_eager(name: str) -> None:
    """Eager keeps NAdam's product of momenta in float32, and so adds an error; digits cancel in RAdam's variance."""
    ours, theirs = (setup(EXACT[name], lambda: linear().double()) for _ in range(2))
    step, eager = pygraph.train_step(basic(ours)), basic(theirs)
    for x, y in batches(8):
        step(x.double(), y.double())
        eager(x.double(), y.double())
    error = {"nadam": 1e-7, "radam": 1e-9}.get(name, 1e-12)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=error, atol=error)
    kinds = [[value.dtype for value in state.values()] for state in ours.optimizer.state.values()]
    assert kinds == [[value.dtype for value in state.values()] for state in theirs.optimizer.state.values()]


def test_an_overflow_leaves_counters_of_float64_as_they_are() -> None:
    found = []
    torch.set_default_dtype(torch.float64)
    try:
        for wrap in (pygraph.train_step, lambda step: step):
            of = setup(lambda p: torch.optim.Adam(p, lr=0.01), linear)
            step = wrap(scaled(of))
            for number, (x, y) in enumerate(batches(6)):
                step(x, y, torch.full((), torch.inf if number == 2 else 1.0, device=DEVICE))
            found.append([entry["step"].item() for entry in of.optimizer.state.values()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [[5.0] * 2] * 2


@pytest.mark.parametrize("dampening", [pytest.param(0.0, marks=pytest.mark.sweep), 0.5])
def test_an_overflow_before_there_is_a_momentum_changes_nothing(dampening: float) -> None:
    def damped() -> Setup:
        return setup(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=dampening), linear)

    ours, theirs = damped(), damped()
    mine, other = pygraph.train_step(scaled(ours)), scaled(theirs)
    for number, (x, y) in enumerate(batches(6)):
        if number == 3:
            for one in (ours, theirs):
                for entry in one.optimizer.state.values():
                    entry["momentum_buffer"] = None
        times = torch.full((), torch.inf if number in (0, 3) else 1.0, device=DEVICE)
        torch.testing.assert_close(mine(x, y, times), other(x, y, times))
        torch.testing.assert_close(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))


@pytest.mark.parametrize(
    ("scalers", "later"),
    [
        pytest.param(False, False, marks=pytest.mark.sweep),
        (False, True),
        (True, False),
        pytest.param(True, True, marks=pytest.mark.sweep),
    ],
)
def test_a_method_that_was_replaced_is_called(scalers: bool, later: bool) -> None:
    """Also once the step has been traced."""
    called = []

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.append(method)
            return method(*args)

        return call

    def make(of: Setup) -> Step:
        scaler, calls = torch.amp.GradScaler(DEVICE, init_scale=2.0), itertools.count()
        step = scaled(of, scaler)

        def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if next(calls) == (2 if later else 0):
                if scalers:
                    scaler.step = noted(scaler.step)  # type: ignore[method-assign]
                else:
                    of.optimizer.zero_grad = noted(of.optimizer.zero_grad)  # type: ignore[method-assign]
            return wrapped[id(of)](x, y)

        wrapped[id(of)] = pygraph.train_step(step) if not wrapped else step
        return call

    wrapped: dict[int, Step] = {}
    ours, theirs = sgd(), sgd()
    assert_equal_training(make(ours), make(theirs), ours, theirs, steps=4)
    assert len(called) == (4 if later else 8)


def test_a_class_of_scalers_of_the_users_own_is_called() -> None:
    called = []

    class Scaler(torch.amp.GradScaler):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            called.append("step")
            return super().step(*args, **kwargs)

    check(lambda of: scaled(of, Scaler(DEVICE, init_scale=2.0)))
    assert called == ["step"] * 8


def test_what_is_traced_is_of_its_own_class() -> None:
    of = sgd()
    scaler, scheduler = torch.amp.GradScaler(DEVICE), torch.optim.lr_scheduler.StepLR(of.optimizer, 10)
    kinds = (torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler)

    @pygraph.train_step(fullgraph=True)
    def step() -> tuple[list[bool], list[bool]]:
        objects = (of.optimizer, scaler, scheduler)
        exact = [type(each) is torch.optim.SGD for each in objects]
        return [isinstance(each, kind) for each in objects for kind in (*kinds, (*kinds, int))], exact

    each = [[True, False, False, True], [False, True, False, True], [False, False, True, True]]
    assert step() == (list(itertools.chain(*each)), [True, False, False])


TRACED_BEFORE = """
import torch, pygraph

class Held: pass

held, optimizer = Held(), torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
assert torch.compile(lambda x: x + isinstance(held, Held), backend="eager", fullgraph=True)(torch.zeros(2))[0] == 1
print(pygraph.train_step(lambda: isinstance(optimizer, torch.optim.Optimizer), fullgraph=True)())
"""


def test_what_dynamo_traced_before_the_first_step_does_not_decide_of_which_class_an_optimizer_is() -> None:
    done = forked.run(TRACED_BEFORE)
    assert done.stdout == "True\n", done.stderr[-2000:]
