"""Callables that ``benchmarks/by_hand.py`` captures: inference, training, streams, and pieces as vLLM cuts them.

Each is made for a side, which wraps it, and has four sets of arguments that alternate.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import llama, new_sizes
from benchmarks.suite.diffusion import tiny_unet, unet
from benchmarks.suite.gnn import Gcn
from benchmarks.suite.inference import made

__all__ = ["EIGHT", "MIDDLE", "SIZED", "TIMED", "Calls", "Wrapping", "layers"]

MIDDLE = {"layers": 16, "width": 1024, "inner": 4096, "heads": 16, "groups": 4, "words": 32000, "length": 512}
TURNS = range(4)

Calls: TypeAlias = tuple[Callable[..., Any], Sequence[tuple[Any, ...]], Sequence[torch.Tensor]]
"""A callable in a side's form, its sets of arguments, and the state that it trains."""


class Wrapping(Protocol):
    """The side for which a callable is made."""

    device: str
    tiny: bool
    is_ours: bool

    def wrap(self, function: Callable[..., Any], held: Any) -> Callable[..., Any]:
        """The callable in this side's form."""

    def random(self, *size: int) -> torch.Tensor:
        """Random numbers of the element type of models on the device."""


def layers(width: int, count: int = 8) -> nn.Sequential:
    """Linear layers, each with a ReLU."""
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())))


# -- eight callables ---------------------------------------------------------------------------------------------------


def decode(side: Wrapping) -> Calls:
    """A step of a Llama-like model with SDPA; its static caches are buffers."""
    sizes, batch = (llama.TINY, 2) if side.tiny else (MIDDLE, 8)
    model = made(lambda: llama.Llama(**sizes, batch=batch), side.device)
    steps = [(torch.randint(0, 64, (batch,)).to(side.device), torch.tensor([at], device=side.device)) for at in TURNS]
    return side.wrap(model, model), steps, ()


