"""``pygraph.capture`` against eager: the same losses, parameters, buffers and optimizer state, bit for bit, whatever
happens around the step; and steps that are not captured, with the reason."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph.bench.worker import what_was_captured
from pygraph.errors import CaptureError
from pygraph.report.text import render_text
from pygraph.runtime.host.driver import HostDriver
from pygraph.training import whole_step
from tests.runtime.regions import same_bits
from tests.training.steps import DEVICE, drawn, generator_state

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS = 20


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


@dataclass
class Trained:
    """A model with its optimizer, and the step that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any] = field(init=False)
    kept: dict[str, Any] = field(default_factory=dict)
    """What else is compared."""

    def state(self) -> list[Any]:
        """Everything that training leaves behind."""
        states = [
            [state[name] for name in sorted(state)]
            for group in self.optimizer.param_groups
            for state in (self.optimizer.state.get(p, {}) for p in group["params"])
        ]
        gradients = [p.grad for p in self.model.parameters()]
        return [list(self.model.state_dict().values()), states, gradients, [self.kept[n] for n in sorted(self.kept)]]


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def plain_step(trained: Trained) -> Callable[..., Any]:
    model, optimizer = trained.model, trained.optimizer

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


Make = Callable[[], Trained]
Around = Callable[[int, Trained], None]


def make(
    step: Callable[[Trained], Callable[..., Any]] = plain_step,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    **model: Any,
) -> Make:
    """A program that trains a small net."""

    def made() -> Trained:
        torch.manual_seed(0)
        net = Net(**model).to(DEVICE)
        trained = Trained(net, optimizer(net))
        trained.step = step(trained)
        return trained

    return made


def batches(sizes: Callable[[int], int] = lambda _: 5) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for call in range(CALLS):
        yield drawn(generator, sizes(call), 6), drawn(generator, sizes(call), 3)


def run(trained: Trained, around: Around | None, sizes: Callable[[int], int]) -> list[Any]:
    """Results and states of all calls, as copies."""
    seen: list[Any] = []
    torch.manual_seed(2)
    for call, (x, y) in enumerate(batches(sizes)):
        if around is not None:
            around(call, trained)
        try:
            result = trained.step(x, y)
        except ValueError as error:
            result = str(error)
        seen.append(copy.deepcopy([_detached(result), _detached(trained.state())]))
    seen.append(generator_state())
    return seen


def _detached(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_detached(item) for item in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def check(
    made: Make, around: Around | None = None, sizes: Callable[[int], int] = lambda _: 5, replays: int = CALLS - 5
) -> Any:
    """The captured program does what the eager one does; at least so many calls were replays. Returns its record."""
    expected = run(made(), around, sizes)
    captured = made()
    captured.step = pygraph.capture(captured.step)
    actual = run(captured, around, sizes)
    for call, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert same_bits(one, other), f"call {call} differs"
    record = captured.step.record
    assert record.replays >= replays, record
    assert record.replays + record.uncaptured == CALLS
    return record


def refused(made: Make, reason: str, around: Around | None = None) -> Any:
    """The program runs as it is, for ``reason``. Returns that refusal."""
    record = check(made, around, replays=0)
    assert record.replays == 0
    assert reason in record.refusals, record
    return record.refusals[reason]


class WallTimer:
    """Of a device that is never behind."""

    def __init__(self) -> None:
        self.begin = self.end = perf_counter()

    def stop(self) -> None:
        self.end = perf_counter()

    def seconds(self) -> float:
        return self.end - self.begin


def test_real_calls_choose_the_order_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_ORDER", "measured")
    monkeypatch.setattr(HostDriver, "parallel", True)
    monkeypatch.setattr(HostDriver, "timer", lambda _, __: WallTimer())
    eager, captured = make()(), make()()
    captured.step = pygraph.capture(captured.step)
    x, y = next(batches())
    for call in range(120):
        assert same_bits(eager.step(x, y), captured.step(x, y)), f"call {call} differs"
    assert same_bits(_detached(eager.state()), _detached(captured.state()))
    (region,) = captured.step.record.regions
    assert region.longest_path < region.launches
    assert len(region.orders) == 1
    assert region.contests == 0


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda m: sgd(m),
        lambda m: sgd(m, foreach=True, nesterov=True, weight_decay=0.01),
        lambda m: torch.optim.AdamW(m.parameters(), fused=True),
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01, device=DEVICE), fused=True, amsgrad=True),
        pytest.param(
            lambda m: torch.optim.Adagrad(m.parameters(), fused=True),
            marks=pytest.mark.skipif(DEVICE == "cuda", reason="torch's fused Adagrad is for CPUs"),
        ),
    ],
    ids=["sgd", "sgd-foreach", "adamw-fused", "adam-fused-tensor-rate", "adagrad-fused"],
)
def test_optimizers(optimizer: Any) -> None:
    check(make(optimizer=optimizer))
    assert pygraph.counters()["captures"] >= 1


