"""One process of several that run compiled programs with collectives, functional or inside of custom operators.

Run as ``python -m tests.ranks RANK SIZE STORE DEVICE BACKEND``. Prints what its calls returned, as JSON.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

CALLS = 7


@torch.library.custom_op("pygraph_ranks::total", mutates_args=())
def total(x: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks, by the usual function."""
    y = x.clone()
    distributed.all_reduce(y)
    return y


@torch.library.custom_op("pygraph_ranks::direct", mutates_args=())
def direct(x: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks, by a call of the backend that bypasses the dispatcher."""
    y = x.clone()
    group: Any = distributed.group.WORLD
    group._get_backend(x.device).allreduce([y]).wait()
    return y


for _op in (total, direct):
    _op.register_fake(lambda x: torch.empty_like(x))


def functional(x: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks, by a functional collective."""
    return all_reduce(x, "sum", distributed.group.WORLD)


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Sums over all ranks, from the gathered tensors of all; a second collective is under way meanwhile."""
    group = distributed.group.WORLD
    everything = all_gather_tensor(x, 0, group)
    other = all_reduce(x * 3, "sum", group)
    return everything.view(-1, *x.shape).sum(0) + 0 * torch.relu(other)


def main(rank: int, size: int, store: str, device: str, backend: str) -> None:
    import pygraph

    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    ops = [total, functional, gathered] if device == "cuda" else [total, direct, functional, gathered]
    if device == "cuda":
        torch.cuda.set_device(rank)
    # Ranks capture at different calls.
    options = {"passes": "legality,placement,partitioning,indirection", "capture_after": 2 + rank}
    for op in ops:
        ours = torch.compile(lambda x, op=op: torch.relu(op(torch.relu(x) + 1)) * 2, backend="pygraph", options=options)
        found = [float(ours(torch.full((4,), float(call + rank), device=device))[0]) for call in range(CALLS)]
        (report,) = pygraph.reports()
        counts = pygraph.counters()
        states = [region.state for region in report.regions]
        left = [(u.op, u.reason) for u in report.uncaptured()]
        calls = sum(call.count for region in report.regions if region.record for call in region.record.eager)
        said = {"found": found, "states": states, "left": left, "calls": calls, "replays": counts.get("replays", 0)}
        print(json.dumps(said))
        pygraph.reset()
        torch._dynamo.reset()
    distributed.destroy_process_group()


if __name__ == "__main__":
    number, count, path, place, kind = sys.argv[1:]
    main(int(number), int(count), path, place, kind)
