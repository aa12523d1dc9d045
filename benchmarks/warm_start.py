"""How long a later process takes until its first compiled call has returned, against plain Inductor.

    python benchmarks/warm_start.py [--device cuda] [--programs mlp,llama] [--runs 5] [--out FILE]

Each program runs in processes of its own with one cache folder: once for each backend to fill it, then in turn. A
process builds its model, then takes the time from ``torch.compile`` to the end of the first call, imports of the
backend included, and to the end of the first call that was replayed. Processor time is for machines with other load.
Prints a table of medians and the geometric means of the ratios. ``compile_time.py`` has times from empty caches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

BACKENDS = ("inductor", "pygraph")
CALLS = 8
"""Maximum number of calls of a process until one is replayed."""


class Block(nn.Module):
    """One layer of a Llama-like decoder, with a cache that is written in place."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("cache", torch.zeros(2, 1, heads, length, width // heads))

    def forward(self, x: torch.Tensor, at: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(1, 3, self.heads, 1, -1).unbind(1)
        self.cache[0].index_copy_(2, at, k)
        self.cache[1].index_copy_(2, at, v)
        seen = nn.functional.scaled_dot_product_attention(q, self.cache[0], self.cache[1], mask)
        x = x + self.out(seen.reshape(1, 1, -1))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A decode step: a token and its position to the next token."""

    def __init__(self, layers: int = 4, width: int = 128, length: int = 32, words: int = 512) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Block(width, 4, length) for _ in range(layers))
        self.register_buffer("positions", torch.arange(length))

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x, mask = self.embed(token), (self.positions <= at)[None]
        for layer in self.layers:
            x = layer(x, at, mask)
        return self.head(x).argmax(-1)


def mlp(layers: int = 3) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 8))


def cnn() -> nn.Module:
    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(
        stage(3, 8), stage(8, 16), stage(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)
    )


def encoder(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def sampler(logits: torch.Tensor) -> torch.Tensor:
    top, index = (logits / 0.7).topk(20)
    return index.gather(-1, top.softmax(-1).cumsum(-1).argmax(-1, keepdim=True))


def solver(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = x + 0.1 * (x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x)
    return x


Step = Callable[[], Any]


def forward(fn: Callable[..., Any], *args: torch.Tensor) -> Callable[[Callable[..., Any]], Step]:
    """A call without gradients of ``fn``, compiled by the given function."""

    def make(compile: Callable[..., Any]) -> Step:
        compiled = compile(fn.eval() if isinstance(fn, nn.Module) else fn)
        return torch.no_grad()(lambda: compiled(*args))

    return make


def training(model: nn.Module, *args: torch.Tensor) -> Callable[[Callable[..., Any]], Step]:
    """Forward, backward and a compiled update."""

    def make(compile: Callable[..., Any]) -> Step:
        optimizer = torch.optim.AdamW(model.parameters(), capturable=args[0].is_cuda)
        loss, update = compile(lambda *given: model(*given).square().mean()), compile(optimizer.step)

        def step() -> None:
            optimizer.zero_grad()
            loss(*args).backward()
            update()

        return step

    return make


def program(name: str, device: str) -> Callable[[Callable[..., Any]], Step]:
    """The program called ``name``, with its tensors on ``device``."""
    torch.backends.mha.set_fastpath_enabled(False)  # otherwise one operator computes a whole layer
    with torch.device(device):
        image, tokens = torch.randn(4, 3, 32, 32), torch.randn(2, 16, 64)
        made: dict[str, Callable[[], Callable[[Callable[..., Any]], Step]]] = {
            "mlp": lambda: forward(mlp(), torch.randn(16, 64)),
            "cnn": lambda: forward(cnn(), image),
            "encoder": lambda: forward(encoder(), tokens),
            "llama": lambda: forward(Decoder(), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long)),
            "sampler": lambda: forward(sampler, torch.randn(4, 512)),
            "solver": lambda: forward(solver, torch.randn(64, 64)),
            "gru": lambda: forward(nn.GRUCell(32, 32), torch.randn(8, 32), torch.randn(8, 32)),
            "mlp-train": lambda: training(mlp(), torch.randn(16, 64)),
            "cnn-train": lambda: training(cnn(), image),
            "encoder-train": lambda: training(encoder(), tokens),
        }
        return made[name]()


PROGRAMS = ("mlp", "cnn", "encoder", "llama", "sampler", "solver", "gru", "mlp-train", "cnn-train", "encoder-train")


def one(name: str, backend: str, device: str) -> dict[str, float]:
    """Run one program in this process; times in seconds."""
    from torch._dynamo.utils import counters

    make = program(name, device)
    if device == "cuda":
        torch.cuda.synchronize()
    start, used = time.perf_counter(), time.process_time()
    step = make(lambda fn: torch.compile(fn, backend=backend))
    times: dict[str, float] = {}
    for call in range(CALLS):
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if call == 0:
            times["first"], times["cpu"] = time.perf_counter() - start, time.process_time() - used
            times["hits"] = counters["aot_autograd"]["autograd_cache_hit"]
            times["misses"] = counters["aot_autograd"]["autograd_cache_miss"]
        if backend != "pygraph":
            return times
        import pygraph

        if pygraph.counters().get("replays"):
            times["replay"] = time.perf_counter() - start
            return times
    return times


def measure(name: str, device: str, runs: int) -> dict[str, Any]:
    """Run both backends in separate processes: once to fill the caches, then alternately. Medians in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is not parsed each time

        def process(backend: str) -> dict[str, float]:
            command = [sys.executable, __file__, "--device", device, "--one", name, backend]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{name} with {backend}:\n{done.stderr[-3000:]}")
            found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
            return found

        for backend in BACKENDS:
            process(backend)
        warm: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for _ in range(runs):
            for backend in BACKENDS:
                warm[backend].append(process(backend))
    row: dict[str, Any] = {"program": name}
    for backend in BACKENDS:
        row[f"{backend} warm"] = statistics.median(each["first"] for each in warm[backend])
        row[f"{backend} warm cpu"] = statistics.median(each["cpu"] for each in warm[backend])
    replays = [each["replay"] for each in warm["pygraph"] if "replay" in each]
    row["replay"] = statistics.median(replays) if replays else None
    row["misses"] = max(each["misses"] for each in warm["pygraph"])
    row["ratio warm"] = row["pygraph warm"] / row["inductor warm"]
    row["ratio warm cpu"] = row["pygraph warm cpu"] / row["inductor warm cpu"]
    row["ratio replay"] = row["replay"] / row["inductor warm"] if replays else None
    return row


def mean(ratios: list[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "BACKEND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(one(*chosen.one, chosen.device)))
        return
    # what is measured is no build, and its processes would end before one does
    importlib.import_module(f"pygraph.runtime.{'cuda' if chosen.device == 'cuda' else 'host'}").build.load()
    print(f"{'program':14} {'inductor':>8} {'pygraph':>8} {'replay':>8} {'ratio':>6} {'cpu':>6}   (s)")
    rows = []
    for name in chosen.programs.split(","):
        row = measure(name, chosen.device, chosen.runs)
        rows.append(row)
        sides = " ".join(f"{row[f'{b} warm']:8.2f}" for b in BACKENDS)
        replay = "never" if row["replay"] is None else f"{row['replay']:.2f}"
        ratios = f"{row['ratio warm']:6.2f} {row['ratio warm cpu']:6.2f}"
        print(f"{name:14} {sides} {replay:>8} {ratios}   misses: {row['misses']:.0f}", flush=True)
    summary = {
        "device": torch.cuda.get_device_name() if chosen.device == "cuda" else chosen.device,
        "torch": torch.__version__,
        "runs": chosen.runs,
        "warm": mean([row["ratio warm"] for row in rows]),
        "warm cpu": mean([row["ratio warm cpu"] for row in rows]),
        "until replay": mean([row["ratio replay"] for row in rows if row["ratio replay"]]),
        "programs": rows,
    }
    print(f"geometric means of pygraph / inductor: warm {summary['warm']:.3f} ", end="")
    print(f"(processor time {summary['warm cpu']:.3f}), ", end="")
    print(f"until the first replay {summary['until replay']:.3f}")
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