def test_step_count_on_the_host_is_refused() -> None:
    refusal = refused(make(optimizer=lambda m: torch.optim.Adam(m.parameters())), "host-read")
    assert "test_capture.py" in str(refusal.loc)


# -- what Dynamo does not trace ----------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.sigmoid(x)


def test_custom_autograd_function() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = (Scaled.apply(trained.model(x)) - y).square().sum()
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss

        return run_step

    check(make(step))


def _clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-0.1, 0.1)


def test_hooks_of_tensors_gradients_and_modules() -> None:
    def hooked() -> Trained:
        trained = make()()
        first = trained.model.first
        first.weight.register_hook(lambda gradient: gradient * 0.5)
        first.bias.register_post_accumulate_grad_hook(_clamp)
        trained.model.norm.register_full_backward_hook(lambda module, given, got: (given[0] * 1.5,))
        trained.model.norm.register_forward_hook(lambda module, args, result: result + 0.25)
        return trained

    check(hooked)


def test_a_hook_that_comes_later_and_goes_again() -> None:
    handles: list[Any] = []

    def around(call: int, trained: Trained) -> None:
        if call == 8:
            handles.append(trained.model.first.weight.register_hook(lambda gradient: gradient * 0))
        if call == 14:
            handles.pop().remove()

    check(make(), around, replays=6)


class Recurrent(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = layer(6, 8, batch_first=True, **options)
        self.last = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x.expand(4, *x.shape).transpose(0, 1))[0][:, -1])


@pytest.mark.skipif(DEVICE != "cuda", reason="layers of cuDNN")
@pytest.mark.parametrize(
    ("layer", "options"),
    [(nn.LSTM, {"num_layers": 2}), (nn.GRU, {"bidirectional": True}), (nn.RNN, {})],
)
def test_recurrent_layers(layer: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    """Kernels of cuDNN: part of what they leave on the stack is found in parameters of ATen's kernels."""

    def made() -> Trained:
        torch.manual_seed(0)
        model = Recurrent(layer, **options).to(DEVICE)
        trained = Trained(model, sgd(model))
        trained.step = plain_step(trained)
        return trained

    check(made)


def test_a_replay_looks_at_changes_alone_where_modules_refer_to_their_parameters_weakly() -> None:
    """As ``nn.LSTM`` does. That is a matter of time only, so that nothing but the walk itself shows it."""

    def step(trained: Trained) -> Callable[..., Any]:
        trained.model.known = [weakref.ref(parameter) for parameter in trained.model.parameters()]
        return plain_step(trained)

    captured = pygraph.capture(make(step)().step)
    walks: list[Any] = []
    for x, y in batches():
        captured(x, y)
        walks.append(captured._kept and captured._kept[0])
    assert captured.record.replays > 10
    assert walks[-1] is not None
    assert all(walk is walks[-1] for walk in walks[-5:])


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_gradients_are_clipped() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = nn.functional.mse_loss(trained.model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(trained.model.parameters(), 0.1)
            nn.utils.clip_grad_value_(trained.model.parameters(), 0.01)
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss, norm

        return run_step

    check(make(step))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_stay_after_the_step(to_none: bool) -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            trained.optimizer.zero_grad(set_to_none=to_none)
            loss = nn.functional.mse_loss(trained.model(x), y)
            loss.backward()
            trained.optimizer.step()
            return loss

        return run_step

    check(make(step))


def test_gradients_accumulate_over_micro_batches() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            losses = []
            for some, target in zip(x.chunk(2), y.chunk(2), strict=True):
                loss = nn.functional.mse_loss(trained.model(some), target) / 2
                loss.backward()
                losses.append(loss)
            trained.optimizer.step()
            trained.optimizer.zero_grad(set_to_none=False)
            return losses

        return run_step

    check(make(step))


def test_a_micro_batch_at_a_time() -> None:
    """Two calls for one step of the optimizer: told apart by a number that the step keeps for itself."""

    def step(trained: Trained) -> Callable[..., Any]:
        count = 0

        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal count
            loss = nn.functional.mse_loss(trained.model(x), y)
            loss.backward()
            count = (count + 1) % 2
            if not count:
                trained.optimizer.step()
                trained.optimizer.zero_grad()
            return loss

        return run_step

    check(make(step), replays=CALLS - 10)


# -- random numbers, buffers -------------------------------------------------------------------------------------------


def test_dropout_draws_the_same_numbers() -> None:
    check(make(dropout=0.5))


def test_each_replay_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_VERIFY", "always")
    check(make(dropout=0.5))


def test_running_statistics() -> None:
    check(make(norm=True))


# -- between the calls -------------------------------------------------------------------------------------------------


def test_parameters_are_replaced() -> None:
    def around(call: int, trained: Trained) -> None:
        if call in (8, 9, 15):
            for parameter in trained.model.parameters():
                parameter.data = parameter.data * 0.5

    check(make(), around)


def test_a_state_dict_is_loaded_while_the_old_state_lives() -> None:
    old: list[Any] = []

    def around(call: int, trained: Trained) -> None:
        if call == 10:
            old.append([trained.optimizer.state, trained.optimizer.param_groups])
            saved = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
            for state in saved[1]["state"].values():
                state["momentum_buffer"] *= 2
            trained.model.load_state_dict(saved[0])
            trained.optimizer.load_state_dict(saved[1])

    check(make(), around, replays=CALLS - 9)  # it leaves its groups' entries in another order


def test_a_last_batch_of_another_size() -> None:
    check(make(), sizes=lambda call: 2 if call % 10 == 9 else 5, replays=CALLS - 7)


def test_evaluation_in_between() -> None:
    def around(call: int, trained: Trained) -> None:
        if call % 4 == 3:
            trained.model.eval()
            with torch.no_grad():
                trained.kept["evaluated"] = trained.model(torch.ones(4, 6, device=DEVICE))
            trained.model.train()

    check(make(dropout=0.5, norm=True), around)


def test_a_mode_that_is_left_on() -> None:
    """The step itself runs in evaluation mode for a while: other operators, and other draws."""

    def around(call: int, trained: Trained) -> None:
        trained.model.train(call < 8 or call > 14)

    check(make(dropout=0.5, norm=True), around, replays=CALLS - 9)


def test_learning_rates_are_never_frozen() -> None:
    def around(call: int, trained: Trained) -> None:
        for group in trained.optimizer.param_groups:
            group["lr"] = 0.1 if call < 8 else 0.03 if call < 15 else 0.1

    check(make(), around, replays=9)


def test_a_rate_that_changes_at_each_call_is_refused() -> None:
    def around(call: int, trained: Trained) -> None:
        trained.optimizer.param_groups[0]["lr"] = 0.1 / (call + 1)

    refusal = refused(make(), "state-changes", around)
    assert "['lr']" in refusal.detail


def test_a_rate_in_a_tensor_is_followed() -> None:
    def around(call: int, trained: Trained) -> None:
        trained.optimizer.param_groups[0]["lr"].fill_(0.1 / (call + 1))

    check(
        make(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1, device=DEVICE), fused=True)),
        around,
    )


