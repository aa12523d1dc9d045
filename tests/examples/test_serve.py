"""The example server under load: no request fails, nothing is captured while it serves, answers are eager's."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def serve() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["serve"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve"]


def requests(serve: ModuleType, count: int, seed: int) -> list[tuple[list[int], int]]:
    chosen = random.Random(seed)
    lengths = [(chosen.randint(1, 12), chosen.randint(1, 24)) for _ in range(count)]
    return [([chosen.randrange(serve.VOCABULARY) for _ in range(given)], wanted) for given, wanted in lengths]


def decoder(serve: ModuleType, seed: int) -> Any:
    torch.manual_seed(seed)
    return serve.Decoder().eval()


def eagerly(serve: ModuleType, model: Any, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """The answers of the model itself, one request after the other."""
    engine = serve.Engine(model, step=model)
    try:
        return [engine.submit(*one).result(60) for one in asked]
    finally:
        engine.close()


def counters(engine: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, count in re.findall(r'^pygraph_(\w+)_total\{region="[^"]*"\} (\d+)$', engine.metrics(), re.MULTILINE):
        found[name] = found.get(name, 0) + int(count)
    return found


@pytest.mark.sweep
def test_a_server_under_load_replays_every_step_and_answers_as_eager(serve: ModuleType) -> None:
    """Requests of eight clients, before, while and after weights are reloaded twice."""
    engine = serve.Engine(decoder(serve, 0))
    before = counters(engine)
    assert before["captures"] == len(serve.BATCHES)
    for turn in range(3):
        if turn:
            asked = requests(serve, 24, 10 + turn)
            during = [engine.submit(*one) for one in asked]
            engine.reload(decoder(serve, turn).state_dict())
            assert [len(each.result(60)) for each in during] == [wanted for _, wanted in asked]
        asked = requests(serve, 64, turn)
        with ThreadPoolExecutor(8) as clients:
            found = list(clients.map(lambda one: engine.submit(*one).result(60), asked))
        assert found == eagerly(serve, decoder(serve, turn), asked)
    after = counters(engine)
    assert {name: after[name] - before[name] for name in before if name != "replays"} == {
        "captures": 0,
        "uncaptured": 0,
    }
    assert after["replays"] - before["replays"] == engine.steps
    engine.close()


def test_what_has_no_room_is_refused_and_an_error_reaches_who_waits(serve: ModuleType) -> None:
    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a kernel failed")

    engine = serve.Engine(decoder(serve, 0), step=fails)
    for prompt, tokens in (([], 1), ([serve.VOCABULARY], 1), ([1] * serve.LENGTH, 1)):
        with pytest.raises(ValueError, match="a prompt has"):
            engine.submit(prompt, tokens)
    waiting = [engine.submit([1, 2], 3) for _ in range(20)]
    for each in waiting:
        with pytest.raises(ArithmeticError):
            each.result(60)
    engine.close()


@pytest.mark.clients
def test_the_server_answers_over_http(serve: ModuleType, tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    expected = eagerly(serve, decoder(serve, 0), [([3, 14, 15], 8)])
    torch.save(decoder(serve, 1).state_dict(), tmp_path / "weights.pt")
    with TestClient(serve.app()) as client:
        asked = {"prompt": [3, 14, 15], "tokens": 8}
        assert client.post("/generate", json=asked).json() == expected[0]
        assert client.post("/generate", json={**asked, "tokens": 80}).status_code == 422
        assert client.post("/reload", json={"path": str(tmp_path / "weights.pt")}).status_code == 200
        again = eagerly(serve, decoder(serve, 1), [([3, 14, 15], 8)])
        assert client.post("/generate", json=asked).json() == again[0]
        assert "pygraph_replays_total" in client.get("/metrics").text
