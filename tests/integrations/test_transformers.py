"""``generate`` of transformers, with the settings of the adapter: the tokens of a plain call, and one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

transformers = pytest.importorskip("transformers")

from pygraph.integrations.transformers import _forward, generate, generation  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


def test_decoding_steps_are_one_program_whatever_the_prompt() -> None:
    model = _small()
    usual = {"max_new_tokens": 6, "do_sample": False}
    for length in (5, 9, 7):
        prompt = torch.randint(1, 64, (1, length))
        given = {"attention_mask": torch.ones_like(prompt), **usual}
        plain = model.generate(prompt, **given)
        assert torch.equal(model.generate(prompt, **given, **generation(64)), plain)
    assert len(pygraph.reports()) == 1
    assert pygraph.counters()["captures"] == 1

    model.generation_config.update(**generation(64))  # the same program
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


def _small(layers: int = 1) -> object:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, pad_token_id=0, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).eval()


def test_generated_tokens_are_those_of_the_model() -> None:
    model = _small(layers=2)
    for length in (5, 4, 6, 3):
        prompt = torch.randint(1, 64, (3, length))
        mask = torch.ones_like(prompt)
        mask[1, :2] = 0
        usual = {"max_new_tokens": 9, "eos_token_id": [7, 40], "pad_token_id": 0}
        plain = model.generate(
            prompt, attention_mask=mask, do_sample=False, cache_implementation="static", max_cache_len=16, **usual
        )
        tokens = generate(model, {"input_ids": prompt, "attention_mask": mask}, max_cache_len=16, **usual)
        assert torch.equal(tokens, plain)
    assert pygraph.counters()["replays"] == 2
    with pytest.raises(ValueError, match="a cache of 8 tokens holds no text of 12"):
        generate(model, prompt, max_new_tokens=9, max_cache_len=8)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"top_k": 0, "top_p": 0.6}])
def test_sampled_tokens_are_those_of_the_same_generator(settings: dict[str, object]) -> None:
    model = _small()
    for seed in range(4):
        prompt = torch.randint(1, 64, (2, 5))
        torch.manual_seed(seed)
        usual = {"max_new_tokens": 6, "do_sample": True, **settings}
        plain = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache_implementation="static",
            max_cache_len=16,
            **{"top_k": 0, **usual},
        )
        after = torch.rand(2)
        torch.manual_seed(seed)
        assert torch.equal(generate(model, prompt, max_cache_len=16, **usual), plain)
        assert torch.equal(torch.rand(2), after)
    assert pygraph.counters()["replays"] == 2


class Streamer:
    """Remembers the tokens that it is given; its end is None."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor | None] = []

    def put(self, tokens: torch.Tensor) -> None:
        assert tokens.device.type == "cpu"
        self.given.append(tokens)

    def end(self) -> None:
        self.given.append(None)


@pytest.mark.parametrize("ends", [None, 7])
def test_streamers_are_given_the_tokens_of_the_model(ends: int | None) -> None:
    model = _small()
    for length in (5, 9, 7, 6):
        prompt = torch.randint(1, 64, (1, length))
        mask = torch.ones_like(prompt)
        theirs, ours = Streamer(), Streamer()
        keywords: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0}
        model.generate(
            prompt, attention_mask=mask, do_sample=False, cache_implementation="static", streamer=theirs, **keywords
        )
        before = pygraph.counters().get("replays", 0)
        generate(model, prompt, max_cache_len=64, streamer=ours, **keywords)
        assert len(ours.given) == len(theirs.given)
        for one, other in zip(ours.given[:-1], theirs.given[:-1], strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
        assert ours.given[-1] is theirs.given[-1] is None
    assert pygraph.counters().get("replays", 0) == before + 1


def test_the_compiled_step_outlives_calls_of_the_models_own_generate() -> None:
    """Which replace the one that the model keeps: with that, the next loop would be another one."""
    model = _small()
    kept = [model.get_compiled_call(transformers.CompileConfig(backend=backend)) for backend in ("eager", "aot_eager")]
    assert kept[0] is not kept[1]
    assert _forward(type(model), "cuda") is _forward(type(model), "cuda")
    prompt = torch.randint(1, 64, (1, 4))
    for call in range(4):
        generate(model, prompt, max_new_tokens=8)
        if call:
            model.get_compiled_call(transformers.CompileConfig(backend=("eager", "aot_eager")[call % 2]))
    assert pygraph.counters().get("replays", 0) > 0
