"""What a process does when told: where its calls give way to others, and what it tells at the end."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator

from pygraph.bench.protocol import Channel
from pygraph.bench.serving import Serving

COMMANDS = (
    {"do": "compile"},
    {"do": "warm", "calls": 3, "seconds": 0.0},
    {"do": "block", "calls": 2, "lead": 1},
    {"do": "finish"},
)


def test_calls_after_the_first_one_are_made_alone_and_what_was_chosen_is_told() -> None:
    answers, inside, seen = io.StringIO(), [False], []
    commands = io.StringIO("".join(json.dumps(command) + "\n" for command in COMMANDS))

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    serving = Serving(Channel(commands, answers), "cpu", alone=alone, more=lambda: {"chosen": {"kernel": "XBLOCK=8"}})
    for _ in serving.calls:
        seen.append(inside[0])
    assert seen == [False] + [True] * 5 + [False] * 3
    rows = [json.loads(line)["row"] for line in answers.getvalue().splitlines()]
    assert len(rows) == 4
    assert rows[-1]["chosen"] == {"kernel": "XBLOCK=8"}
