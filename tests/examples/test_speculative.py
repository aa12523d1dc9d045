"""The example of speculative decoding: its texts are the target's own, in fewer iterations, by one replay."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pygraph

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def speculative() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "speculative.py"
    spec = importlib.util.spec_from_file_location("speculative", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_are_those_of_the_target_alone(speculative: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "DRAFTED", 2)
    torch.manual_seed(0)
    target, draft = speculative.models(layers=2)
    decoder, counts = speculative.Decoder(target, draft, 32), list[int]()
    for length, new in ((5, 8), (9, 10), (3, 8), (2, 9)):
        prompt = torch.randint(256, (1, length), device=speculative.DEVICE)
        text, count = decoder.generate(prompt, new)
        expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False)
        assert torch.equal(text, expected)
        counts.append(new - count)
    assert min(counts) > 0
    assert (pygraph.counters()["captures"], pygraph.counters()["replays"]) == (1, 2)