def test_losses_that_are_nan() -> None:
    def around(call: int, trained: Trained) -> None:
        if call == 9:
            with torch.no_grad():
                trained.model.last.bias.fill_(float("nan"))

    check(make(), around)


def test_an_exception_leaves_nothing_behind() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        inner = plain_step(trained)

        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if trained.kept["fails"]:
                nn.functional.mse_loss(trained.model(x), y).backward()
                raise ValueError("a bad batch")
            return inner(x, y)

        return run_step

    def around(call: int, trained: Trained) -> None:
        trained.kept["fails"] = call in (2, 12)
        if call in (3, 13):
            trained.optimizer.zero_grad()

    check(make(step), around, replays=CALLS - 9)


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_of_all_kinds() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            logits = trained.model(x)
            loss = nn.functional.mse_loss(logits, y)
            loss.backward()
            trained.optimizer.step()
            trained.kept["last"] = (logits.detach(), x.shape[0])
            trained.kept["bias"] = trained.model.last.bias.detach()[1:]
            trained.optimizer.zero_grad()
            return {"loss": loss, "again": loss, "x": x, "size": 5, "half": logits.detach()[:2], "none": None}

        return lambda x, y: list(run_step(x, y).values())

    check(make(step))


def test_a_returned_loss_cannot_be_gone_back_from_twice() -> None:
    def step(trained: Trained) -> Callable[..., Any]:
        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.mse_loss(trained.model(x), y)
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss

        return run_step

    trained = make(step)()
    trained.step = pygraph.capture(trained.step)
    for x, y in batches():
        loss = trained.step(x, y)
        assert loss.requires_grad
        with pytest.raises(RuntimeError, match="backward through the graph"):
            (loss + trained.model(x).sum()).backward()
        trained.optimizer.zero_grad()
    assert trained.step.record.replays


