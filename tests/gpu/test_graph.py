"""Callables captured as they run on CUDA: any kernels, with the state that they declare, against eager bit by bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from tests.gpu.programs import DEVICE, device_tensor
from tests.graph.calls import assert_same, is_replay, replayed, state_of

pytestmark = pytest.mark.usefixtures("fresh")


class Attention(nn.Module):
    """One layer of a decoder with a cache that is written in place."""

    def __init__(self, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self.length = length

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], position: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).unbind(-3)
        cache[0].index_copy_(1, position, k)
        cache[1].index_copy_(1, position, v)
        seen = torch.arange(self.length, device=x.device) <= position
        parts = [each.transpose(1, 2) for each in (q, *cache)]
        y = nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen)
        return x + self.out(y.transpose(1, 2).flatten(2))


def _cache(batch: int = 2, width: int = 64, length: int = 32) -> list[torch.Tensor]:
    return [torch.zeros(batch, length, 4, width // 4, device=DEVICE) for _ in range(2)]


def test_decoding_with_a_cache_that_is_made_anew() -> None:
    model = Attention().to(DEVICE).eval()
    holder = {"cache": _cache()}

    def step(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model(x, holder["cache"], position)

    step(device_tensor(2, 1, 64), torch.tensor([0], device=DEVICE))  # torch chooses among kernels of attention once
    graph = pygraph.graph(step, held=[model, holder])
    for turn in range(3):
        holder["cache"], twin = _cache(), _cache()
        if turn == 2:
            model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
        for number in range(6):
            x, position = device_tensor(2, 1, 64), torch.tensor([number], device=DEVICE)
            assert_same(graph(x, position), model(x, twin, position))
            assert_same(holder["cache"], twin)
    assert graph.record.captures == 1, graph.record
    assert graph.record.replays == 16, (graph.record, graph.record.refusals, graph.record.regions)


@pytest.mark.parametrize("change", ["data", "parameter", "swap", "module"])
def test_replaced_weights_are_used(change: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    graph = pygraph.graph(model, held=model)
    replayed(graph, device_tensor(8, 64), calls=3)
    for _ in range(3):
        new = nn.Parameter(device_tensor(64, 64))
        if change == "data":
            model[0].weight.data = new.data
        elif change == "parameter":
            model[0].weight = new
        elif change == "swap":
            torch.utils.swap_tensors(model[0].weight, new)
        else:
            model[2] = nn.Linear(64, 64, device=DEVICE)
        x = device_tensor(8, 64)
        assert_same(is_replay(graph, x), model(x))
    assert graph.record.captures == 1


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=True),
}


def _trained(make: Callable[[], nn.Module], optimizer: str, data: Callable[[int], Any], *, use_graph: bool) -> Any:
    torch.manual_seed(0)
    model = make().to(DEVICE)
    update = OPTIMIZERS[optimizer](model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        update.zero_grad()
        result = model(x)
        loss = nn.functional.mse_loss(result[0] if isinstance(result, tuple) else result, y)
        loss.backward()
        update.step()
        return loss.detach()

    run = pygraph.graph(step, held=[model, update]) if use_graph else step
    seen: list[Any] = []
    with torch.enable_grad():
        for call in range(20):
            x, y = data(call)
            seen.append([run(x, y).clone(), *state_of(model, update), torch.cuda.get_rng_state()])
    return seen, run


def _vectors(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(call)
    return tuple(torch.randn(32, size, device=DEVICE, generator=generator) for size in (16, 4))  # type: ignore[return-value]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_is_bit_equal(optimizer: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))

    expected, _ = _trained(make, optimizer, _vectors, use_graph=False)
    seen, graph = _trained(make, optimizer, _vectors, use_graph=True)
    for now, then in zip(seen, expected, strict=True):
        assert_same(now, then)
    assert graph.record.replays >= 15, graph.record


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_lstm_of_cudnn(optimizer: str) -> None:
    """Its weights are views of one buffer."""

    def data(call: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(DEVICE).manual_seed(call)
        x = torch.randn(12, 20, 32, device=DEVICE, generator=generator)
        return x, torch.randn(12, 20, 64, device=DEVICE, generator=generator)

    expected, _ = _trained(lambda: nn.LSTM(32, 64, num_layers=2), optimizer, data, use_graph=False)
    seen, graph = _trained(lambda: nn.LSTM(32, 64, num_layers=2), optimizer, data, use_graph=True)
    for now, then in zip(seen, expected, strict=True):
        torch.testing.assert_close(now[:-1], then[:-1], rtol=1e-4, atol=1e-5)  # cuDNN adds up in any order
    assert graph.record.replays >= 15, graph.record


@pytest.mark.parametrize("parts", [True, False])
def test_a_training_step_that_dynamo_leaves_in_parts_is_captured_as_it_runs(parts: bool) -> None:
    """As one with cuDNN's LSTM. A step that is whole stays compiled."""

    def trained(run_as: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        model: nn.Module = nn.LSTM(32, 64, device=DEVICE) if parts else nn.Linear(32, 64, device=DEVICE)
        update = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        generator, seen = torch.Generator(DEVICE).manual_seed(0), []

        def step(x: torch.Tensor) -> torch.Tensor:
            made = model(x)
            loss = (made[0] if parts else made).square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            return loss.detach()

        run = run_as(step, held=[model, update])
        with torch.enable_grad():
            for _ in range(12):
                loss = run(torch.randn(12, 20, 32, device=DEVICE, generator=generator))
                seen.append([loss.clone(), *(parameter.detach().clone() for parameter in model.parameters())])
        return seen

    expected = trained(lambda step, **_held: step)
    torch.testing.assert_close(trained(pygraph.train_step), expected, rtol=1e-4, atol=1e-5)
    replays = {
        report.kind: sum(region.record.replays for region in report.regions if region.record is not None)
        for report in pygraph.reports()
    }
    notes = [note for report in pygraph.reports() for note in report.notes]
    assert replays["callable" if parts else "inference"] >= 8, notes
    assert parts or replays.keys() == {"inference"}


def test_counters_on_the_cpu_are_refused_with_their_path() -> None:
    model = nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    graph = pygraph.graph(step, held=[model, optimizer])
    with torch.enable_grad():
        for _ in range(4):
            graph(device_tensor(2, 4))
    assert "state" in graph.record.refusals["several-devices"].detail


def test_streams_inside() -> None:
    side = torch.cuda.Stream()
    weights = [device_tensor(64, 64) for _ in range(2)]

    def function(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            left = torch.tanh(x @ weights[0])
        right = torch.relu(x @ weights[1])
        torch.cuda.current_stream().wait_stream(side)
        return left + right

    graph = pygraph.graph(function, held=weights)
    for call in range(6):
        x = device_tensor(16, 64)
        assert_same(is_replay(graph, x) if call > 1 else graph(x), function(x))


def test_kernels_of_the_users() -> None:
    triton = pytest.importorskip("triton")
    from tests.gpu import kernels

    weight, scale = nn.Parameter(device_tensor(4096)), {"value": 2.0}

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernels.scaled[(triton.cdiv(x.numel(), 1024),)](x, weight, y, scale["value"], x.numel(), BLOCK=1024)
        return y + 1

    graph = pygraph.graph(function, held=weight, key=lambda x: scale["value"])
    for call in range(8):
        if call == 4:
            weight.data = device_tensor(4096)
        x = device_tensor(4096)
        assert_same(is_replay(graph, x) if call > 1 else graph(x), x * weight * 2.0 + 1)
    scale["value"] = 3.0
    for _ in range(3):
        x = device_tensor(4096)
        torch.testing.assert_close(graph(x), x * weight * 3.0 + 1)


@pytest.mark.parametrize("backend", ["pygraph", "inductor"])
def test_a_compiled_function_inside(backend: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(DEVICE)
    compiled = torch.compile(model, backend=backend)
    graph = pygraph.graph(lambda x: compiled(x) * 2, held=model)
    for call in range(8):
        if call == 5:
            model[0].weight.data = device_tensor(64, 64)
        x = device_tensor(8, 64)
        assert_same(is_replay(graph, x) if call > 2 else graph(x), compiled(x) * 2)


def test_unknown_memory_is_refused_with_its_path() -> None:
    table = device_tensor(64)
    graph = pygraph.graph(lambda x: x * table)
    for _ in range(4):
        graph(device_tensor(64))
    refusal = graph.record.refusals["unknown-memory"]
    assert refusal.detail == "table: add it to held"
    assert "test_graph.py" in refusal.loc


def test_unknown_memory_that_nothing_leads_to_is_refused() -> None:
    hidden = [device_tensor(64)]
    source = iter(lambda: hidden[0], None)
    graph = pygraph.graph(lambda x: x * next(source))
    for _ in range(4):
        graph(device_tensor(64))
    assert graph.record.replays == 0
    assert set(graph.record.refusals) & {"unknown-memory", "foreign-address"}, graph.record


def test_numbers_that_change_are_refused() -> None:
    count = [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x * count[0]

    graph = pygraph.graph(function)
    for _ in range(4):
        graph(device_tensor(64))
    assert "became" in graph.record.refusals["unstable-number"].detail
    config = {"scale": 0.0}
    graph = pygraph.graph(lambda x: x * config["scale"])
    for call in range(6):
        config["scale"] = float(call)
        assert_same(graph(torch.ones(4, device=DEVICE)), torch.full((4,), float(call), device=DEVICE))
    assert "unstable-number" in graph.record.refusals


@pytest.mark.parametrize("read", ["item", "cpu", "nonzero"])
def test_host_reads_are_refused(read: str) -> None:
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "item": lambda x: x * x.sum().item(),
        "cpu": lambda x: x * float(x.cpu()[0]),
        "nonzero": lambda x: x[x > 0],
    }
    graph = pygraph.graph(functions[read])
    for _ in range(4):
        x = device_tensor(64)
        assert_same(graph(x), functions[read](x))
    assert graph.record.captures == 0
    assert graph.record.reason is not None


def test_dropout_draws_from_the_state_of_today() -> None:
    graph = pygraph.graph(lambda x: nn.functional.dropout(x, 0.5))
    x = torch.ones(4096, device=DEVICE)
    replayed(graph, x)
    for seed in range(4):
        torch.manual_seed(seed)
        result, state = is_replay(graph, x), torch.cuda.get_rng_state()
        torch.manual_seed(seed)
        assert_same(result, nn.functional.dropout(x, 0.5))
        assert torch.equal(state, torch.cuda.get_rng_state())


def test_memory_that_arguments_share() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    graph = pygraph.graph(function)
    for _ in range(4):
        x = torch.ones(256, device=DEVICE)
        assert_same(graph(x, x[64:128]), torch.full((64,), 3.0, device=DEVICE))
        x, y = torch.ones(256, device=DEVICE), torch.ones(64, device=DEVICE)
        assert_same(graph(x, y), torch.full((64,), 2.0, device=DEVICE))
    assert graph.record.captures == 2


def test_autocast_keeps_no_cast_of_a_capture() -> None:
    model = nn.Linear(64, 64, device=DEVICE)
    graph = pygraph.graph(model, held=model)
    twin = copy.deepcopy(model)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(5):
            x = device_tensor(8, 64)
            assert_same(graph(x), twin(x))
            assert_same(model(x), twin(x))


def test_nothing_of_a_capture_is_left() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(DEVICE)
    x = device_tensor(256, 256)
    model(x)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph = pygraph.graph(model, held=model)
    replayed(graph, x, calls=5)
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 4 << 20
