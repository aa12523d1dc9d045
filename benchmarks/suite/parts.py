"""Parts that workloads of several domains share: multi-layer perceptrons, transformers, steps on inputs in turn.

What a workload runs, and at which sizes, is said in its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.workload import Step

__all__ = ["Block", "Perceptron", "TokenModel", "in_turn", "mlp"]


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers between ``sizes``, each but the last followed by ``activation``."""
    layers: list[nn.Module] = []
    for inner, outer in pairwise(sizes):
        layers += [nn.Linear(inner, outer), activation()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A transformer block with the norms in front. Takes and returns [batch, length, width].

    ``mask`` is an attention mask; ``causal`` masks the future where none is given.
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp((width, 4 * width, width), nn.GELU)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), mask)
        made: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return made

    def attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        causal = self.causal and mask is None
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return made


class Perceptron(nn.Module):
    """Normalised, widened, and added: takes and returns [batch, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return result


class TokenModel(nn.Module):
    """The parts of a transformer over tokens: embeddings of words and of positions, blocks, a norm at the end.

    Each model has a ``forward`` of its own.
    """

    def __init__(self, words: int, longest: int, width: int, heads: int, layers: int, causal: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)


def in_turn(run: Callable[..., Any], inputs: Iterator[Any]) -> Step:
    """Inference on the next of ``inputs`` in each step: a tensor, or a tuple or list of arguments."""

    def step() -> Any:
        given = next(inputs)
        with torch.no_grad():
            return run(*given) if isinstance(given, (tuple, list)) else run(given)

    return step
