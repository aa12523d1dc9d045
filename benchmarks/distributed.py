"""Programs of several processes, side by side: decoding and prefill with tensor parallelism, DDP, FSDP2, experts.

    python benchmarks/distributed.py --processes 2 [--workloads decode,ddp] [--sides …] [--tiny] [--out FILE]

Each workload has processes of its own, one per GPU (or per core, with gloo), in which all sides run in turn. The first
calls of a side are compared with eager ones; then it is warmed up and timed. A row has the time of the slowest rank, in
µs of a step, and its peaks of memory. A process that is stuck prints all its stacks and ends; the sides that are left
run in new ones.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("eager", "default", "reduce-overhead", "pygraph", "measured-collectives", "step", "step-measured-collectives")
"""Sides; ``step`` uses ``pygraph.train_step``, and is for training."""
COMPARED = 6
"""Number of calls that are compared with eager ones."""
CHOOSING = 200
"""Number of calls after them: more than PyGraph needs to choose an order, and a form of collectives."""
PEAKS = ("first_allocated_mb", "allocated_mb", "reserved_mb")
"""Peaks of memory, MB: during calls that compile and capture, during timed calls, and of the allocator's reserve."""
SECONDS = 150
"""Time after which a side of a workload counts as stuck, s."""
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_GRAPH_REGISTER": "0"}
"""NVLink multicast stays off; collectives may be captured."""

Wrap = Callable[[Any], Any]
"""Wraps a module or a function."""
Step = Callable[[int], torch.Tensor]
"""Makes the n-th call; returns the tensor to compare."""


@dataclass(frozen=True)
class Side:
    """Compiles a model or a whole training step as a side does; in ``one`` graph, which FSDP2's hooks do not allow."""

    name: str
    one: bool = False

    def __call__(self, model: Any) -> Any:
        from pygraph.bench.sides import compile_as

        return model if self.name.startswith("step") else compile_as(self.name, model)

    def step(self, step: Any) -> Any:
        import pygraph

        if not self.name.startswith("step"):
            return step
        chosen = {"collectives": "measured"} if self.name != "step" else {}
        return pygraph.train_step(step, options={"cache_dir": None, **chosen}, fullgraph=self.one)


