"""What copies of inputs must not change: checks of executables on any device, which each driver's tests run.

A check takes a driver and a device, and fails by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from pygraph.runtime.capturing import Captured, capture
from pygraph.runtime.counters import RegionRecord
from pygraph.runtime.driver import Driver
from pygraph.runtime.options import RegionOptions
from pygraph.runtime.region import Region
from tests.runtime.regions import copy_arguments, same_bits

__all__ = [
    "CHECKS",
    "Check",
    "accumulate",
    "captured",
    "compare_replay",
    "measure",
    "moves_of",
    "new_arguments",
    "stage",
    "switches",
]

Check = Callable[[Any, torch.device], None]
Function = Callable[[list[Any]], Sequence[Any]]

SIZE = 64
LAUNCHES = 40
"""Launches of ``accumulate`` that read its first argument, at least: enough for each driver's cost of a copy."""


def accumulate(args: list[Any]) -> Sequence[Any]:
    """Reads its first argument many times and the second once, writes the third, returns views of the fourth."""
    x, bias, state, seen = args
    y = x * 2
    for _ in range(LAUNCHES):
        y = y + x
    state.add_(y)
    return y + bias, state, seen[1:], state * x


def new_arguments(device: torch.device, seed: int) -> list[Any]:
    """Arguments of ``accumulate``: nothing lies where it lay before as long as earlier ones are alive."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator).to(device, copy=True) for _ in range(4)]


def captured(driver: Driver, fn: Function, args: Sequence[Any]) -> Captured:
    """An executable for ``fn`` on ``args``, by the road that a region takes."""
    fn(list(copy_arguments(args)))
    made = capture(fn, driver, list(args), RegionOptions())
    assert isinstance(made, Captured), made
    return made


def compare_replay(driver: Driver, fn: Function, made: Captured, args: list[Any]) -> list[Any]:
    """Replay on ``args`` themselves, and hold that against an uncaptured run on arguments that overlap likewise."""
    theirs = _same_overlaps(args)
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    start = generator.get_state()
    expected = list(fn(list(theirs)))
    after = generator.get_state()
    generator.set_state(start)
    outputs = made.executable.replay(args)
    assert outputs is not None, "the replay turned its arguments away"
    assert same_bits(outputs, expected), "outputs differ from the uncaptured run's"
    assert same_bits(args, theirs), "arguments differ afterwards from the uncaptured run's"
    assert torch.equal(generator.get_state(), after), "the random state afterwards is another one"
    return outputs


def _same_overlaps(args: Sequence[Any]) -> list[Any]:
    """Copies of whole storages, so that what shared one still does."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: list[Any] = []
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            copies.append(arg)
            continue
        storage = arg.untyped_storage()
        clone = storages.setdefault(storage.data_ptr(), storage.clone())
        copy = torch.empty(0, dtype=arg.dtype, device=arg.device)
        copies.append(copy.set_(clone, arg.storage_offset(), arg.size(), arg.stride()))
    return copies


def moves_of(made: Captured, argument: int) -> int:
    executable: Any = made.executable
    return int(executable.moves()[argument])


def stage(made: Captured, *arguments: int) -> int | None:
    executable: Any = made.executable
    held: int | None = executable.stage(arguments)
    return held


# -- checks -----------------------------------------------------------------------------------------------------------


def copies_stand_for_inputs_that_move(driver: Driver, device: torch.device) -> None:
    made = captured(driver, accumulate, new_arguments(device, 0))
    assert [each.argument for each in made.stageable] == [0], made.stageable
    alive = [new_arguments(device, seed) for seed in range(8)]
    for args in alive[:2]:
        compare_replay(driver, accumulate, made, args)
    held = stage(made, 0)
    assert held is not None
    assert held == made.stageable[0].nbytes >= SIZE * 4
    compare_replay(driver, accumulate, made, alive[2])
    before = moves_of(made, 0), moves_of(made, 1)
    for args in alive[3:5]:
        compare_replay(driver, accumulate, made, args)
    assert (moves_of(made, 0), moves_of(made, 1)) == (before[0], before[1] + 2), "only the copied input is not patched"
    assert stage(made) == 0
    for args in alive[5:7]:
        compare_replay(driver, accumulate, made, args)
    assert moves_of(made, 0) == before[0] + 2
    made.executable.close()


def what_a_caller_writes_is_seen_by_the_next_replay(driver: Driver, device: torch.device) -> None:
    made = captured(driver, accumulate, new_arguments(device, 0))
    assert stage(made, 0)
    args = new_arguments(device, 1)
    kept = compare_replay(driver, accumulate, made, args)
    before = [out.clone() for out in kept]
    for turn in range(3):
        args[0].fill_(turn)
        compare_replay(driver, accumulate, made, args)
    assert torch.equal(kept[0], before[0]), "outputs of an earlier replay were written"
    made.executable.close()


def views_are_those_of_the_callers_tensor(driver: Driver, device: torch.device) -> None:
    made = captured(driver, lambda args: (args[0], args[0][1:], args[0] * 2), new_arguments(device, 0)[:1])
    assert made.stageable == ()
    assert stage(made, 0)
    (x,) = args = new_arguments(device, 1)[:1]
    outputs = made.executable.replay(args)
    assert outputs is not None
    assert outputs[0] is x
    assert outputs[1].data_ptr() == x[1:].data_ptr()
    assert torch.equal(outputs[2], x * 2)
    made.executable.close()