def test_writes_are_seen_by_autograd() -> None:
    """A replay writes parameters: going back from a graph that was made before it raises, as it does in eager."""
    trained = make()()
    trained.step = pygraph.capture(trained.step)
    for x, y in batches():
        loss = trained.model(x.requires_grad_()).sum()
        trained.step(x.detach(), y)
    assert trained.step.record.replays
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what is not captured ----------------------------------------------------------------------------------------------


def changed(line: Callable[[Trained, torch.Tensor], Any]) -> Make:
    """A program whose step does something else before it trains."""

    def step(trained: Trained) -> Callable[..., Any]:
        inner = plain_step(trained)

        def run_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            extra = line(trained, x)
            return inner(x if extra is None else x * extra, y)

        return run_step

    return make(step)


def _unreachable(_trained: Trained, x: torch.Tensor) -> torch.Tensor:
    return next(value for value in vars(threading).setdefault("_of_this_test", [torch.full((), 0.5, device=DEVICE)]))


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("host-read", lambda t, x: 1.0 if x.sum().item() > 0 else 2.0),
        ("host-read", lambda t, x: 1.0 if x.detach().cpu().numpy()[0, 0] > 0 else 2.0),
        ("host-read", lambda t, x: 1.0 if x.tolist()[0][0] > 0 else 2.0),
        ("host-read", lambda t, x: x.tensor_split(torch.tensor([1, 3]))[1].sum()),
        ("host-effect", lambda t, x: torch.initial_seed() % 7),
        ("dynamic-output", lambda t, x: x[x > 0].sum()),
        ("unreachable-tensor", _unreachable),
        ("host-effect", lambda t, x: print("a step")),
    ],
    ids=["item", "numpy", "tolist", "lengths", "seed", "sizes", "hidden", "print"],
)
def test_refused(reason: str, line: Any) -> None:
    refusal = refused(changed(line), reason)
    assert refusal.loc is None or "test_capture.py" in refusal.loc


def test_strict_raises_for_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGRAPH_STRICT", "1")
    trained = changed(lambda t, x: x.sum().item())()
    trained.step = pygraph.capture(trained.step)
    with pytest.raises(CaptureError, match=r"host-read.*test_capture.py"):
        run(trained, None, lambda _: 5)


# -- what is told, and what a step costs that is not captured ---------------------------------------------------------


def test_reports_tell_of_a_captured_step_and_of_one_that_is_given_up() -> None:
    captured, refused = make()(), changed(lambda t, x: x.sum().item())()
    for trained in (captured, refused):
        trained.step = pygraph.capture(trained.step)
        run(trained, None, lambda _: 5)
    first, second = pygraph.reports()
    (region,) = first.regions
    assert (first.kind, region.state, region.record) == ("step", "replay", captured.step.record.regions[0])
    assert "aten.addmm.default" in region.kernels
    assert first.error is None
    assert first.origin.start is not None
    assert first.origin.start.code.startswith("def step")
    assert second.error is not None
    assert second.error.startswith("host-read")
    assert what_was_captured()["given_up"] == [second.error]
    text = render_text([first, second])
    assert f"the whole step as it runs, {captured.step.record.replays} replays" in text
    assert "none: the step runs as it is" in text
    assert "1 of 2 graphs given up" in text


def test_a_step_that_cannot_be_captured_is_looked_at_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = counted_looks(monkeypatch)
    monkeypatch.setattr(whole_step, "driver_for", lambda _: None)
    trained = make()()
    trained.step = pygraph.capture(trained.step)
    run(trained, None, lambda _: 5)
    run(trained, None, lambda _: 5)
    assert trained.step.record.reason == f"no-driver: no driver captures on {DEVICE}"
    assert pygraph.reports()[0].error == trained.step.record.reason
    assert len(looks) < CALLS


def test_calls_of_one_kind_that_are_not_captured_leave_another_kind_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    driver_for = whole_step.driver_for
    trained = make()()
    trained.step = pygraph.capture(trained.step)
    run(trained, None, lambda _: 5)
    replays = trained.step.record.replays
    monkeypatch.setattr(whole_step, "driver_for", lambda _: None)
    run(trained, None, lambda _: 2)
    monkeypatch.setattr(whole_step, "driver_for", driver_for)
    assert trained.step.record.replays == replays
    run(trained, None, lambda _: 5)
    assert trained.step.record.replays == replays + CALLS


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that a captured step looks at all that it can reach."""
    looks, look = list[None](), whole_step.CapturedStep._look

    def looking(self: whole_step.CapturedStep, args: Any, kwargs: Any) -> Any:
        looks.append(None)
        return look(self, args, kwargs)

    monkeypatch.setattr(whole_step.CapturedStep, "_look", looking)
    return looks
