"""Captured regions against the same ones uncaptured: bits of outputs and arguments, random state, moved addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph.runtime.contract import Driver
from pygraph.runtime.discover import Captured, capture
from tests.runtime.regions import copy_arguments, same_bits

Function = Callable[[list[Any]], Sequence[Any]]


def captured(driver: Driver, fn: Function, args: Sequence[Any], order: str = "program") -> Captured:
    """An executable for ``fn`` on ``args``, by the same road that a region takes."""
    fn(list(copy_arguments(args)))
    torch.cuda.synchronize()
    made = capture(fn, driver, list(args), order=order)
    assert isinstance(made, Captured), made
    return made


def fresh_arguments(args: Sequence[Any], seed: int) -> list[Any]:
    """Copies of ``args`` at other addresses; floating ones get new values."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    copies = copy_arguments(args)
    for value in copies:
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.numel():
            value.copy_(torch.randn(value.shape, generator=generator, device=value.device).to(value.dtype))
    return copies


def replay_and_compare(driver: Driver, fn: Function, made: Captured, args: Sequence[Any]) -> list[Any]:
    """Replay on copies of ``args``: outputs, written arguments and random state are those of the uncaptured run."""
    theirs, ours = copy_arguments(args), copy_arguments(args)
    start = torch.cuda.get_rng_state()
    expected = list(fn(list(theirs)))
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(start)
    outputs = made.executable.replay(list(ours))
    assert outputs is not None, "the replay turned its arguments away"
    torch.cuda.synchronize()
    assert same_bits(outputs, expected)
    assert same_bits(ours, theirs)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    return outputs


def assert_replays(driver: Driver, fn: Function, args: Sequence[Any], *, keep_values: bool = False) -> Captured:
    """Capture, then replay three times with every address moved: earlier arguments and outputs stay alive, and
    memory of odd sizes is held in between, so that nothing returns to where it was."""
    made = captured(driver, fn, args)
    held: list[Any] = []
    for seed in range(3):
        again = copy_arguments(args) if keep_values else fresh_arguments(args, seed)
        held.append((again, replay_and_compare(driver, fn, made, again)))
        shift = made.program.layout.nbytes + 512 * (seed + 1)
        held.append(torch.full((shift,), 0xFF, dtype=torch.uint8, device="cuda"))
    made.executable.close()
    return made
