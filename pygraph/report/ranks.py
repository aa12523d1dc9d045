"""Reports of the ranks of one program: collection by rank 0, and differences of the other ranks from it.

torchrun hosts a store that outlives the script, its process groups and each rank. A rank that has finished sends its
document there, and rank 0 waits for all. No rank waits within the script.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any

PATIENCE_S = 300.0
"""Time for which rank 0 waits for the other ranks once its own script has ended, s."""

_POLL_S = 0.1
_PIECE = 1 << 20  # bytes; the store takes no value above 8 MiB

_DEVICE = re.compile(r"\bcuda:\d+")
_RECORD = {"segments": "segments", "captures": "captures", "replays": "replays", "uncaptured": "uncaptured calls"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as a rank of torchrun: ``rank``, number of ranks, address of their store, and restart count."""

    rank: int
    size: int
    host: str
    port: int
    attempt: str

    @classmethod
    def of_torchrun(cls) -> Ranks | None:
        """Read torchrun's environment, which the script may change later; None for a single process."""
        environ = os.environ
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environ["WORLD_SIZE"] == "1":
            return None
        rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, size, environ["MASTER_ADDR"], port, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def _store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        store = TCPStore(self.host, self.port, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
        return PrefixStore(f"pygraph.explain.{self.attempt}", store)  # ranks that torchrun restarts find the same store

    def send(self, document: Mapping[str, Any]) -> None:
        """Send ``document`` to rank 0 through the store. Raises RuntimeError if the store cannot be reached."""
        data, store = zlib.compress(json.dumps(document).encode()), self._store()
        starts = range(0, len(data), _PIECE)
        for piece, start in enumerate(starts):
            store.set(f"{self.rank}.{piece}", data[start : start + _PIECE])
        store.add(f"{self.rank}", len(starts))  # returns once everything is stored: this process may end

    def gather(self, ended: Callable[[], bool]) -> list[dict[str, Any]]:
        """Reports of the ranks after 0, in order. The wait ends after PATIENCE_S, or as soon as ``ended`` is true; a
        rank without a report by then has an ``error`` and no ``summary``."""
        found: dict[int, dict[str, Any]] = {}
        missing = f"sent no report within {PATIENCE_S:.0f} s"
        deadline, last = time.monotonic() + PATIENCE_S, False
        try:
            store = self._store()
            while not last and len(found) < self.size - 1:
                last = ended() or time.monotonic() > deadline  # documents sent before that are still read
                for rank in range(1, self.size):
                    if rank not in found and store.check([f"{rank}"]):
                        pieces = (store.get(f"{rank}.{piece}") for piece in range(int(store.get(f"{rank}"))))
                        found[rank] = json.loads(zlib.decompress(b"".join(pieces)))
                time.sleep(0 if last else _POLL_S)
        except RuntimeError as error:  # from the store, if torchrun's own process is gone
            missing = f"sent no report: {error}"
        if ended():
            missing = "sent no report before it ended"
        none = {"error": missing, "incomplete": False, "summary": None, "graphs": []}
        return [found.get(rank, none) for rank in range(1, self.size)]


def compared(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The documents of all ranks, each with its ``rank`` and the ``differences`` from rank 0, in words."""
    first = documents[0]["graphs"]
    return [
        {"rank": rank, "differences": list(_differences(first, told["graphs"])) if told["summary"] else [], **told}
        for rank, told in enumerate(documents)
    ]


def _differences(ours: Sequence[Any], theirs: Sequence[Any]) -> Iterator[str]:
    """Differences in words. Graphs correspond if they are the n-th with the same kind, function and user line."""
    first, other = _by_origin(ours), _by_origin(theirs)
    for key in dict.fromkeys((*first, *other)):
        if key not in other:
            yield f"did not compile {_called(first[key])}"
        elif key not in first:
            yield f"compiled {_called(other[key])}; rank 0 did not"
        else:
            mine, its = first[key], other[key]
            regions = zip_longest(mine["regions"], its["regions"])
            found = [*_changed(_graph(mine), _graph(its))]
            for index, pair in enumerate(regions):
                found += [f"region {index}: {text}" for text in _changed(*map(_region, pair))]
            yield from (f"{its['name']}: {text}" for text in found)


def _called(graph: Any) -> str:
    at = f" at {graph['loc']}" if graph["loc"] else ""
    return f"{graph['name']} ({graph['function'] or 'unknown function'}{at})"


def _by_origin(graphs: Sequence[Any]) -> dict[tuple[Any, ...], Any]:
    seen: Counter[tuple[Any, ...]] = Counter()
    found = {}
    for graph in graphs:
        origin = graph["kind"], graph["function"], graph["loc"]
        key = (*origin, seen[origin])
        found[key] = graph
        seen[origin] += 1
    return found


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Differences between two sets of facts; for a list, the first one. A fact of both sets is shown with both values;
    a key with value None is a sentence, and is shown if only one set has it."""
    for name in dict.fromkeys((*theirs, *ours)):
        mine, its = ours.get(name), theirs.get(name)
        if isinstance(mine, list) and isinstance(its, list):
            pairs = zip_longest(mine, its, fillvalue="none")
            mine, its = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        if name in ours and name in theirs and mine != its:
            yield f"{name} {its}, on rank 0 {mine}"
        elif mine is its is None and (name in ours) != (name in theirs):
            yield name if name in theirs else f"on rank 0 only: {name}"


def _graph(graph: Any) -> dict[str, Any]:
    """Facts of a graph that ranks compare. Inputs with their types come from its text, without indices of GPUs, which
    differ between ranks."""
    coverage, lines = graph["coverage"], (graph["pgir"] or "").splitlines()
    inputs = [_DEVICE.sub("cuda", line.partition(" {role")[0].strip()) for line in lines if " {role = " in line]
    rows = Counter(f"{row['op']} at {row['loc'] or 'unknown line'}: {row['reason']}" for row in graph["uncaptured"])
    return {
        "error": graph["error"] or "none",
        "operators": "unknown" if graph["operators"] is None else graph["operators"],
        "launches": "unknown" if coverage is None else f"{coverage['selected_launches']} of {coverage['launches']}",
        "input": inputs,
        **{f"not captured: {what}" + (f" ×{n}" if n > 1 else ""): None for what, n in rows.items()},
        **{f"graph break at {each['loc']}: {each['reason']}": None for each in graph["graph_breaks"]},
    }


def _region(region: Any | None) -> dict[str, Any]:
    """Facts of a region that ranks compare, without measurements, which always vary."""
    if region is None:
        return {"state": "none"}
    record = region["record"] or {}
    why = (_DEVICE.sub("cuda", text) for text in region["why"] if not text.startswith("measured: "))
    return {
        "state": region["state"],
        "kernels": len(region["kernels"]),
        **{words: record.get(name, 0) for name, words in _RECORD.items()},
        **dict.fromkeys(why),
    }
