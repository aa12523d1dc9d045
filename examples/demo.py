"""The whole road on a small BERT: explain it, check it against eager, and time it against plain Inductor.

Run it with ``make demo`` or ``python examples/demo.py [REPORT.html]``. It takes about a minute, most of it Inductor's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bert import build

import pygraph

CALLS = 50
ROUNDS = 9


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """Median time of each call in µs; the calls take turns, so that whatever else the machine does hits all alike."""
    rounds = [[_round(call) for call in calls] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _round(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


model, inputs = build(layers=2)


def compiled(backend: str) -> Callable[[], torch.Tensor]:
    """A call of the model compiled by ``backend``, warm: PyGraph captures at the second call and replays the third."""
    function = torch.compile(model, backend=backend)

    def call() -> torch.Tensor:
        return function(**inputs).last_hidden_state

    for _ in range(4):
        call()
    return call


def main() -> None:
    """Explain, compare, time: on one thread, because what is saved is the cost of launching, not of computing."""
    torch.set_num_threads(1)
    explanation = pygraph.explain(model, **inputs)
    print(explanation)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(explanation.html(), encoding="utf-8")
        print(f"wrote {sys.argv[1]}\n")
    torch._dynamo.reset()

    replayed, plain = compiled("pygraph"), compiled("inductor")
    eager = model(**inputs).last_hidden_state
    difference = (replayed() - eager).abs().max().item()
    print(f"largest difference from eager     {difference:.1e}")
    print(f"equal to plain Inductor, bitwise  {torch.equal(replayed(), plain())}")
    before, after = microseconds(plain, replayed)
    print(f"one call, plain Inductor          {before:.0f} µs")
    print(f"one call, PyGraph                 {after:.0f} µs")
    assert difference < 1e-4, "a replay differs from eager"


if __name__ == "__main__":
    main()
