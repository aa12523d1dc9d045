"""A decode step of a Llama-like model, which owns its caches. The position is a tensor, or a Python int.

tensor   each sequence writes its slot of the cache and attends to the whole cache, masked: sizes are batch sizes
int      slices the caches, and attends to the written part, as in torchbench: a size for each position
"""

from __future__ import annotations

import math

import torch
from torch import nn

__all__ = ["BILLION", "SMALL", "TINY", "Llama"]

BILLION = {"layers": 16, "width": 2048, "inner": 8192, "heads": 32, "groups": 8, "words": 32000, "length": 128}
SMALL = {"layers": 8, "width": 512, "inner": 1536, "heads": 8, "groups": 8, "words": 32000, "length": 256}
"""The sizes of torchbench's llama, whose cache is longer than the positions used here."""
TINY = {"layers": 1, "width": 32, "inner": 64, "heads": 4, "groups": 2, "words": 64, "length": 32}


class Layer(nn.Module):
    """Attention with shared keys and values, and a gated perceptron. Takes and returns [batch, width]."""

    def __init__(self, width: int, inner: int, heads: int, groups: int, length: int, batch: int) -> None:
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * self.each, bias=False)
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(inner, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, length, groups, self.each))

    def forward(self, x: torch.Tensor, at: torch.Tensor | int, turn: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        parts = (self.heads, self.groups, self.groups)
        q, k, v = self.qkv(self.before_attention(x)).view(batch, -1, self.each).split(parts, 1)
        q, k = rotated(q, turn), rotated(k, turn)
        seen = self.sliced(q, k, v, at) if isinstance(at, int) else self.masked(q, k, v, at)
        x = x + self.out(seen.reshape(batch, -1))
        y = self.before_mlp(x)
        made: torch.Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return made

    def masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        batch, length = q.shape[0], self.keys.shape[1]
        slots = torch.arange(batch, device=q.device) * length + at
        for cache, new in ((self.keys, k), (self.values, v)):
            cache.view(-1, self.groups, self.each).index_copy_(0, slots, new)
        keys, values = (cache[:batch].transpose(1, 2) for cache in (self.keys, self.values))
        mask = (torch.arange(length, device=q.device) <= at)[None, None, None]
        q = q.view(batch, self.groups, -1, self.each)  # the heads of a group are its queries
        return nn.functional.scaled_dot_product_attention(q, keys, values, mask)

    def sliced(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int) -> torch.Tensor:
        batch = q.shape[0]
        self.keys[:batch, at : at + 1] = k[:, None]
        self.values[:batch, at : at + 1] = v[:, None]
        keys, values = (cache[:batch, : at + 1].transpose(1, 2) for cache in (self.keys, self.values))
        q = q.view(batch, self.groups, -1, self.each)
        scores = q @ keys.transpose(2, 3) / math.sqrt(self.each)
        return scores.float().softmax(-1).to(q.dtype) @ values


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [batch, heads, each]; ``turn`` holds cosines and sines, [2, each / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * turn[0] - b * turn[1], a * turn[1] + b * turn[0]), -1)


class Llama(nn.Module):
    """Takes a token of each sequence, [batch], and their position: an int64 tensor of one element, or an int."""

    def __init__(
        self, *, layers: int, width: int, inner: int, heads: int, groups: int, words: int, length: int, batch: int
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Layer(width, inner, heads, groups, length, batch) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        half = width // heads // 2
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(half) / half)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin()), 1))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor | int) -> list[torch.Tensor]:
        """The last hidden state, [batch, width], and each sequence's largest logit: all logits would take most of the
        memory of captures."""
        x = self.embed(tokens)
        turn = (self.turns[at : at + 1] if isinstance(at, int) else self.turns[at])[0]
        for layer in self.layers:
            x = layer(x, at, turn)
        x = self.norm(x)
        return [x, self.head(x).amax(-1)]
