"""``generate`` of transformers, with the settings of the adapter: the tokens of a plain call, and one program."""

from __future__ import annotations

import pytest
import torch

import pygraph

transformers = pytest.importorskip("transformers")

from pygraph.integrations.transformers import generation  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_decoding_steps_are_one_program_whatever_the_prompt() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, pad_token_id=0, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    usual = {"max_new_tokens": 6, "do_sample": False}
    for length in (5, 9, 7):
        prompt = torch.randint(1, 64, (1, length))
        given = {"attention_mask": torch.ones_like(prompt), **usual}
        plain = model.generate(prompt, **given)
        assert torch.equal(model.generate(prompt, **given, **generation(32)), plain)
    assert len(pygraph.reports()) == 1
    assert pygraph.counters()["captures"] == 1

    model.generation_config.update(**generation(32))  # the same program
    given = {"attention_mask": torch.ones_like(prompt), **usual}
    assert torch.equal(model.generate(prompt, **given), plain)
    assert pygraph.counters()["captures"] == 1


def test_options_are_those_of_the_backend() -> None:
    config = generation(32, {"capture_after": 3})["compile_config"]
    assert config.to_dict() == {
        "fullgraph": False,
        "dynamic": None,
        "backend": "pygraph",
        "mode": None,
        "options": {"capture_after": 3},
    }
