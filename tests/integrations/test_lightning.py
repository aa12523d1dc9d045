"""The callback for Lightning, in a stand-in for its trainer, and in Lightning where that is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pygraph
from tests.integrations import standin_lightning

pytestmark = pytest.mark.usefixtures("fresh")

NAME = "pygraph.integrations.lightning"
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(params=["standin", pytest.param("lightning", marks=pytest.mark.clients)])
def lightning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``lightning.pytorch``."""
    if request.param == "lightning":
        return pytest.importorskip("lightning.pytorch")
    for name, module in standin_lightning.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["lightning.pytorch"]


@pytest.fixture
def adapter(lightning: Any) -> Iterator[Any]:
    sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def model_of(lightning: Any, **members: Any) -> Any:
    """A module that trains by automatic optimization; ``members`` replace some of its own."""

    def __init__(self: Any) -> None:
        lightning.LightningModule.__init__(self)
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)
        self.seen: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.first(x)
        loss = torch.nn.functional.mse_loss(self.second(hidden.relu()), y)
        self.log("loss", loss, on_epoch=True)
        self.log("constant", 3.0)
        return {"loss": loss, "mean": x.mean(), "low": hidden.dtype == torch.bfloat16}

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not outputs["loss"].requires_grad
        self.seen += [float(value) for value in outputs.values()]

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    own = {each.__name__: each for each in (__init__, training_step, on_train_batch_end, configure_optimizers)}
    return type("Model", (lightning.LightningModule,), {**own, **members})()


def data(batches: int = 4) -> Any:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 8), torch.randn(4 * batches, 4)), batch_size=4)


def fit(lightning: Any, module: Any, *callbacks: Any, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        **{**QUIET, "max_epochs": 2, "enable_checkpointing": False, **settings}, callbacks=list(callbacks)
    )
    trainer.fit(module, data())
    return trainer


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "norm", "mixed-value"],
)
def test_a_step_is_one_program_and_does_the_same(lightning: Any, adapter: Any, settings: Any) -> None:
    module, twin = model_of(lightning), model_of(lightning)
    usual = fit(lightning, twin, **settings)
    callback = adapter.TrainStep()
    trainer = fit(lightning, module, callback, **settings)

    assert callback.reason is None
    assert len(pygraph.reports()) == 1
    assert pygraph.counters()["captures"] == 1
    assert pygraph.counters()["replays"] >= 6
    assert trainer.global_step == usual.global_step == 8
    close = {"atol": 1e-2, "rtol": 1e-2} if "precision" in settings else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(module.state_dict(), twin.state_dict(), **close)
    torch.testing.assert_close(module.seen, twin.seen, **close)
    assert set(trainer.callback_metrics) == set(usual.callback_metrics)
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(usual.callback_metrics), **close)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not {"optimizer_step", "log"} & set(vars(module))


def test_gradients_that_somebody_left_are_dropped(lightning: Any, adapter: Any) -> None:
    class Leaves(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 3):
                pl_module.first(batch[0]).sum().backward()

    module, twin = model_of(lightning), model_of(lightning)
    fit(lightning, twin, Leaves())
    fit(lightning, module, Leaves(), adapter.TrainStep())
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def hook(self: Any, *args: Any, **kwargs: Any) -> None:
    self.hooked = True


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
def test_a_step_with_a_hook_in_it_is_left_alone(lightning: Any, adapter: Any, name: str) -> None:
    callback, module = adapter.TrainStep(), model_of(lightning, **{name: hook})
    fit(lightning, module, callback)
    assert callback.reason == f"Model has a method {name}, which a compiled step would not call"
    assert not pygraph.counters()
    assert module.seen


def test_a_hook_of_another_callback_is_called(lightning: Any, adapter: Any) -> None:
    watcher = type("Watcher", (lightning.Callback,), {"on_after_backward": hook})()
    callback = adapter.TrainStep()
    fit(lightning, model_of(lightning), callback, watcher)
    assert callback.reason is not None
    assert "Watcher" in callback.reason
    assert watcher.hooked


def test_accumulation_is_left_alone(lightning: Any, adapter: Any) -> None:
    callback, module, twin = adapter.TrainStep(), model_of(lightning), model_of(lightning)
    fit(lightning, twin, accumulate_grad_batches=2)
    trainer = fit(lightning, module, callback, accumulate_grad_batches=2)
    assert callback.reason == "accumulate_grad_batches is 2"
    assert trainer.global_step == 4
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_accumulation_that_begins_later(lightning: Any, adapter: Any) -> None:
    class Accumulates(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            trainer.accumulate_grad_batches = 2 if trainer.global_step >= 4 else 1

    module, twin = model_of(lightning), model_of(lightning)
    fit(lightning, twin, Accumulates())
    fit(lightning, module, Accumulates(), adapter.TrainStep())
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_an_error_is_raised_and_the_module_is_given_back(lightning: Any, adapter: Any) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ValueError("mine")
        return self.second(self.first(batch[0])).sum()

    module = model_of(lightning, training_step=training_step, on_train_batch_end=hook)
    with pytest.raises(ValueError, match="mine"):
        fit(lightning, module, adapter.TrainStep())
    assert not {"optimizer_step", "log"} & set(vars(module))


def test_other_optimization_is_left_alone(lightning: Any, adapter: Any) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.second(self.first(batch[0])).sum()

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters())

    callback = adapter.TrainStep()
    module = model_of(lightning, training_step=training_step, configure_optimizers=configure_optimizers)
    fit(lightning, module, callback)
    assert callback.reason == "there is not one optimizer, or it calls the step by itself"


def test_manual_optimization_is_left_alone(lightning: Any, adapter: Any) -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.steps = batch_idx

    callback, module = adapter.TrainStep(), model_of(lightning, training_step=training_step, on_train_batch_end=hook)
    module.automatic_optimization = False
    fit(lightning, module, callback)
    assert "manual" in str(callback.reason)
    assert module.steps == 3


@pytest.mark.parametrize("lightning", ["standin"], indirect=True)
def test_another_strategy_is_left_alone(lightning: Any, adapter: Any) -> None:
    callback = adapter.TrainStep()
    fit(lightning, model_of(lightning), callback, strategy=standin_lightning.OtherStrategy)
    assert callback.reason == "OtherStrategy is not on a single device, or wraps the module"
    assert not pygraph.counters()
