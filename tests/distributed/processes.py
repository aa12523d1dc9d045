"""Several processes that belong together, each under a watchdog: one that is stuck prints all its stacks and ends.

The parent starts them with ``launch``; a child opens its end with ``Rank``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from pygraph.runtime.host import build
from tests import forked

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYGRAPH_LEDGER": "0",
    "PYGRAPH_ORDER": "program",
    "PYTHONUNBUFFERED": "1",
}
ONE_THREAD = "import torch; torch.set_num_threads(1)"
"""As OMP_NUM_THREADS says, which torch has read already in a process that is forked."""


def launch(module: str, size: int, arguments: Sequence[str] = (), *, seconds: float) -> list[list[dict[str, Any]]]:
    """The JSON lines that each of ``size`` processes ``python -m MODULE RANK SIZE STORE ARGUMENTS`` printed, by rank.
    All are killed after ``seconds``. Raises AssertionError with what they wrote to stderr if one failed."""
    said, failure = attempt(module, size, arguments, seconds=seconds)
    assert not failure, failure
    return said


def attempt(
    module: str, size: int, arguments: Sequence[str] = (), *, seconds: float
) -> tuple[list[list[dict[str, Any]]], str]:
    """As ``launch``, for processes that may fail: the JSON lines that each rank printed before it ended, and the stderr
    of those that failed (empty if none did)."""
    build.load()  # built here, if it has to be: the ranks' time is for what they do
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            forked.start(
                f"{ONE_THREAD}; {forked.module(module)}",
                *(rank, size, Path(folder, "store"), *arguments),
                env={**os.environ, **ENVIRONMENT},
                out=Path(folder, f"out{rank}"),
                err=Path(folder, f"err{rank}"),
            )
            for rank in range(size)
        ]
        end = time.monotonic() + seconds
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
                if any(rank.poll() for rank in ranks):  # the others wait for it
                    end = min(end, time.monotonic() + 3)
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        out, err = ([Path(folder, f"{kind}{rank}").read_text() for rank in range(size)] for kind in ("out", "err"))
    lines = [text.splitlines(keepends=True) for text in out]  # one that was killed may have left half a line
    said = [[json.loads(line) for line in rank if line.startswith("{") and line.endswith("\n")] for rank in lines]
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    return said, "\n".join(f"rank {n}: status {ranks[n].returncode}\n{err[n][-6000:]}" for n in failed)


def use_one_thread() -> None:
    """Have each gloo group of this process complete one collective after the other.

    By default a group has two threads. Both write the name of what they have completed to one string, and hold no lock
    (``ProcessGroupGloo::runLoop``, torch 2.13): where several collectives are under way, one writes into what the other
    has freed. In one of some ten runs of 1,000 random programs that ended in "malloc(): unaligned tcache chunk".
    ``init_process_group`` passes no options on to gloo.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    if distributed_c10d.ProcessGroupGloo is not distributed.ProcessGroupGloo:
        return  # done

    class OneThread(distributed.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = distributed.ProcessGroupGloo._Options()
            options._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
            options._threads, options._timeout = 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneThread


class Rank:
    """This process among ``size``. Each ``begin`` makes process groups of its own, so that what failed before it leaves
    nothing behind."""

    def __init__(self, number: int, size: int, store: str, device: str = "cpu") -> None:
        from torch import distributed

        self.number, self.size, self.device = number, size, device
        self._store = distributed.FileStore(store, size)
        self._begun = 0

    def begin(self, name: str, seconds: float) -> None:
        """Start something that ends within ``seconds``, or this process does, with its stacks on stderr."""
        from torch import distributed

        faulthandler.dump_traceback_later(seconds, exit=True)
        use_one_thread()
        self.end()
        self._begun += 1
        store = distributed.PrefixStore(f"{self._begun}", self._store)

        def meet(place: str) -> None:
            store.set(f"{place}{self.number}", "")
            store.wait([f"{place}{other}" for other in range(self.size)], timedelta(seconds=seconds))

        meet(f"{name} begins ")
        distributed.init_process_group(
            "gloo" if self.device == "cpu" else "nccl",
            store=store,
            rank=self.number,
            world_size=self.size,
            timeout=timedelta(seconds=seconds / 2),
        )
        meet(f"{name} is connected ")  # a rank that ends its group at once would break off others' connections

    def end(self) -> None:
        """Give up the process groups."""
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()

    def say(self, **facts: Any) -> None:
        """Tell the parent."""
        print(json.dumps(facts), flush=True)
