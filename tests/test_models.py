"""Models with random weights against eager: outputs in inference, loss and gradients in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import pygraph

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("fresh")]

Inputs = dict[str, torch.Tensor]

VOCABULARY = 101
LENGTH = 12
BATCH = 2


@dataclass(frozen=True)
class Entry:
    """How to make a model, and inputs for it; the model returns an object with ``loss`` and ``logits``."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def _language() -> Inputs:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _translation() -> Inputs:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return hf.MixtralForCausalLM(config)


ZOO: dict[str, Entry] = {
    "bert": Entry(_bert, _language),
    "t5": Entry(_t5, _translation),
    "mixtral": Entry(_mixtral, _language),
}

CALLS = 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Eager and Inductor sum in other orders: a few roundings of float32 over sums of a few hundred terms."""


def models(*daily: str) -> list[Any]:
    """All of them; those but ``daily`` in `make test-all`, since each takes a while to compile."""
    return [name if name in daily else pytest.param(name, marks=pytest.mark.sweep) for name in ZOO]


@pytest.mark.parametrize("name", models("bert"))
def test_inference_equals_eager(name: str) -> None:
    entry = ZOO[name]
    model = entry.make().eval()
    ours = torch.compile(model, backend="pygraph")
    with torch.no_grad():
        for _ in range(CALLS):
            inputs = entry.inputs()
            expected, actual = model(**inputs), ours(**inputs)
            torch.testing.assert_close(actual.loss, expected.loss, **TOLERANCE)
            torch.testing.assert_close(actual.logits, expected.logits, **TOLERANCE)
    assert_replayed()


@pytest.mark.parametrize("name", models())
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
