"""The launch that makes a replay wrong is named: every slot of real regions is shifted, and words are changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.debug.diagnose import Finding, diagnose
from pygraph.errors import CaptureError, ReplayError
from pygraph.runtime.contract import Layout, Program, Slot
from pygraph.runtime.host import HostDriver
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.recording import AllocationKind
from pygraph.runtime.region import Region, RegionOptions
from tests.runtime.host.replays import make_program
from tests.runtime.programs import region_calls
from tests.runtime.regions import RegionCall, copy_arguments, same_bits

NAMES = ["mlp", "reused", "random", "cache"]


def region(name: str) -> RegionCall:
    with torch.enable_grad():
        return region_calls(name)[0][0]


def found(driver: HostDriver, call: RegionCall, program: Program) -> Finding:
    """The diagnosis, after which arguments and random state are what they were."""
    before, state = copy_arguments(call.args), torch.get_rng_state()
    finding = diagnose(call.fn, driver, program, call.args)
    assert same_bits(call.args, before)
    assert torch.equal(torch.get_rng_state(), state)
    return finding


def named(driver: HostDriver, call: RegionCall, program: Program) -> int:
    """The launch that is found to be wrong."""
    finding = found(driver, call, program)
    assert finding.launch is not None, finding.text
    assert not finding.right
    assert f"launch {finding.launch.index} of {len(program.recording.launches)} ({finding.launch.name}" in finding.text
    return finding.launch.index


def shifted(program: Program, slot: Slot, distance: int) -> Program:
    slots = (replace(each, offset=each.offset + distance) if each is slot else each for each in program.slots)
    return replace(program, slots=tuple(slots))


def misread(program: Program, launch: int) -> Program:
    """``program`` in which a launch reads four bytes behind where it should: harmless to whoever replays it."""
    uses = program.recording.launches[launch].uses or ()
    words = [access.word for access in uses if not access.writes]
    return shifted(program, next(s for s in program.slots if s.launch == launch and s.word in words), 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_launch_with_a_wrong_slot_is_named(driver: HostDriver, name: str) -> None:
    call = region(name)
    program = make_program(driver, call.fn, call.args)
    finding = found(driver, call, program)
    assert finding.right
    assert finding.launch is None
    for slot in program.slots:
        assert named(driver, call, shifted(program, slot, 4)) == slot.launch
        others = tuple(each for each in program.slots if each is not slot)
        assert named(driver, call, replace(program, slots=others)) == slot.launch


def test_a_number_that_changes_is_named_although_it_may_not_matter(driver: HostDriver) -> None:
    call = region("scaled")
    program = make_program(driver, call.fn, call.args)
    payload: Any = program.recording.payload
    changed = 0
    for launch, kernel in zip(program.recording.launches, payload.payloads, strict=True):
        parameters = kernel.parameters if isinstance(kernel, Kernel) else ()
        for position in (i for i, each in enumerate(parameters) if each is Parameter.INTEGER):
            words = (*launch.words[:position], launch.words[position] - 1, *launch.words[position + 1 :])
            launches = (replace(e, words=words) if e is launch else e for e in program.recording.launches)
            recording = replace(program.recording, launches=tuple(launches))
            finding = found(driver, call, replace(program, recording=recording))
            assert finding.launch is not None
            assert finding.launch.index == launch.index
            assert finding.right
            assert "is another number in each capture" in finding.text
            changed += 1
    assert changed


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
    call = region("branches")
    cases = list(overlapping(make_program(driver, call.fn, call.args)))
    assert len(cases) > 3
    for wrong, born in cases:
        assert named(driver, call, wrong) == born


def test_the_first_of_several_is_named(driver: HostDriver) -> None:
    call = region("branches")
    wrong = make_program(driver, call.fn, call.args)
    for launch in (11, 4, 7):
        wrong = shifted(wrong, next(s for s in wrong.slots if s.launch == launch), 64)
    assert named(driver, call, wrong) == 4


def test_what_cannot_be_found_out_is_said(driver: HostDriver) -> None:
    call, other = region("mlp"), region("reused")
    text = found(driver, call, make_program(driver, other.fn, other.args)).text
    assert "unstable-launches" in text

    class Refusing:
        def capture(self, *_: Any) -> Any:
            raise CaptureError("capture-busy", "now")

    refusing: Any = Refusing()
    finding = diagnose(call.fn, refusing, make_program(driver, call.fn, call.args), call.args)
    assert finding == Finding("which launch differs could not be found out: CaptureError: capture-busy: now")


def test_verify_always_names_the_launch() -> None:
    call, driver = region("mlp"), HostDriver()
    checked = Region(call.fn, driver, name="real", options=RegionOptions(verify_always=True))
    for seed in range(3):
        checked(call.fresh(seed))
    assert checked.record.replays == 1
    key: Any = checked._key
    (variant,) = checked._variants.under(key.of(call.args))
    variant.program = misread(make_program(driver, call.fn, call.args), 2)
    variant.executable = driver.instantiate(variant.program)
    expected = r"^region real: a replay differs from an uncaptured run: .*; launch 2 of \d+ \(.+\)"
    with pytest.raises(ReplayError, match=expected):
        checked(call.fresh(5))
    assert "launch 2 of " in str(checked.record.reason)


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


def tensor_bytes() -> int:
    """Bytes of all dense tensors that are alive."""
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.nbytes for each in alive if each.layout is torch.strided)


def test_a_refused_capture_leaves_no_memory_to_the_garbage_collector(faulty: HostDriver) -> None:
    call = region("branches")
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


def test_a_capture_that_is_refused_names_the_launch(faulty: HostDriver) -> None:
    call = region("branches")
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
    assert f"({refusal.launch}" in refusal.detail
