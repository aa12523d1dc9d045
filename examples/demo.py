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
from bert import inputs, model

import pygraph

CALLS = 50
ROUNDS = 7


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call, over rounds of calls, in µs."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(rounds)


def compiled(backend: str) -> Callable[[], torch.Tensor]:
    """A call of the model compiled by ``backend``, warm: PyGraph captures at the second call and replays the third."""
    function = torch.compile(model, backend=backend)

    def call() -> torch.Tensor:
        return function(**inputs).last_hidden_state

    for _ in range(4):
        call()
    return call


def main() -> None:
    """Explain, compare, time."""
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
    print(f"one call, plain Inductor          {microseconds(plain):.0f} µs")
    print(f"one call, PyGraph                 {microseconds(replayed):.0f} µs")
    assert difference < 1e-4, "a replay differs from eager"


if __name__ == "__main__":
    main()
