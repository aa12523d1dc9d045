"""A small GPT learns text made on the spot, twice: run eagerly, and with its whole step captured. Prints both curves.

    python examples/gpt_training.py [STEPS]

The step clips gradients and updates with AdamW, under a scheduler; half-way through, model and optimizer
go through a checkpoint.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import pygraph

TEXT = " ".join(f"{a} plus {b} is {a + b}." for a in range(40) for b in range(40))
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Causal attention, then two linear layers, each added to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.heads(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """Scores of the next letter at each place of a (batch, length) tensor of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.scores = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        return self.scores(self.blocks(x))


def train(steps: int, wrap: Callable[..., Callable[..., torch.Tensor]]) -> tuple[list[float], float]:
    """The losses of ``steps`` steps, and the mean milliseconds of the last half of them."""
    torch.manual_seed(0)
    data = torch.tensor([LETTERS.index(letter) for letter in TEXT], device=DEVICE)
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(letters).flatten(0, 1), following.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run, losses, start = wrap(step), [], 0.0
    choose = torch.Generator().manual_seed(1)
    for index in range(steps):
        if index == steps // 2:
            checkpoint = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
            checkpoint.seek(0)
            loaded = torch.load(checkpoint)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            start = time.perf_counter()
        places = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=choose).tolist()
        letters = torch.stack([data[place : place + CONTEXT] for place in places])
        following = torch.stack([data[place + 1 : place + CONTEXT + 1] for place in places])
        losses.append(run(letters, following).item())
        scheduler.step()
    return losses, (time.perf_counter() - start) / (steps - steps // 2) * 1e3


def main() -> None:
    """Train both ways, and print the losses side by side."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    eager, eager_ms = train(steps, lambda step: step)
    captured, captured_ms = train(steps, pygraph.train_step)
    print(f"{'step':>5}  {'eager':>7}  {'captured':>8}")
    for index in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"{index:5}  {eager[index]:7.4f}  {captured[index]:8.4f}")
    print(f"\n{eager_ms:.2f} ms a step eagerly, {captured_ms:.2f} ms captured; {pygraph.counters()}")


if __name__ == "__main__":
    main()
