"""Lightning's trainer in automatic optimization, as far as a callback meets it (lightning 2.6.6)."""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch


class Callback:
    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None: ...
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...


class LightningModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self._current_fx_name: str | None = None
        self.device = torch.device("cpu")

    def on_before_zero_grad(self, optimizer: Any) -> None: ...
    def on_before_backward(self, loss: Any) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def configure_gradient_clipping(self, optimizer: Any, value: Any = None, algorithm: Any = None) -> None: ...

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def log(self, name: str, value: Any, on_epoch: bool = False) -> None:
        assert self._current_fx_name == "training_step"
        self.trainer.callback_metrics[name] = torch.as_tensor(value).detach().clone()


class Precision:
    precision = "32-true"

    def train_step_context(self) -> Any:
        return nullcontext()


class MixedPrecision(Precision):
    precision, scaler = "bf16-mixed", None

    def train_step_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)


class SingleDeviceStrategy:
    def __init__(self, model: Any) -> None:
        self.model = model


class OtherStrategy(SingleDeviceStrategy): ...


@dataclass
class ClosureResult:
    closure_loss: Any
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> Any:
        return self.closure_loss.detach().clone()

    @classmethod
    def from_training_step_output(cls, output: Any) -> ClosureResult:
        extra = {name: value for name, value in output.items() if name != "loss"} if isinstance(output, dict) else {}
        return cls(output["loss"] if isinstance(output, dict) else output, extra)


class Closure:
    def __init__(self, trainer: Any, kwargs: Any) -> None:
        self._trainer, self._step_fn = trainer, functools.partial(trainer.training_step, kwargs)
        self._result: Any = None

    @torch.enable_grad()
    def __call__(self) -> Any:
        self._result = self._step_fn()
        self._trainer.backward(self._result.closure_loss)
        return self._result.loss


def is_overridden(name: str, instance: Any) -> bool:
    parent = LightningModule if isinstance(instance, LightningModule) else Callback
    return getattr(type(instance), name) is not getattr(parent, name)


class Trainer:
    def __init__(self, callbacks: Any = (), max_epochs: int = 1, precision: str = "32-true", **settings: Any) -> None:
        self.callbacks, self.max_epochs = list(callbacks), max_epochs
        self.gradient_clip_val = settings.get("gradient_clip_val")
        self.gradient_clip_algorithm = settings.get("gradient_clip_algorithm")
        self.accumulate_grad_batches = settings.get("accumulate_grad_batches", 1)
        self.strategy_type = settings.get("strategy", SingleDeviceStrategy)
        self.precision_plugin = MixedPrecision() if precision == "bf16-mixed" else Precision()
        self.global_step, self.callback_metrics = 0, {}

    def fit(self, module: Any, data: Any) -> None:
        self.module, module.trainer = module, self
        self.strategy = self.strategy_type(module)
        self.optimizers = [module.configure_optimizers()]
        self.each("on_train_start")
        try:
            for epoch in range(self.max_epochs):
                for index, batch in enumerate(data):
                    self.step(epoch, index, batch)
        except BaseException as error:
            self.each("on_exception", error)
            raise
        self.each("on_train_end")

    def each(self, name: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, self.module, *args)

    def step(self, epoch: int, index: int, batch: Any) -> None:
        self.each("on_train_batch_start", batch, index)
        closure = Closure(self, OrderedDict(batch=batch, batch_idx=index))
        self.last = (index + 1) % self.accumulate_grad_batches == 0
        self.first = index % self.accumulate_grad_batches == 0
        if not self.module.automatic_optimization:
            self.module.training_step(batch, index)
            return
        if self.last:
            self.module._current_fx_name = "optimizer_step"
            self.module.optimizer_step(epoch, index, self.optimizers[0], closure)
            self.global_step += 1
        else:
            closure()
        result, closure._result = closure._result, None
        assert result is not None, "the closure has not run"
        self.module.on_train_batch_end({"loss": result.loss, **result.extra}, batch, index)

    def training_step(self, kwargs: Any) -> Any:
        self.module._current_fx_name = "training_step"
        with self.precision_plugin.train_step_context():
            return ClosureResult.from_training_step_output(self.module.training_step(*kwargs.values()))

    def backward(self, loss: Any) -> None:
        (optimizer,) = self.optimizers
        if self.first:
            optimizer.zero_grad()
        (loss / self.accumulate_grad_batches).backward()
        self.module.on_after_backward()
        self.each("on_after_backward")
        if self.last and self.gradient_clip_val:
            clip = torch.nn.utils.clip_grad_norm_
            if self.gradient_clip_algorithm == "value":
                clip = torch.nn.utils.clip_grad_value_  # type: ignore[assignment]
            clip(self.module.parameters(), self.gradient_clip_val)


def modules() -> dict[str, ModuleType]:
    """The modules that the adapter imports from, by name."""
    homes = {
        "lightning": (),
        "lightning.pytorch": (Callback, LightningModule, Trainer),
        "lightning.pytorch.loops.optimization.automatic": (ClosureResult,),
        "lightning.pytorch.plugins.precision": (MixedPrecision, Precision),
        "lightning.pytorch.strategies": (SingleDeviceStrategy,),
        "lightning.pytorch.utilities.model_helpers": (is_overridden,),
    }
    made = {}
    for name, members in homes.items():
        made[name] = ModuleType(name)
        vars(made[name]).update({member.__name__: member for member in members})
    return made
