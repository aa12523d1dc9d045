"""Several input sizes in one run: sentences of eight lengths, images of four resolutions.

Nothing is declared dynamic: the second size makes Dynamo compile again with symbols, as most users will see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle

import torch
from torch import nn

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import TokenModel, in_turn
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]


class Encoder(TokenModel):
    """Takes tokens [batch, length]; returns a sentence's vector [batch, width]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.norm(x).mean(1)
        return made


class Residual(nn.Module):
    """Two convolutions with a way around them; the first halves the resolution."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inner, outer, 1, 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(y)) + self.norms[2](self.around(x)))


def encoder(
    compile: Compile,
    device: str,
    *,
    lengths: Sequence[int],
    words: int,
    width: int,
    heads: int,
    layers: int,
    batch: int,
) -> Step:
    torch.manual_seed(0)
    model = Encoder(words, max(lengths), width, heads, layers).to(device, floating(device)).eval()
    turns = cycle([torch.randint(0, words, (batch, length), device=device) for length in lengths])
    run = compile(model)
    return in_turn(run, turns)


def images(compile: Compile, device: str, *, resolutions: Sequence[int], widths: Sequence[int], batch: int) -> Step:
    torch.manual_seed(0)
    dtype = floating(device)
    stages = [Residual(inner, outer) for inner, outer in zip((3, *widths), widths, strict=False)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 100))
    model = model.to(device, dtype).eval()
    turns = cycle([torch.randn(batch, 3, size, size, device=device, dtype=dtype) for size in resolutions])
    run = compile(model)
    return in_turn(run, turns)


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "encoder-lengths",
        "inference",
        "language",
        "A sentence encoder of 6 layers, batch 4, at eight lengths from 64 to 512 in turn.",
        partial(
            encoder,
            lengths=(192, 64, 448, 128, 512, 320, 256, 384),
            words=32000,
            width=768,
            heads=12,
            layers=6,
            batch=4,
        ),
        partial(encoder, lengths=(6, 3, 12, 9), words=64, width=32, heads=2, layers=2, batch=2),
        calls=32,
        turns=8,
    ),
    Workload(
        "cnn-resolutions",
        "inference",
        "vision",
        "A residual convolutional network, batch 8, at four resolutions from 128 to 224 in turn.",
        partial(images, resolutions=(160, 224, 128, 192), widths=(64, 128, 256, 512), batch=8),
        partial(images, resolutions=(16, 32, 8, 24), widths=(8, 16), batch=2),
        calls=32,
        turns=4,
    ),
)