def an_input_that_shares_memory_with_a_written_one_is_not_copied(driver: Driver, device: torch.device) -> None:
    def region(args: list[Any]) -> Sequence[Any]:
        state, x = args
        state.add_(1)
        return (x * 2,)

    made = captured(driver, region, new_arguments(device, 0)[:2])
    assert stage(made, 1)
    base = torch.arange(4.0 * SIZE, device=device)
    for first, second in ((0, SIZE // 2), (SIZE, 0), (SIZE // 4, SIZE // 4), (0, 2 * SIZE)):
        compare_replay(driver, region, made, [base[first : first + SIZE], base[second : second + SIZE]])
    x = new_arguments(device, 1)[0]
    compare_replay(driver, region, made, [base[:SIZE], x])
    made.executable.close()


def a_misaligned_input_is_copied_once(driver: Driver, device: torch.device) -> None:
    made = captured(driver, accumulate, new_arguments(device, 0))
    base = torch.randn(SIZE + 8, device=device)
    _, *rest = new_arguments(device, 1)
    for staged in ((0,), (), (0,)):
        assert stage(made, *staged) is not None
        for offset in (1, 2, 4, 3):
            compare_replay(driver, accumulate, made, [base[offset : offset + SIZE], *rest])
    made.executable.close()


def an_input_that_the_region_copies_itself_is_no_exception(driver: Driver, device: torch.device) -> None:
    made = captured(driver, lambda args: (args[0].clone(), args[0] + 1), new_arguments(device, 0)[:1])
    alive = [new_arguments(device, seed)[:1] for seed in range(6)]
    for turn, args in enumerate(alive):
        assert stage(made, *([0] if turn % 3 else [])) is not None
        compare_replay(driver, lambda args: (args[0].clone(), args[0] + 1), made, args)
    made.executable.close()


def random_numbers_advance_as_uncaptured(driver: Driver, device: torch.device) -> None:
    def region(args: list[Any]) -> Sequence[Any]:
        return torch.rand_like(args[0]) + args[0], torch.nn.functional.dropout(args[0], 0.5)

    made = captured(driver, region, new_arguments(device, 0)[:1])
    for turn in range(4):
        assert stage(made, *([0] if turn % 2 else [])) is not None
        compare_replay(driver, region, made, new_arguments(device, turn)[:1])
    made.executable.close()


def what_must_not_be_copied_is_refused(driver: Driver, device: torch.device) -> None:
    made = captured(driver, lambda args: (args[0].add_(args[1]), args[2]), [*new_arguments(device, 0)[:2], 3])
    for wrong in ([0], [2], [1, 0], [9]):
        try:
            stage(made, *wrong)
        except (RuntimeError, IndexError):
            continue
        raise AssertionError(f"copies of {wrong} were accepted")
    assert stage(made, 1)
    made.executable.close()


def a_closed_executable_holds_nothing(driver: Driver, device: torch.device) -> None:
    made = captured(driver, accumulate, new_arguments(device, 0))
    assert stage(made, 0)
    made.executable.close()
    assert made.executable.replay(new_arguments(device, 1)) is None
    assert stage(made, 0) is None


def switches(driver: Driver, device: torch.device, seed: int, turns: int = 30) -> None:
    """Settings that change at random, between calls whose inputs stay, move, share memory and are written to."""
    random = Random(seed)
    made = captured(driver, accumulate, new_arguments(device, 0))
    base = torch.randn(8 * SIZE, generator=torch.Generator().manual_seed(seed)).to(device)
    alive = [new_arguments(device, 1)]
    for turn in range(turns):
        if random.random() < 0.4:
            assert stage(made, *random.choice([(), (0,), (1,), (0, 1)])) is not None
        args = list(random.choice(alive))
        if random.random() < 0.5:
            args = new_arguments(device, turn)
            alive = [*alive[-3:], args]
        if random.random() < 0.3:
            begin = 4 * random.randrange(SIZE)
            args[random.choice([0, 1])] = base[begin : begin + SIZE]
        if random.random() < 0.3:
            begin = 4 * random.randrange(SIZE // 4) + 6 * SIZE
            args[2] = base[begin : begin + SIZE]
        if random.random() < 0.3:
            args[random.choice([0, 1])].mul_(0.5)
        compare_replay(driver, accumulate, made, args)
    made.executable.close()


def measure(driver: Driver, device: torch.device, calls: int) -> RegionRecord:
    """Calls of a region under measured selection, each of which is right whatever is tried; then it is closed."""
    region = Region(accumulate, driver, name="many", options=RegionOptions(measure=True))
    alive = [new_arguments(device, seed) for seed in range(5)]
    for call in range(calls):
        args = alive[call % len(alive)]
        state = args[2].clone()
        expected = list(accumulate([*args[:2], state, args[3]]))
        outputs = region(list(args))
        assert torch.equal(args[2], state), f"call {call}: the written argument differs"
        assert same_bits(list(outputs), expected), f"call {call}: outputs differ"
        args[2].zero_()
    assert region.record.state == "replay", region.record
    region.close()
    return region.record


def settings_may_change_at_any_time(driver: Driver, device: torch.device) -> None:
    for seed in range(4):
        switches(driver, device, seed)


CHECKS: tuple[Check, ...] = (
    copies_stand_for_inputs_that_move,
    what_a_caller_writes_is_seen_by_the_next_replay,
    views_are_those_of_the_callers_tensor,
    an_input_that_shares_memory_with_a_written_one_is_not_copied,
    a_misaligned_input_is_copied_once,
    an_input_that_the_region_copies_itself_is_no_exception,
    random_numbers_advance_as_uncaptured,
    what_must_not_be_copied_is_refused,
    a_closed_executable_holds_nothing,
    settings_may_change_at_any_time,
)
