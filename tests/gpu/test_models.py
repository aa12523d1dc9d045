"""Real models with random weights on CUDA against eager: outputs in inference, loss and gradients in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pygraph.backend import pygraph as backend
from tests.gpu.programs import assert_replayed
from tests.gpu.zoo import SWEEP

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh")]

CALLS = 4


def outputs(result: Any) -> list[torch.Tensor]:
    """The floating tensors of whatever a model returns."""
    if hasattr(result, "logits"):
        result = result.logits
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def is_close(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    """No further from the same model in float64 than a few times what ``expected`` is."""
    scale = exact.double().abs().max().clamp_min(1e-4)
    ours = (actual.double() - exact.double()).abs().max() / scale
    theirs = (expected.double() - exact.double()).abs().max() / scale
    return bool(ours <= 4 * theirs + max(8 * torch.finfo(expected.dtype).eps, 1e-5))


@pytest.mark.parametrize("name", SWEEP)
def test_inference_equals_eager(name: str) -> None:
    entry = SWEEP[name]
    model = entry.make().cuda().to(entry.dtype).eval()
    ours = torch.compile(model, backend=backend)
    reference = entry.make().cuda().double().eval()
    reference.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in model.state_dict().items()})
    with torch.no_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            inputs = entry.inputs()
            exact = outputs(reference(**_cast(inputs, torch.double)))
            actual, expected = outputs(ours(**_cast(inputs, entry.dtype))), outputs(model(**_cast(inputs, entry.dtype)))
            for index, three in enumerate(zip(actual, expected, exact, strict=True)):
                assert is_close(*three), f"output {index} of call {seed}"
    assert_replayed()


@pytest.fixture
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in float32 proper, on both sides."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.usefixtures("_full_precision")
@pytest.mark.parametrize("name", [n for n, entry in SWEEP.items() if entry.trains])
def test_training_equals_eager(name: str) -> None:
    entry = SWEEP[name]
    model, reference = entry.make().cuda().train(), entry.make().cuda().double().train()
    for module in (model, reference):
        _without_dropout(module)
    ours = torch.compile(model, backend=backend)
    with torch.enable_grad():
        for seed in range(CALLS):
            torch.manual_seed(seed)
            inputs = _cast(entry.inputs(), torch.float32)
            state = {k: v.clone() for k, v in model.state_dict().items()}
            reference.load_state_dict({k: v.double() if v.is_floating_point() else v for k, v in state.items()})
            exact = gradients(reference, reference, _cast(inputs, torch.double))
            expected = gradients(model, model, inputs)
            model.load_state_dict(state)
            actual = gradients(model, ours, inputs)
            far = [key for key, value in exact.items() if not is_close(actual[key], expected[key], value)]
            if far:  # a deep network with batch statistics may be as far from eager with Inductor alone
                model.load_state_dict(state)
                alone = gradients(model, torch.compile(model), inputs)
                far = [key for key in far if not is_close(actual[key], alone[key], exact[key])]
            assert not far, f"call {seed}: {far}"
    assert_replayed()


def gradients(model: nn.Module, call: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter that has one."""
    model.zero_grad()
    loss = sum(out.square().mean() for out in outputs(call(**inputs)))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def _cast(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.cuda().to(dtype) if v.is_floating_point() else v.cuda() for k, v in inputs.items()}


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
