"""The launch that makes a replay wrong is named: every slot of real regions is shifted, and every word changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.errors import ReplayError
from pygraph.runtime.divergence import Finding, Suspect, diagnose
from pygraph.runtime.driver import Layout, Program, Slot
from pygraph.runtime.host import HostDriver
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.recording import AllocationKind
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.host.replays import make_program
from tests.runtime.programs import PROGRAMS, region_calls
from tests.runtime.regions import RegionCall, copy_arguments, same_bits

NOTHING = "no launch differs when each is run by itself"


def regions() -> list[tuple[str, int]]:
    """Every region of every program, by the program's name and its number there."""
    return [(name, number) for name in PROGRAMS for number in range({"read-back": 2, "train": 2}.get(name, 1))]


def region(name: str, number: int) -> RegionCall:
    with torch.enable_grad():
        return region_calls(name)[number][0]


def suspect(driver: HostDriver, call: RegionCall, program: Program, **facts: Any) -> Suspect:
    return Suspect(call.fn, driver, program, call.args, **{"budget": 1 << 30, **facts})


def found(driver: HostDriver, call: RegionCall, program: Program, **facts: Any) -> Finding:
    """The diagnosis, after which arguments and random state are what they were."""
    before, state = copy_arguments(call.args), torch.get_rng_state()
    finding = diagnose(suspect(driver, call, program, **facts))
    assert same_bits(call.args, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert finding is not None
    return finding


def shifted(program: Program, slot: Slot, distance: int) -> Program:
    slots = (replace(each, offset=each.offset + distance) if each is slot else each for each in program.slots)
    return replace(program, slots=tuple(slots))


def misread(program: Program, launch: int) -> Program:
    """``program`` in which a launch reads four bytes behind where it should: harmless to whoever replays it."""
    accesses = program.recording.launches[launch].accesses or ()
    words = [access.word for access in accesses if not access.writes]
    return shifted(program, next(s for s in program.slots if s.launch == launch and s.word in words), 4)


def is_right(driver: HostDriver, call: RegionCall, program: Program) -> bool:
    """Whether a replay does what the uncaptured region does."""
    theirs, ours, state = copy_arguments(call.args), copy_arguments(call.args), torch.get_rng_state()
    outputs = driver.instantiate(program).replay(ours)
    torch.set_rng_state(state)
    expected = call.run(theirs)
    torch.set_rng_state(state)
    return same_bits(outputs, expected) and same_bits(ours, theirs)


@pytest.mark.parametrize(("name", "number"), regions())
def test_nothing_is_found_in_a_right_program(driver: HostDriver, name: str, number: int) -> None:
    call = region(name, number)
    finding = found(driver, call, make_program(driver, call.fn, call.args))
    assert finding.launch is None
    assert finding.text.startswith(NOTHING)


@pytest.mark.parametrize(("name", "number"), regions())
def test_the_launch_with_a_wrong_slot_is_named(driver: HostDriver, name: str, number: int) -> None:
    call = region(name, number)
    program = make_program(driver, call.fn, call.args)
    named = 0
    for slot in program.slots:
        for distance in (64, 4):
            wrong = shifted(program, slot, distance)
            finding = found(driver, call, wrong)
            if finding.launch is None:
                assert is_right(driver, call, wrong), f"{slot} moved by {distance}: {finding.text}"
                continue
            assert finding.launch.index == slot.launch, f"{slot} moved by {distance}: {finding.text}"
            assert f"launch {slot.launch} of {len(program.recording.launches)}" in finding.text
            named += 1
    assert named > len(program.slots)


def test_what_is_written_wrongly_is_said(driver: HostDriver) -> None:
    call = region("mlp", 0)
    program = make_program(driver, call.fn, call.args)
    gelu = next(s for s in program.slots if s.launch == 1)
    finding = found(driver, call, shifted(program, gelu, 4))
    assert finding.launch is not None
    assert finding.text.startswith(
        f"launch 1 of 4 ({finding.launch.name}) is the first that differs: what it writes to"
    )
    assert "(float32[6, 12]) has " in finding.text
    assert " of 72 elements with other bits, off by up to " in finding.text


@pytest.mark.parametrize("name", ["scaled", "random", "branches"])
def test_the_launch_with_a_changed_scalar_is_named(driver: HostDriver, name: str) -> None:
    call = region(name, 0)
    program = make_program(driver, call.fn, call.args)
    payload: Any = program.recording.payload
    changed = 0
    for launch, kernel in zip(program.recording.launches, payload.launches, strict=True):
        parameters = kernel.parameters if isinstance(kernel, Kernel) else ()
        for position, parameter in enumerate(parameters):
            if parameter.is_pointer or parameter is Parameter.FLOAT:
                continue
            words = (*launch.words[:position], launch.words[position] - 1, *launch.words[position + 1 :])
            launches = (replace(e, words=words) if e is launch else e for e in program.recording.launches)
            wrong = replace(program, recording=replace(program.recording, launches=tuple(launches)))
            finding = found(driver, call, wrong)
            assert finding.launch is not None, finding.text
            assert finding.launch.index == launch.index
            changed += 1
    assert changed or name != "scaled"


def test_two_operands_that_were_exchanged(driver: HostDriver) -> None:
    call = region("reused", 0)
    program = make_program(driver, call.fn, call.args)
    launch = program.recording.launches[2]
    first, second = [slot for slot in program.slots if slot.launch == launch.index][:2]
    exchanged = {
        first: replace(second, word=first.word),
        second: replace(first, word=second.word),
    }
    finding = found(driver, call, replace(program, slots=tuple(exchanged.get(s, s) for s in program.slots)))
    assert finding.launch is not None
    assert finding.launch.index == launch.index


def overlapping(program: Program) -> Iterator[tuple[Program, int]]:
    """``program`` with one intermediate laid over another that is still needed, and the launch that it is born at."""
    offsets = program.layout.offsets
    pool = [slot for slot in program.slots if slot.kind is AllocationKind.POOL]
    first = {index: min(s.launch for s in pool if s.index == index) for index in offsets}
    last = {index: max(s.launch for s in pool if s.index == index) for index in offsets}
    for index in offsets:
        for other in offsets:
            if first[index] < first[other] < last[index]:
                moved = {**offsets, other: offsets[index]}
                layout = Layout(program.layout.nbytes + 4096, moved, program.layout.fresh)
                yield replace(program, layout=layout), first[other]


def test_intermediates_that_overlap(driver: HostDriver) -> None:
    call = region("branches", 0)
    cases = list(overlapping(make_program(driver, call.fn, call.args)))
    assert len(cases) > 3
    for wrong, born in cases:
        finding = found(driver, call, wrong)
        assert finding.launch is not None
        assert finding.launch.index == born, finding.text
        assert "in bytes of the workspace that allocation" in finding.text


def test_a_launch_that_runs_too_early(driver: HostDriver) -> None:
    call = region("mlp", 0)
    program = make_program(driver, call.fn, call.args)
    finding = found(driver, call, replace(program, order=(0, 2, 1, 3)))
    assert finding.launch is not None
    assert finding.launch.index == 2
    assert "runs before launch 1" in finding.text


def test_the_first_of_several_is_named(driver: HostDriver) -> None:
    call = region("branches", 0)
    wrong = make_program(driver, call.fn, call.args)
    for launch in (11, 4, 7):
        wrong = shifted(wrong, next(s for s in wrong.slots if s.launch == launch), 64)
    finding = found(driver, call, wrong)
    assert finding.launch is not None
    assert finding.launch.index == 4


def test_too_little_room_is_said(driver: HostDriver) -> None:
    call = region("mlp", 0)
    finding = found(driver, call, make_program(driver, call.fn, call.args), budget=100)
    assert finding.launch is None
    assert finding.text.startswith("which launch differs was not looked for: ")
    assert finding.text.endswith("bytes exceed the budget of 100")


def test_an_uncaptured_run_that_does_other_things_is_said(driver: HostDriver) -> None:
    call, other = region("mlp", 0), region("reused", 0)
    program = make_program(driver, other.fn, other.args)
    text = found(driver, call, program).text
    assert text.startswith("which launch differs could not be found out: CaptureError: unstable-launches: launch 0 is ")


def test_a_driver_that_cannot_step_is_not_asked() -> None:
    driver: Any = object()
    assert diagnose(Suspect(lambda args: args, driver, None, [], 1 << 30)) is None


class Case:
    """A region that verifies each replay, with a fault put into its capture once it is replayed."""

    def __init__(self, name: str) -> None:
        self.call, self.driver = region(name, 0), HostDriver()
        self.region = Region(self.call.fn, self.driver, name="real", options=RegionOptions(verify_always=True))
        for seed in range(3):
            self.region(self.call.fresh(seed))
        assert self.region.record.replays == 1

    def break_slot(self, launch: int) -> None:
        key: Any = self.region._key
        (variant,) = self.region._variants.under(key.of(self.call.args))
        program = make_program(self.driver, self.call.fn, self.call.args)
        variant.program = misread(program, launch)
        variant.executable = self.driver.instantiate(variant.program)


@pytest.mark.parametrize(("name", "launch"), [("mlp", 2), ("branches", 8), ("random", 1), ("cache", 0)])
def test_verify_always_names_the_launch(name: str, launch: int) -> None:
    case = Case(name)
    case.break_slot(launch)
    expected = rf"^region real: a replay differs from an uncaptured run: .*; launch {launch} of \d+ \(.+\) "
    with pytest.raises(ReplayError, match=expected):
        case.region(case.call.fresh(5))
    assert f"launch {launch} of " in str(case.region.record.reason)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """A driver whose replays misread an operand of launch 6."""
    driver = HostDriver()
    right = driver.instantiate

    def instantiate(self: HostDriver, program: Program) -> Any:
        object.__setattr__(program, "slots", misread(program, 6).slots)
        return right(program)

    monkeypatch.setattr(HostDriver, "instantiate", instantiate)
    return driver


def test_a_refused_capture_leaves_no_memory_to_the_garbage_collector(faulty: HostDriver) -> None:
    call = region("branches", 0)
    case = Region(call.fn, faulty, name="real")
    case(call.fresh(0))
    gc.collect()
    gc.disable()
    try:
        held = tensor_bytes()
        case(call.fresh(1))
        assert tensor_bytes() == held
    finally:
        gc.enable()
    assert "comparison-failed" in case.record.refusals


def tensor_bytes() -> int:
    """Bytes of all dense tensors that are alive."""
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.nbytes for each in alive if each.layout is torch.strided)


def test_a_capture_that_is_refused_names_the_launch(faulty: HostDriver) -> None:
    call = region("branches", 0)
    case = Region(call.fn, faulty, name="real")
    for seed in range(2):
        theirs, state = call.fresh(seed), torch.get_rng_state()
        expected = call.run(theirs)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        ours = call.fresh(seed)
        assert same_bits(list(case(list(ours))), expected)
        assert same_bits(ours, theirs)
        assert torch.equal(torch.get_rng_state(), after)
    refusal = case.record.refusals["comparison-failed"]
    assert "; launch 6 of 15 " in refusal.detail
    assert refusal.launch is not None
    assert f"({refusal.launch})" in refusal.detail
