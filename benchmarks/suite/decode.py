"""Decoding, a token per step: caches written in place, caches that grow, and those of transformers.

Tokens are given beforehand rather than picked from the logits: a rounding must not change the course of a side.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import mlp
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]


class InPlaceLayer(nn.Module):
    """Writes its keys and values into caches [batch, heads, length, width / heads] at position ``at``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp((width, 4 * width, width), nn.GELU)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        batch, _, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        mask = torch.arange(keys.shape[2], device=x.device) <= at
        mixed = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None, None])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, 1, width))
        made: torch.Tensor = x + self.mlp(x)
        return made


class InPlaceDecoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlaceLayer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, caches: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[2 * i], caches[2 * i + 1], at)
        return x


def in_place(
    compile: Compile, device: str, *, layers: int, width: int, heads: int, batch: int, length: int, at: int
) -> Step:
    """Writes the same position in each step, so that results and caches stay as they are."""
    torch.manual_seed(0)
    dtype = floating(device)
    model = InPlaceDecoder(layers, width, heads).to(device, dtype).eval()
    size = (batch, heads, length, width // heads)
    caches = [torch.zeros(size, device=device, dtype=dtype) for _ in range(2 * layers)]
    x = torch.randn(batch, 1, width, device=device, dtype=dtype)
    position = torch.tensor([at], device=device)
    decode = compile(model)

    def step() -> list[torch.Tensor]:
        with torch.no_grad():
            return [decode(x, caches, position), caches[0], caches[-1]]

    return step


class GrowingLayer(nn.Module):
    """Returns caches that are longer by one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *mlp((width, 4 * width, width), nn.GELU))

    def forward(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, _, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        mixed = nn.functional.scaled_dot_product_attention(q, keys, values)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, 1, width))
        return x + self.mlp(x), keys, values


class GrowingDecoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, longest: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(GrowingLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, caches: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        length = caches[0].shape[2]
        x = self.words(tokens) + self.positions(torch.arange(length, length + 1, device=tokens.device))
        grown = []
        for i, layer in enumerate(self.layers):
            x, keys, values = layer(x, caches[2 * i], caches[2 * i + 1])
            grown += [keys, values]
        return self.head(self.norm(x)), grown


def growing(
    compile: Compile,
    device: str,
    *,
    layers: int,
    width: int,
    heads: int,
    batch: int,
    words: int,
    prompt: int,
    new: int,
) -> Step:
    """``new`` tokens after a prompt, then from the prompt again, as a server does with the next request."""
    torch.manual_seed(0)
    dtype = floating(device)
    model = GrowingDecoder(layers, width, heads, words, prompt + new).to(device, dtype).eval()
    size = (batch, heads, prompt, width // heads)
    first = [torch.randn(size, device=device, dtype=dtype) for _ in range(2 * layers)]
    for cache in first:
        torch._dynamo.mark_dynamic(cache, 2)
    tokens = [torch.randint(0, words, (batch, 1), device=device) for _ in range(new)]
    decode, caches, at = compile(model), first, 0

    def step() -> list[torch.Tensor]:
        nonlocal caches, at
        with torch.no_grad():
            logits, caches = decode(tokens[at], caches if at else first)
        at = (at + 1) % new
        return [logits, caches[-1]]

    return step


def llama_static(
    compile: Compile,
    device: str,
    *,
    layers: int,
    width: int,
    inner: int,
    heads: int,
    groups: int,
    words: int,
    prompt: int,
    new: int,
) -> Step:
    """The ``StaticCache`` of transformers: ``new`` tokens after a prompt, then the cache is wound back to it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=words,
    )
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config)
        model = model.to(floating(device)).eval()
    cache: Any = transformers.StaticCache(config=config, max_cache_len=prompt + new)
    with torch.no_grad():
        model(input_ids=torch.randint(0, words, (1, prompt), device=device), past_key_values=cache)
    tokens = [torch.randint(0, words, (1, 1), device=device) for _ in range(new)]
    decode, at = compile(model), 0

    def step() -> list[torch.Tensor]:
        nonlocal at
        if at == 0:
            for layer in cache.layers:
                layer.cumulative_length.fill_(prompt)
        with torch.no_grad():
            logits = decode(input_ids=tokens[at], past_key_values=cache).logits
        at = (at + 1) % new
        return [logits, cache.layers[-1].keys]

    return step


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "decode-kv",
        "decode",
        "language",
        "A decoder of 16 layers, width 1024, batch 8, writes its KV caches in place; they are passed as inputs, which "
        "CUDA Graph Trees decline to capture.",
        partial(in_place, layers=16, width=1024, heads=16, batch=8, length=512, at=7),
        partial(in_place, layers=2, width=32, heads=2, batch=2, length=16, at=7),
        whole_step=True,
    ),
    Workload(
        "decode-dynamic",
        "decode",
        "language",
        "A decoder of 8 layers, width 1024, batch 8, whose caches grow by concatenation: 32 lengths in turn, each with "
        "new addresses.",
        partial(growing, layers=8, width=1024, heads=16, batch=8, words=8192, prompt=128, new=32),
        partial(growing, layers=2, width=32, heads=2, batch=2, words=64, prompt=5, new=4),
        calls=32,
        turns=32,
        feeds_back=True,
        why_tolerance="half-precision sums in another order, through at most 32 tokens of cache",
    ),
    Workload(
        "decode-llama-static",
        "decode",
        "language",
        "A Llama of 16 layers and a billion parameters decodes at batch 1 with the StaticCache of transformers, whose "
        "addresses are declared static.",
        partial(llama_static, layers=16, width=2048, inner=5632, heads=32, groups=8, words=32000, prompt=128, new=64),
        partial(llama_static, layers=2, width=32, inner=64, heads=4, groups=2, words=64, prompt=6, new=4),
        calls=64,
        why_tolerance="half-precision sums in another order, through at most 64 tokens of cache",
        packages=("transformers",),
        imports=("transformers.models.llama.modeling_llama",),
    ),
)
