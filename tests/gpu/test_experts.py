"""Mixtures of experts of transformers: their operator reads on the host how many tokens an expert has, and is cut."""

from __future__ import annotations

import pytest
import torch

import pygraph

hf = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("fresh")

LAYERS = 4
STEPS = 12


def test_decoding_with_experts_leaves_only_their_operator_outside() -> None:
    config = hf.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        experts_implementation="grouped_mm",
    )
    model = hf.MixtralForCausalLM(config).cuda().half().eval()

    def cache() -> torch.nn.Module:
        return hf.StaticCache(config=config, max_cache_len=32)

    tokens = torch.randint(0, 128, (STEPS, 2, 1), device="cuda")
    plain, compiled = cache(), torch.compile(model.forward, backend="pygraph")
    expected = [
        model(tokens[i], past_key_values=plain, cache_position=torch.tensor([i], device="cuda")).logits.clone()
        for i in range(STEPS)
    ]
    ours = cache()
    for i in range(STEPS):
        logits = compiled(tokens[i], past_key_values=ours, cache_position=torch.tensor([i], device="cuda")).logits
        torch.testing.assert_close(logits, expected[i], rtol=2e-2, atol=2e-2, msg=lambda text, i=i: f"step {i}: {text}")
    report = pygraph.reports()[-1]
    assert report.error is None
    assert {region.state for region in report.regions} == {"replay"}, [(r.state, r.why) for r in report.regions]
    left = [u for u in report.uncaptured() if u.reason == "host-read"]
    assert {u.op for u in left} == {"transformers.grouped_mm_fallback.default"}
    assert len(left) == 2 * LAYERS
    assert report.emitted is not None
    assert set(report.emitted.outside) == {"transformers.grouped_mm_fallback.default"}, report.emitted.outside