class Vit(nn.Module):
    """A vision transformer on patches of 16 by 16 pixels: ViT-B by its default sizes."""

    def __init__(self, pixels: int = 224, depth: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 16, 16), nn.Linear(width, 1000)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (pixels // 16) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.places
        scores: torch.Tensor = self.head(self.layers(x)[:, 0])
        return scores


def vit(side: Wrapping) -> Calls:
    """ViT-B/16 on 8 images."""
    pixels = 32 if side.tiny else 224
    model = made(lambda: Vit(pixels, 2, 32, 2) if side.tiny else Vit(), side.device)
    return side.wrap(model, model), [(side.random(8, 3, pixels, pixels),) for _ in TURNS], ()


class Words(nn.Module):
    """A language model over [length, batch]: an LSTM of two layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(words, width), nn.LSTM(width, width, 2), nn.Linear(width, words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.lstm(self.embed(words))[0]).flatten(0, 1)
        return scores


def lstm(side: Wrapping, batch: int) -> Calls:
    """A training step over 35 words of each sequence."""
    words, width, length = (50, 16, 5) if side.tiny else (10000, 512, 35)
    torch.manual_seed(0)
    net = Words(words, width).to(side.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True, capturable=side.device == "cuda")

    @torch.enable_grad()
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def drawn(*size: int) -> torch.Tensor:
        return torch.randint(0, words, size, device=side.device)

    texts = [(drawn(length, batch), drawn(length * batch)) for _ in TURNS]
    return side.wrap(step, [net, optimizer]), texts, list(net.parameters())


def denoise(side: Wrapping) -> Calls:
    """A UNet of latent diffusion, on two latents."""
    model, size = made(tiny_unet if side.tiny else unet, side.device), 8 if side.tiny else 64
    times = [torch.tensor(100 * at, device=side.device) for at in TURNS]
    return side.wrap(model, model), [(side.random(2, 4, size, size), at) for at in times], ()


def mlp(side: Wrapping) -> Calls:
    """Eight layers of width 1024, on 64 rows."""
    width = 16 if side.tiny else 1024
    model = made(lambda: layers(width), side.device)
    return side.wrap(model, model), [(side.random(64, width),) for _ in TURNS], ()


def gcn(side: Wrapping) -> Calls:
    """A graph network of three layers, with different edges in each call."""
    nodes, width = (40, 16) if side.tiny else (2000, 128)
    torch.manual_seed(0)
    model = Gcn(width, 3, 16).to(side.device).eval()
    return side.wrap(model, model), [new_sizes.graph(nodes, 8 * nodes, width, side.device) for _ in TURNS], ()


def two_streams(side: Wrapping) -> Calls:
    """Two chains of linear layers, the second on its own stream."""
    width = 16 if side.tiny else 512
    both: Any = made(lambda: nn.ModuleList((layers(width), layers(width))), side.device)
    other = torch.cuda.Stream() if side.device == "cuda" else None

    def run(x: torch.Tensor) -> torch.Tensor:
        with _forked(other):
            second = both[1](x)
        first = both[0](x)
        if other is not None:
            torch.cuda.current_stream().wait_stream(other)
        result: torch.Tensor = first + second
        return result

    return side.wrap(run, both), [(side.random(32, width),) for _ in TURNS], ()


def _forked(stream: Any) -> contextlib.AbstractContextManager[Any]:
    if stream is None:
        return contextlib.nullcontext()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


# -- host time, and a refusal ------------------------------------------------------------------------------------------


def held(side: Wrapping) -> Calls:
    """A chain of 150 small layers: 300 parameters."""
    model = made(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(6 if side.tiny else 150))), side.device)
    return side.wrap(model, model), [(side.random(4, 16),) for _ in TURNS], ()


def refused(side: Wrapping) -> Calls:
    """Eight layers, and a host read of a result; the other side is eager."""
    width = 16 if side.tiny else 512
    model = made(lambda: layers(width), side.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result if result.float().mean().item() < 1e6 else -result

    run = side.wrap(step, model) if side.is_ours else step
    inputs = [(side.random(64, width),) for _ in TURNS]
    for given in itertools.islice(itertools.cycle(inputs), 400):  # few are looked at from then on
        run(*given)
    return run, inputs, ()


# -- pieces, as vLLM cuts them -----------------------------------------------------------------------------------------


class Engine:
    """Environment of a wrapper in vLLM: the context of a step, and the permission to capture."""

    mode = enum.Enum("mode", ("NONE", "PIECEWISE"))

    def __init__(self) -> None:
        self.monitor: Any = _module(cudagraph_capturing_enabled=True)
        self.context = SimpleNamespace(batch_descriptor=8, cudagraph_runtime_mode=self.mode.PIECEWISE)
        self.pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def ours(self, runnable: Any) -> Callable[..., Any]:
        names = ("vllm", "vllm.compilation", "vllm.compilation.compiler_interface")
        modules = dict.fromkeys(names, _module(monitor=self.monitor, CompilerInterface=object))
        modules["vllm.compilation.monitor"] = self.monitor
        modules["vllm.forward_context"] = _module(get_forward_context=lambda: self.context)
        with mock.patch.dict(sys.modules, modules):
            from pygraph.integrations.vllm import StaticGraphWrapper
        alone = SimpleNamespace(world_size=1, data_parallel_size=1)
        config = SimpleNamespace(compilation_config=None, parallel_config=alone)
        wrapper: Callable[..., Any] = StaticGraphWrapper(runnable, config, self.mode.PIECEWISE)
        return wrapper

    def by_hand(self, runnable: Any) -> Callable[..., Any]:
        """vLLM's form by hand. Arguments are in the same memory in each call: nothing is copied."""
        graphs: dict[Any, tuple[Any, Any]] = {}

        def call(*args: Any) -> Any:
            context = self.context
            if context.cudagraph_runtime_mode != self.mode.PIECEWISE:
                return runnable(*args)
            if context.batch_descriptor not in graphs:
                runnable(*args)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    graphs[context.batch_descriptor] = graph, runnable(*args)
            graph, result = graphs[context.batch_descriptor]
            graph.replay()
            return result

        return call


def _module(**members: Any) -> ModuleType:
    module = ModuleType("vllm")
    vars(module).update(members)
    return module


def pieces(side: Wrapping, width: int, inner: int) -> Calls:
    """A step of 17 pieces, with uncaptured attention between them."""
    width, inner, cuts, batch = (32, 64, 3, 2) if side.tiny else (width, inner, 17, 8)
    sizes = ((width,), (width,), (width, width), (3 * width, width), (inner, width), (inner, width), (width, inner))
    torch.manual_seed(0)
    weights = [[side.random(*size) / size[-1] ** 0.5 for size in sizes] for _ in range(cuts)]
    keys, values = (side.random(batch, 8, 64, width // 8) for _ in range(2))
    nothing, static = torch.zeros_like(side.random(batch, width)), side.random(batch, width)
    engine, graph = Engine(), torch.fx.symbolic_trace(piece)

    def runnable() -> Any:
        def call(*args: Any) -> Any:
            return graph(*args)

        call.graph = graph  # type: ignore[attr-defined]
        return call

    captures = side.is_ours or side.device == "cuda"
    wrap = engine.ours if side.is_ours else engine.by_hand
    wrapped = [wrap(runnable()) if captures else graph for _ in weights]

    def run(x: torch.Tensor) -> torch.Tensor:
        if not side.is_ours:
            x = static.copy_(x)
        qkv, seen, x = wrapped[0](nothing, x, *weights[0])
        for each, own in zip(wrapped[1:], weights[1:], strict=True):
            query = qkv.view(batch, 3, 8, 1, -1)[:, 0]
            seen.view(query.shape).copy_(F.scaled_dot_product_attention(query, keys, values))
            qkv, seen, x = each(seen, x, *own)
        result: torch.Tensor = qkv
        return result

    inputs = [(side.random(batch, width),) for _ in TURNS]
    for _ in range(3):
        run(*inputs[0])
    engine.monitor.cudagraph_capturing_enabled = False
    return run, inputs, ()


def piece(
    seen: torch.Tensor,
    x: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    out: torch.Tensor,
    qkv: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The piece between two attention operators: takes the result of the first, [batch, width], the residual stream and
    weights. Returns queries, keys and values, memory for the next result, and the residual stream."""
    x = x + F.linear(seen, out)
    y = F.rms_norm(x, before.shape, before)
    x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return F.linear(F.rms_norm(x, after.shape, after), qkv), torch.empty_like(x), x


# -- models of many sizes ----------------------------------------------------------------------------------------------

Sized: TypeAlias = tuple[nn.Module, Any, tuple[torch.Tensor, ...]]
"""A model, the size that varies (a place of ``pygraph.prepare``), and arguments."""


class Attention(nn.Module):
    """Attention over [batch, length, width], with scores in memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        result: torch.Tensor = self.out((q @ k.mT).softmax(-1) @ v)
        return result


def _sized(make: Callable[[int], nn.Module], shape: tuple[int, ...], width: int, dim: int = 0) -> Any:
    """A model of a width, or of width 16 in its tiny form; a 0 in a shape stands for the width."""

    def build(side: Wrapping) -> Sized:
        own = 16 if side.tiny else width
        x = side.random(*(own if size == 0 else size for size in shape))
        return made(lambda: make(own), side.device), (0, dim), (x,)

    return build


def _decoder(side: Wrapping) -> Sized:
    of = llama.TINY if side.tiny else MIDDLE | {"layers": 2}
    tokens, at = torch.zeros(2, dtype=torch.int64, device=side.device), torch.tensor([3], device=side.device)
    return made(lambda: llama.Llama(**of, batch=64), side.device), (0, 0), (tokens, at)


def _of_edges(side: Wrapping) -> Sized:
    width = 16 if side.tiny else 128
    model = Gcn(width, 3, 16).to(side.device).eval()
    return model, ((1, 1), (2, 0)), new_sizes.graph(2000, 64, width, side.device)


def _convolutions(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 8, 3))


SIZED: dict[str, Callable[[Wrapping], Sized]] = {
    "mlp": _sized(layers, (2, 0), 1024),
    "gated": _sized(lambda width: nn.Sequential(nn.Linear(width, 4 * width), nn.GLU()), (2, 0), 1024),
    "norms": _sized(lambda width: nn.Sequential(nn.LayerNorm(width), layers(width), nn.Softmax(-1)), (2, 0), 512),
    "attention, batch": _sized(Attention, (2, 32, 0), 256),
    "attention, length": _sized(Attention, (4, 2, 0), 256, 1),
    "encoder": _sized(lambda width: nn.Sequential(Attention(width), layers(width), Attention(width)), (2, 8, 0), 256),
    "convolutions": _sized(_convolutions, (2, 4, 32, 32), 64),
    "vit": lambda side: (made(lambda: Vit(32, 2, 32, 2), side.device), (0, 0), (side.random(2, 3, 32, 32),)),
    "decode": _decoder,
    "gcn, edges": _of_edges,
}
"""Models whose memory is forecast."""

EIGHT: dict[str, Callable[[Wrapping], Calls]] = {
    "decode": decode,
    "vit-b": vit,
    "lstm-20": functools.partial(lstm, batch=20),
    "lstm-256": functools.partial(lstm, batch=256),
    "unet": denoise,
    "mlp": mlp,
    "gcn": gcn,
    "two-streams": two_streams,
}
TIMED: dict[str, Callable[[Wrapping], Calls]] = {
    **EIGHT,
    "held-300": held,
    "refused": refused,
    "pieces": functools.partial(pieces, width=2048, inner=8192),
    "pieces-small": functools.partial(pieces, width=1024, inner=2816),
}
