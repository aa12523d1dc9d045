"""Exceptions from outside while a region is captured, compared or replayed on a device: nothing captures afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pygraph.compat import dispatch_mode_depth
from pygraph.runtime.contract import Driver
from pygraph.runtime.critical import capturing
from pygraph.runtime.region import Region, RegionOptions
from tests.gpu.replays import assert_replays
from tests.runtime.regions import copy_arguments, same_bits
from tests.runtime.test_interrupts import LATER, Line, Lines


def program(args: list[Any]) -> Any:
    """Mutates an argument, draws, and calls libraries."""
    x, keys = args
    args.clear()
    keys.mul_(0.5).add_(x)
    return torch.softmax(x @ keys, -1), torch.rand_like(x) + keys


def arguments(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(32, 32, device="cuda", generator=generator) for _ in range(2)]


def due_region(driver: Driver) -> Region:
    region = Region(program, driver, name="interrupted", options=RegionOptions())
    region(arguments(0))
    return region


def outcome(args: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """The results of one uncaptured run, the arguments as it leaves them, and the generator's state after it; ``args``
    and the generator are not changed."""
    copies, state = copy_arguments(args), torch.cuda.get_rng_state()
    outputs = list(program(list(copies)))
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    return outputs, copies, after


def problems(driver: Driver, lines: Lines) -> Iterator[str]:
    region, stream, raised = due_region(driver), torch.cuda.current_stream(), False
    for seed in (1, 2):
        args = arguments(seed)
        before, state = copy_arguments(args), torch.cuda.get_rng_state()
        outputs, left, after = outcome(args)
        try:
            ours = lines.run(region, list(args))
        except lines.error:
            raised = True
        now = torch.cuda.get_rng_state()
        ran = same_bits(args, left) and torch.equal(now, after)
        if not ran and not (raised and same_bits(args, before) and torch.equal(now, state)):
            yield "arguments or random state are neither as before nor as after one run"
        if not raised and not same_bits(list(ours), outputs):
            yield "the answer is wrong"
        if torch.cuda.is_current_stream_capturing() or torch.cuda.current_stream() != stream:
            yield "the current stream is another one, or captures"
        if dispatch_mode_depth() or capturing:
            yield "a mode or the turn to capture is left"
            capturing.clear()
    torch.cuda.synchronize()
    for seed in range(LATER):
        args = arguments(seed)
        outputs, left, after = outcome(args)
        ours = region(list(args))
        state = torch.cuda.get_rng_state()
        if not (same_bits(list(ours), outputs) and same_bits(args, left) and torch.equal(state, after)):
            yield "a later call is wrong"
    if not region.record.replays:
        yield f"not replayed later: {region.record.reason}"
    region.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_at_any_line_leaves_the_device_usable(driver: Driver, error: type[BaseException]) -> None:
    lines, region = Lines(), due_region(driver)
    for seed in (1, 2):
        lines.run(region, arguments(seed))
    assert region.record.replays == 1, region.record
    wrong: dict[str, list[Line]] = {}
    for line in list(lines.met)[::9]:
        for problem in problems(driver, Lines(line, error)):
            wrong.setdefault(problem, []).append(line)
    assert not wrong


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_region_that_is_interrupted_while_captured_is_captured_next_time(
    driver: Driver, error: type[BaseException]
) -> None:
    interrupted: list[int] = []

    def region(args: list[Any]) -> Any:
        y = args[0] * 2
        if torch.cuda.is_current_stream_capturing() and not interrupted:
            interrupted.append(1)
            raise error
        return (y + torch.rand_like(y),)

    x = torch.randn(64, device="cuda")
    with pytest.raises(error):
        driver.capture(region, [x])
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(torch.ones(4, device="cuda") + 1, torch.full((4,), 2.0, device="cuda"))
    assert_replays(driver, region, [x])
