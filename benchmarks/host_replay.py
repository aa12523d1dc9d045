"""Time of one call: Inductor's own wrapper against a replay by the host driver, for small models.

Run ``python benchmarks/host_replay.py``. Prints µs per call (median over blocks that alternate) and the ratio; a ratio
above 1 means that the replay is faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pygraph.runtime.host import HostDriver
from tests.runtime.host.replays import make_executable
from tests.runtime.regions import compile_regions

BLOCKS = 40
CALLS = 200


def perceptron(layers: int, width: int) -> torch.nn.Module:
    """``layers`` linear layers with a rectifier and a normalisation after each."""
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.LayerNorm(width)]
    return torch.nn.Sequential(*parts)


def block(call: Callable[[], Any]) -> float:
    """µs per call over one block."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def bert_tiny() -> tuple[torch.nn.Module, torch.Tensor]:
    """The two-layer BERT of width 128, and a sentence of 32 tokens."""
    config = transformers.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    return Last(model), torch.randint(0, config.vocab_size, (1, 32))


class Last(torch.nn.Module):
    """A transformer whose only output is its last hidden state."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states, [batch, length, width], of ``tokens``, [batch, length]."""
        return self.model(input_ids=tokens).last_hidden_state


def compare(model: torch.nn.Module, x: torch.Tensor) -> tuple[int, float, float]:
    """Launches, and median µs per call of the wrapper and of the replay."""
    compiled = compile_regions(model)
    compiled.call(x)
    (region,) = compiled.regions
    executable, recording = make_executable(HostDriver(), region)
    args = region.args
    pairs = [
        (block(lambda: region.fn(list(args))), block(lambda: executable.replay(list(args)))) for _ in range(BLOCKS)
    ]
    wrapper, replay = zip(*pairs, strict=True)
    return len(recording.launches), statistics.median(wrapper), statistics.median(replay)


def main() -> None:
    """Print one line for each model."""
    torch.set_num_threads(1)
    models = {
        f"mlp {layers}×{width}, batch {batch}": (perceptron(layers, width), torch.randn(batch, width))
        for layers, width, batch in [(1, 16, 4), (2, 32, 8), (4, 32, 8), (4, 128, 16), (8, 256, 32)]
    }
    models["bert-tiny, 32 tokens"] = bert_tiny()
    print(f"{'model':<24} {'launches':>8} {'wrapper µs':>11} {'replay µs':>10} {'ratio':>6}")
    for name, (model, x) in models.items():
        launches, wrapper, replay = compare(model, x)
        print(f"{name:<24} {launches:>8} {wrapper:>11.1f} {replay:>10.1f} {wrapper / replay:>6.2f}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
