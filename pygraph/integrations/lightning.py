"""Lightning: a callback that makes each training step of automatic optimization one program.

    trainer = lightning.Trainer(callbacks=[pygraph.integrations.lightning.TrainStep()])

Interface: ``Callback`` and ``LightningModule.optimizer_step`` of lightning 2.6.6, and the closure that the loop
``loops/optimization/automatic.py`` hands to it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

import pygraph

__all__ = ["TrainStep"]

_log = logging.getLogger("pygraph.integrations.lightning")

_OF_CALLBACKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_OF_MODULES = (*_OF_CALLBACKS, "backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")


class TrainStep(Callback):  # type: ignore[misc]
    """Runs ``training_step``, the backward pass, clipping and the update under ``pygraph.train_step``.

    Values that ``training_step`` logs are logged after the step. Gradients are None after a step. If steps have other
    parts, or are of another kind (several optimizers or devices, say), training runs as without the callback;
    ``reason`` and the log say why.

    Args:
        options: options of the backend
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = dict(options or {})
        self.reason: str | None = "training has not begun"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace ``pl_module.optimizer_step``, unless steps cannot be compiled."""
        self.reason = _obstacle(trainer, pl_module)
        if self.reason is not None:
            _log.warning("training steps are not compiled: %s", self.reason)
            return
        logged: list[Any] = []
        step = pygraph.train_step(_step(trainer, pl_module), options=self.options)
        usual = pl_module.optimizer_step

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            logged.append((name, value.detach() if isinstance(value, torch.Tensor) else value, args, kwargs))

        def optimizer_step(epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if trainer.accumulate_grad_batches != 1:  # a callback may change it
                usual(epoch, batch_idx, optimizer, optimizer_closure)
                return
            (batch,) = optimizer_closure._step_fn.args
            logged.clear()
            with _in_place(pl_module, log=log):
                output = step(*batch.values())
            with _in_place(pl_module, _current_fx_name="training_step"):
                for name, value, args, kwargs in logged:
                    pl_module.log(name, value, *args, **kwargs)
            logged.clear()
            optimizer_closure._result = ClosureResult.from_training_step_output(output)

        pl_module.optimizer_step = optimizer_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Give ``pl_module.optimizer_step`` back."""
        vars(pl_module).pop("optimizer_step", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Give ``pl_module.optimizer_step`` back."""
        self.on_train_end(trainer, pl_module)


def _obstacle(trainer: Any, pl_module: Any) -> str | None:
    """Reason why steps are not compiled, or None."""
    if not pl_module.automatic_optimization:
        return "optimization is manual: put @pygraph.train_step around your own step"
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if type(strategy) is not SingleDeviceStrategy or strategy.model is not pl_module:
        return f"{type(strategy).__name__} is not on a single device, or wraps the module"
    if type(precision) is not Precision and (type(precision) is not MixedPrecision or precision.scaler is not None):
        return f"precision {precision.precision} is neither 32-true nor bf16-mixed"
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], torch.optim.LBFGS):
        return "there is not one optimizer, or it calls the step by itself"
    if trainer.accumulate_grad_batches != 1:
        return f"accumulate_grad_batches is {trainer.accumulate_grad_batches}"
    if torch.is_anomaly_enabled():
        return "detect_anomaly is set"
    for owner, names in ((pl_module, _OF_MODULES), *((each, _OF_CALLBACKS) for each in trainer.callbacks)):
        for name in names:
            if name in vars(owner) or is_overridden(name, owner):
                return f"{type(owner).__name__} has a method {name}, which a compiled step would not call"
    return None


def _step(trainer: Any, pl_module: Any) -> Callable[..., Any]:
    """A whole step, equal to that of automatic optimization."""
    (optimizer,) = trainer.optimizers
    mixed, device = type(trainer.precision_plugin) is MixedPrecision, pl_module.device.type
    clip, algorithm = trainer.gradient_clip_val, str(trainer.gradient_clip_algorithm or "norm").lower()
    clip_gradients = torch.nn.utils.clip_grad_value_ if "value" in algorithm else torch.nn.utils.clip_grad_norm_
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def step(*batch: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            output = pl_module.training_step(*batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if loss is None:
            return None
        optimizer.zero_grad()
        loss.backward()
        if clip:
            clip_gradients(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(output, dict):
            return {
                name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in output.items()
            }
        return loss.detach()

    return step


@contextlib.contextmanager
def _in_place(module: Any, **attributes: Any) -> Any:
    """Set attributes of ``module`` for the duration of the block."""
    before = {name: vars(module)[name] for name in attributes if name in vars(module)}
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(module).pop(name)
        vars(module).update(before)
