"""Copies of inputs on CUDA: the checks that each driver passes, streams, memory, and a measured region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pygraph.runtime import measuring
from pygraph.runtime.driver import Driver
from pygraph.runtime.selection.queue import TrialQueue
from tests.runtime.staged import (
    CHECKS,
    Check,
    accumulate,
    captured,
    compare_replay,
    measure,
    moves_of,
    new_arguments,
    stage,
)

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("staged", CHECKS, ids=lambda each: each.__name__)
def test_contract(driver: Driver, staged: Check) -> None:
    staged(driver, CUDA)


def powers(args: list[Any]) -> Sequence[Any]:
    """Takes the device so long that a replay that follows on another stream overlaps with it."""
    y = args[0]
    for _ in range(20):
        y = y @ args[0] * 0.01
    return (y,)


def test_on_another_stream_inputs_are_used_where_they_lie(driver: Driver) -> None:
    made = captured(driver, accumulate, new_arguments(CUDA, 0))
    held = stage(made, 0)
    assert held, "no memory for a copy of 256 bytes"
    alive = [new_arguments(CUDA, seed) for seed in range(1, 6)]
    for args in alive[:2]:
        compare_replay(driver, accumulate, made, args)
    before = moves_of(made, 0)
    compare_replay(driver, accumulate, made, alive[2])
    assert moves_of(made, 0) == before, "on the stream of its copies nothing is patched"
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compare_replay(driver, accumulate, made, alive[3])
    torch.cuda.current_stream().wait_stream(side)
    assert moves_of(made, 0) == before + 1, "on another one the address is patched"
    compare_replay(driver, accumulate, made, alive[4])
    assert moves_of(made, 0) == before + 2, "and back"
    torch.cuda.synchronize()
    made.executable.close()


def test_replays_on_two_streams_do_not_overwrite_each_others_inputs(driver: Driver) -> None:
    inputs = [torch.randn(512, 512, device=CUDA) for _ in range(4)]
    made = captured(driver, powers, inputs[:1])
    expected = [powers([x])[0] for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    held = stage(made, 0)
    assert held, "no memory for a copy of 1 MiB"
    results: list[tuple[int, torch.Tensor]] = []
    for turn in range(24):
        with torch.cuda.stream(streams[turn % 2]):
            outputs = made.executable.replay([inputs[turn % 4]])
            assert outputs is not None, f"turn {turn}: the replay turned its arguments away"
            results.append((turn, outputs[0]))
    torch.cuda.synchronize()
    wrong = [turn for turn, result in results if not torch.equal(result, expected[turn % 4])]
    assert not wrong, f"wrong results in turns {wrong} of 24"
    made.executable.close()


def test_memory_is_held_only_while_there_are_copies(driver: Driver) -> None:
    made = captured(driver, powers, [torch.randn(512, 512, device=CUDA)])
    x = torch.randn(512, 512, device=CUDA)
    for staged in ([0], []):
        stage(made, *staged)
        assert made.executable.replay([x]) is not None
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        held = stage(made, 0)
        assert held is not None
        assert held >= x.nbytes
        assert torch.cuda.memory_allocated() - before >= held
        assert made.executable.replay([x]) is not None
        assert stage(made) == 0
        assert made.executable.replay([x]) is not None
        assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == reserved
    assert stage(made, 0)
    made.executable.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


def test_nothing_is_switched_in_a_callers_own_capture(driver: Driver) -> None:
    made = captured(driver, accumulate, new_arguments(CUDA, 0))
    x = torch.ones(16, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert stage(made, 0) is None
        y = x * 3
    graph.replay()
    assert torch.equal(y, x * 3)
    assert stage(made, 0)
    compare_replay(driver, accumulate, made, new_arguments(CUDA, 1))
    made.executable.close()


def test_a_measured_region_tries_copies(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TRIALS", TrialQueue())
    record = measure(driver, CUDA, calls=400)
    assert not any("not copied" in note for note in record.notes), record.notes
    trial = record.trials[0]
    assert tuple(trial["candidates"]) == ("patched", "copied", "uncaptured"), trial
    assert "copied" in {block["candidate"] for block in trial["blocks"]}, trial
    assert record.staged_bytes == 0