@dataclass(frozen=True)
class Place:
    """This process: its ``rank`` of ``size``, and its ``device``. ``tiny``: sizes for a test."""

    rank: int
    size: int
    device: torch.device
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def numbers(self, *shape: int, seed: int) -> torch.Tensor:
        """Normal random numbers, equal for equal seeds on all ranks: all have devices of one kind."""
        source = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=source, device=self.device).to(self.dtype)

    def tokens(self, *shape: int, below: int, seed: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with ``heads`` of the ``whole`` heads of all ranks; keys and values are written in place. ``reduce``
    sums over ranks."""

    def __init__(self, width: int, heads: int, whole: int, reduce: Wrap) -> None:
        super().__init__()
        self.size = width // whole
        self.query, self.key, self.value = (nn.Linear(width, heads * self.size, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * self.size, width, bias=False)
        self.reduce = reduce

    def forward(
        self, x: torch.Tensor, place: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, -1, self.size)
        query, key, value = (each(x).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))
        keys.index_copy_(2, place, key)
        values.index_copy_(2, place, value)
        if length == 1:
            found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        else:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.reduce(self.out(found.transpose(1, 2).reshape(batch, length, -1)))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int, reduce: Wrap) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.down(F.silu(self.gate(x)) * self.up(x)))


class Decoder(nn.Module):
    """Llama-like decoder. Each rank has a part of each layer, and the whole embedding and head."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, tokens: int, ways: int, reduce: Wrap) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.attention = nn.ModuleList(Attention(width, heads // ways, heads, reduce) for _ in range(layers))
        self.gated = nn.ModuleList(Gated(width, hidden // ways, reduce) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        place: torch.Tensor,
        mask: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        x = self.embedding(tokens)
        for at, (attention, gated) in enumerate(zip(self.attention, self.gated, strict=True)):
            x = x + attention(self.norms[2 * at](x), place, mask, keys[at], values[at])
            x = x + gated(self.norms[2 * at + 1](x))
        return self.head(self.norms[-1](x[:, -1]))


SPLIT = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0, "out": 1, "down": 1}
"""The dimension along which a weight is split among ranks."""


ONE_BILLION = {"layers": 16, "width": 2048, "heads": 16, "hidden": 5632, "tokens": 8192}
EIGHT_BILLION = {"layers": 32, "width": 4096, "heads": 32, "hidden": 14336, "tokens": 128256}
TINY = {"layers": 2, "width": 32, "heads": 8, "hidden": 64, "tokens": 64}


def decoder(place: Place, by_dtensor: bool, sizes: dict[str, int]) -> Decoder:
    """The model with the part of this rank."""
    from torch.distributed._functional_collectives import all_reduce

    group = distributed.group.WORLD

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return x if by_dtensor else all_reduce(x, "sum", group)

    with torch.device(place.device):
        model = Decoder(**sizes, ways=1 if by_dtensor else place.size, reduce=reduce).to(place.dtype)
    with torch.no_grad():
        for seed, (name, weight) in enumerate(model.named_parameters()):
            if weight.dim() < 2:
                continue
            split = None if by_dtensor else SPLIT.get(name.split(".")[-2])
            shape = [n * place.size if at == split else n for at, n in enumerate(weight.shape)]
            whole = place.numbers(*shape, seed=seed) * (0.5 / shape[1] ** 0.5)
            weight.copy_(whole if split is None else whole.chunk(place.size, split)[place.rank])
    if by_dtensor:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = distributed.device_mesh.init_device_mesh(place.device.type, (place.size,))
        for name, _ in list(model.named_modules()):
            split = SPLIT.get(name.split(".")[-1])
            if split is not None:
                parallelize_module(model, mesh, {name: RowwiseParallel() if split else ColwiseParallel()})
    return model.eval().requires_grad_(False)


def decoding(
    place: Place,
    side: Side,
    sizes: dict[str, int] = ONE_BILLION,
    *,
    batch: int = 8,
    by_dtensor: bool = False,
    prompt: int = 0,
) -> Step:
    """Steps of one token for each of a ``batch`` of requests, or of a whole prompt for one."""
    length, rows = 1024, 1
    if place.tiny:
        sizes, length, batch = TINY, 32, min(batch, 2)
    if prompt:
        batch, rows = 1, min(prompt, length // 2)
    run = side(decoder(place, by_dtensor, sizes))
    heads, size = sizes["heads"] // place.size, sizes["width"] // sizes["heads"]

    def caches() -> list[torch.Tensor]:
        shape = (batch, heads, length, size)
        return [torch.zeros(shape, device=place.device, dtype=place.dtype) for _ in range(sizes["layers"])]

    keys, values = caches(), caches()
    columns, where = torch.arange(length, device=place.device), torch.arange(rows, device=place.device)
    script = place.tokens(8, batch, rows, below=sizes["tokens"], seed=1)

    def step(call: int) -> torch.Tensor:
        if not prompt:
            where.fill_(call % length)
        mask = (columns <= where[-1]).view(1, 1, 1, -1)
        with torch.no_grad():
            return run(script[call % 8], where, mask, keys, values)

    return step


# -- training ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(found)
        return x + self.down(F.gelu(self.up(self.after(x))))


class Gpt(nn.Module):
    """Returns the loss of predicting each next token."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, length: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def gpt(place: Place, layers: int) -> tuple[Gpt, Callable[[int], tuple[torch.Tensor, ...]]]:
    """The model, equal on all ranks, and batches, which differ between ranks."""
    width, heads, tokens, length, batch = (768, 12, 16384, 512, 2)
    if place.tiny:
        layers, width, heads, tokens, length, batch = (2, 32, 2, 64, 16, 2)
    torch.manual_seed(0)
    model = Gpt(layers, width, heads, tokens, length)
    script = place.tokens(8, 2, batch, length, below=tokens, seed=place.rank)
    return model, lambda call: tuple(script[call % 8])


def training(
    run: Any, parameters: Any, batch: Callable[[int], tuple[torch.Tensor, ...]], place: Place, side: Side
) -> Step:
    """A training step with AdamW. The loss is compared."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=place.device.type == "cuda")

    @side.step
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = run(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return lambda call: step(*batch(call))


def ddp(place: Place, side: Side) -> Step:
    """Six layers, ``DistributedDataParallel`` around the compiled model."""
    model, batch = gpt(place, 6)
    model.to(place.device, place.dtype)
    run = nn.parallel.DistributedDataParallel(side(model))
    return training(run, model.parameters(), batch, place, side)


def fsdp(place: Place, side: Side, *, whole: bool = False) -> Step:
    """Eight layers, ``fully_shard`` on each; compiled layer by layer, or whole."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, batch = gpt(place, 8)
    model.to(place.device)
    cuda = place.device.type == "cuda"
    mesh = distributed.device_mesh.init_device_mesh(place.device.type, (place.size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    run: Any = model
    if whole:
        run = side(model)
    else:
        for block in model.blocks:
            block.forward = side(block.forward)
    return training(run, model.parameters(), batch, place, side)


# -- experts -----------------------------------------------------------------------------------------------------------


ROUTER = 7
"""Seed of the directions that select experts. Each row is near one of them: rounding does not change its expert."""


class Experts(nn.Module):
    """Experts, some on each rank. Rows go to their experts and back; each takes up to ``capacity`` rows of a rank."""

    def __init__(self, place: Place, width: int, hidden: int, experts: int, capacity: int, seed: int) -> None:
        super().__init__()
        self.size, self.experts, self.capacity, self.own = place.size, experts, capacity, experts // place.size
        mine = slice(place.rank * self.own, (place.rank + 1) * self.own)
        self.norm = nn.LayerNorm(width, device=place.device, dtype=place.dtype)
        self.router = nn.Parameter(place.numbers(width, experts, seed=ROUTER) / (4 * width**0.5))
        self.up = nn.Parameter(place.numbers(experts, width, hidden, seed=seed + 1)[mine] / width**0.5)
        self.down = nn.Parameter(place.numbers(experts, hidden, width, seed=seed + 2)[mine] / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single

        group, width = distributed.group.WORLD, x.shape[-1]
        normal = self.norm(x)
        weight, expert = (normal @ self.router).float().softmax(-1).max(-1)
        rank = F.one_hot(expert, self.experts).cumsum(0).gather(1, expert.unsqueeze(1)).squeeze(1) - 1
        last = self.experts * self.capacity
        row = torch.where(rank < self.capacity, expert * self.capacity + rank, last)
        sent = normal.new_zeros(last + 1, width).index_put((row,), normal)[:-1]
        got = all_to_all_single(sent, None, None, group).view(self.size, self.own, self.capacity, width)
        work = got.transpose(0, 1).reshape(self.own, -1, width)
        done = torch.bmm(F.silu(torch.bmm(work, self.up)), self.down)
        back = done.view(self.own, self.size, self.capacity, width).transpose(0, 1).reshape(last, width)
        back = all_to_all_single(back.contiguous(), None, None, group)
        return x + torch.cat((back, back.new_zeros(1, width)))[row] * weight.to(x.dtype).unsqueeze(-1)


def experts(place: Place, side: Side) -> Step:
    """Eight layers of 16 experts, 512 rows on each rank."""
    layers, width, hidden, number, rows = (2, 16, 32, 8, 32) if place.tiny else (8, 1024, 2048, 16, 512)
    each = [Experts(place, width, hidden, number, 2 * rows // number, 10 * at) for at in range(layers)]
    model = nn.Sequential(*each).eval().requires_grad_(False)
    run = side(model)
    directions = place.numbers(width, number, seed=ROUTER).T
    script = []
    for seed in range(100 * place.rank, 100 * place.rank + 8):
        own = directions[place.tokens(rows, below=number, seed=seed)]
        script.append(own + place.numbers(rows, width, seed=1000 + seed) / 2)

    def step(call: int) -> torch.Tensor:
        with torch.no_grad():
            return run(script[call % 8])

    return step


WORKLOADS: dict[str, Callable[[Place, Side], Step]] = {
    "decode": decoding,
    "decode-dtensor": lambda place, side: decoding(place, side, by_dtensor=True),
    "decode-8b-1": lambda place, side: decoding(place, side, EIGHT_BILLION, batch=1),
    "decode-8b-32": lambda place, side: decoding(place, side, EIGHT_BILLION, batch=32),
    "prefill-512": lambda place, side: decoding(place, side, prompt=512),
    "prefill-512-dtensor": lambda place, side: decoding(place, side, by_dtensor=True, prompt=512),
    "ddp": ddp,
    "fsdp-layers": fsdp,
    "fsdp-whole": lambda place, side: fsdp(place, side, whole=True),
    "experts": experts,
}

WORKLOADS_THAT_TRAIN = frozenset({"ddp", "fsdp-layers", "fsdp-whole"})

# -- one process -------------------------------------------------------------------------------------------------------


def measure(place: Place, workload: str, side: str, expected: list[torch.Tensor]) -> dict[str, Any]:
    """The row of one side, with facts on captures of each rank in ``captured``. ``expected`` has the results of eager,
    whose own row fills it."""
    import pygraph
    from pygraph.bench.worker import what_was_captured

    cuda = place.device.type == "cuda"
    torch._dynamo.reset()
    pygraph.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = WORKLOADS[workload](place, Side(side, one=workload == "ddp"))
    calls = iter(range(1 << 30))

    def run() -> torch.Tensor:
        if side == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return step(next(calls))

    found = [run().float().clone() for _ in range(COMPARED)]
    compiled_s = time.perf_counter() - began
    expected.extend([] if expected else found)
    apart = [float((a - b).norm() / b.norm().clamp_min(1e-20)) for a, b in zip(found, expected, strict=True)]
    few = place.tiny or not cuda
    for _ in range(4 if few else CHOOSING):
        run()
    peaks = [torch.cuda.max_memory_allocated() if cuda else 0]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 if few else 7):
        place.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(3 if few else 30):
            run()
        place.synchronize()
        times.append((time.perf_counter() - start) / (3 if few else 30) * 1e6)
    peaks += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else [0, 0]
    counts = pygraph.counters()
    replays = counts.get("replays", 0)
    mine: dict[str, Any] = {"times": times, "error": max(apart), "peaks": peaks, "compile": compiled_s}
    mine |= {"replays": replays, "captured": what_was_captured()}
    every: list[Any] = [None] * place.size
    distributed.all_gather_object(every, mine)
    slowest = [max(each["times"][at] for each in every) for at in range(len(times))]
    error = max(each["error"] for each in every)
    return {
        "workload": workload,
        "side": side,
        "us": round(statistics.median(slowest), 1),
        "best_us": round(min(slowest), 1),
        "error": error,
        "right": error < (5e-2 if cuda else 1e-4),
        **{name: round(max(each["peaks"][at] for each in every) / 1e6, 1) for at, name in enumerate(PEAKS)},
        "compile_s": round(max(each["compile"] for each in every), 1),
        "replays": min(each["replays"] for each in every),
        "captured": [each["captured"] for each in every],
    }


def child(rank: int, size: int, store: str, workload: str, sides: list[str], tiny: bool) -> None:
    """Measure ``sides`` one by one, and print a line at the beginning and end of each."""
    from pygraph.runtime.native_build import waiting_for_builds

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("high" if cuda else "highest")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    place, expected = Place(rank, size, device, tiny), list[torch.Tensor]()
    for side in sides:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps({"begins": side}), flush=True)
        with waiting_for_builds():
            row = measure(place, workload, side, expected)
        print(json.dumps(row), flush=True)
    faulthandler.cancel_dump_traceback_later()
    import pygraph

    pygraph.reset()
    distributed.destroy_process_group()


# -- all processes -----------------------------------------------------------------------------------------------------


def launch(size: int, workload: str, sides: list[str], tiny: bool) -> list[dict[str, Any]]:
    """The rows of one set of processes, each printed as soon as rank 0 has it; if processes ended, the last row has a
    ``failed`` text."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Path(folder, "said").open("w") as told,
        Path(told.name).open() as heard,
    ):
        errors = [Path(folder, f"errors{rank}") for rank in range(size)]
        ranks = []
        for rank in range(size):
            one = ["--one", str(rank), "--store", f"{folder}/store", "--processes", str(size), "--workloads", workload]
            command = [sys.executable, __file__, *one, "--sides", ",".join(sides), *(["--tiny"] if tiny else [])]
            threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **ENVIRONMENT, **threads}
            out = told if rank == 0 else subprocess.DEVNULL
            with errors[rank].open("w") as file:
                ranks.append(subprocess.Popen(command, stdout=out, stderr=file, env=environment, text=True))
        said: list[dict[str, Any]] = []
        rest = ""

        def read() -> None:
            nonlocal rest
            *lines, rest = (rest + heard.read()).split("\n")  # the last one is not complete yet
            for line in lines:
                if line.startswith("{"):
                    said.append(json.loads(line))
                    if "us" in said[-1]:
                        print(line, flush=True)

        end = time.monotonic() + (SECONDS + 30) * (len(sides) + 1)
        while any(each.poll() is None for each in ranks) and time.monotonic() < end:
            if any(each.poll() for each in ranks):  # the others wait for it: their output says where
                end = min(end, time.monotonic() + 20)
            time.sleep(0.1)
            read()
        for each in ranks:
            each.kill()
        failed = [rank for rank, each in enumerate(ranks) if each.wait() != 0]
        read()
        rows = [line for line in said if "us" in line]
        if failed:
            begun = [line["begins"] for line in said if "begins" in line]
            side = begun[len(rows)] if len(begun) > len(rows) else sides[len(rows)] if len(rows) < len(sides) else ""
            texts = (f"rank {rank}:\n{errors[rank].read_text()[-3000:]}" for rank in failed)
            rows.append({"workload": workload, "side": side, "failed": "\n".join(texts)})
            print(json.dumps(rows[-1]), flush=True)
        return rows


def main() -> None:
    """Measure, and print a line per workload and side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        child(chosen.one, chosen.processes, chosen.store, chosen.workloads, chosen.sides.split(","), chosen.tiny)
        return
    rows: list[dict[str, Any]] = []
    for workload in chosen.workloads.split(","):
        asked = (*chosen.sides.split(","), "eager")
        trains = WORKLOADS_THAT_TRAIN.intersection([workload])
        left = [side for side in SIDES if side in asked and (trains or not side.startswith("step"))]
        while left:
            made = launch(chosen.processes, workload, left, chosen.tiny)
            rows += [row for row in made if row not in rows]
            tried = [row["side"] for row in made]
            left = [side for side in left if side not in tried] if "failed" in made[-1] else []
            left = ["eager", *left] if left and left[0] != "eager" and "eager" in tried[:-1] else left
            if tried in (["eager"], [""]) and "failed" in made[-1]:
                break  # without eager there is nothing to compare with
    if chosen.out:
        chosen.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
