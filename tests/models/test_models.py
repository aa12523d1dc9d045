"""Real models against eager: outputs in inference, loss and gradients in training, replayed from the third call on."""

from __future__ import annotations

import pytest
import torch

import pygraph
from tests.models.zoo import ZOO, outputs_of

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh")]

CALLS = 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Eager and Inductor sum in other orders: a few roundings of float32 over sums of a few hundred terms."""


@pytest.mark.parametrize("name", ZOO)
def test_inference_equals_eager(name: str) -> None:
    entry = ZOO[name]
    model = entry.make().eval()
    ours = torch.compile(model, backend="pygraph")
    with torch.no_grad():
        for _ in range(CALLS):
            inputs = entry.inputs()
            for expected, actual in zip(outputs_of(model(**inputs)), outputs_of(ours(**inputs)), strict=True):
                torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert_replayed()


@pytest.mark.parametrize("name", ZOO)
def test_training_equals_eager(name: str) -> None:
    entry = ZOO[name]
    model = entry.make().train()
    ours = torch.compile(model, backend="pygraph")
    for _ in range(CALLS):
        inputs = entry.inputs()
        expected = gradients(model, model, inputs)
        actual = gradients(model, ours, inputs)
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, **TOLERANCE, msg=lambda m, key=key: f"{key}: {m}")
    assert_replayed()


def gradients(model: torch.nn.Module, call: object, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter that has one."""
    model.zero_grad()
    loss = call(**inputs).loss  # type: ignore[operator]
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_replayed() -> None:
    """Every selected region that launches something was replayed, and no capture was refused."""
    reports = pygraph.reports()
    assert [r.error for r in reports] == [None] * len(reports)
    regions = [region for report in reports for region in report.regions if region.wrapped]
    assert regions
    assert [(region.index, region.why) for region in regions if region.state != "replay"] == []
