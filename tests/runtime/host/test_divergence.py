"""The launch that makes a replay wrong is named: every slot of real regions is shifted, and words are changed."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from pygraph.debug.diagnose import Finding, diagnose
from pygraph.errors import CaptureError, ReplayError
from pygraph.program.program import Program, Slot
from pygraph.runtime.contract import Executable
from pygraph.runtime.host import HostDriver
from pygraph.runtime.host.kernels import Kernel, Parameter
from pygraph.runtime.region import Region, RegionOptions
from pygraph.runtime.slots import SlotTable, sequence
from pygraph.runtime.variants import Checked
from tests.runtime.host.replays import make_program
from tests.runtime.programs import region_calls
from tests.runtime.regions import RegionCall, copy_arguments, same_bits


def region(name: str) -> RegionCall:
    with torch.enable_grad():
        return region_calls(name)[0][0]


UNVERIFIED = mock.patch("pygraph.runtime.host.driver.verify", new=id)
"""While open, programs are replayed that the verifier refuses."""


def found(driver: HostDriver, call: RegionCall, program: Program, launch: int | None) -> Finding:
    """The diagnosis, which is to name ``launch``. Arguments and random state are left what they were."""
    before, state = copy_arguments(call.args), torch.get_rng_state()
    finding = diagnose(call.fn, driver, program, call.args)
    assert same_bits(call.args, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (finding.launch and finding.launch.index) == launch, finding.text
    return finding


def wrong(driver: HostDriver, call: RegionCall, program: Program, launch: int) -> None:
    finding = found(driver, call, program, launch)
    assert not finding.right
    name = program.recording.launches[launch].name
    assert f"launch {launch} of {len(program.recording.launches)} ({name}" in finding.text


def shifted(program: Program, slot: Slot, distance: int) -> Program:
    moved = replace(slot, offset=slot.offset + distance)
    return replace(program, slots=tuple(moved if each is slot else each for each in program.slots))


def misread(program: Program, launch: int) -> Program:
    """``program`` in which a launch reads four bytes behind where it should: harmless to whoever replays it."""
    uses = program.recording.launches[launch].uses or ()
    words = [access.word for access in uses if not access.writes]
    return shifted(program, next(s for s in program.slots if s.launch == launch and s.word in words), 4)


@pytest.mark.parametrize("name", ["mlp", pytest.param("reused", marks=pytest.mark.sweep), "random", "cache"])
def test_the_launch_with_a_wrong_slot_is_named(driver: HostDriver, name: str) -> None:
    call = region(name)
    program = make_program(driver, call.fn, call.args)
    assert found(driver, call, program, None).right
    for slot in program.slots:
        wrong(driver, call, shifted(program, slot, 4), slot.launch)
        others = tuple(each for each in program.slots if each is not slot)
        wrong(driver, call, replace(program, slots=others), slot.launch)


def test_a_number_that_changes_is_named_although_it_may_not_matter(driver: HostDriver) -> None:
    call = region("scaled")
    program = make_program(driver, call.fn, call.args)
    recording: Any = program.recording
    changed = 0
    for launch, kernel in zip(recording.launches, recording.payload.payloads, strict=True):
        parameters = kernel.parameters if isinstance(kernel, Kernel) else ()
        for position in (i for i, each in enumerate(parameters) if each is Parameter.INTEGER):
            words = (*launch.words[:position], launch.words[position] - 1, *launch.words[position + 1 :])
            launches = tuple(replace(e, words=words) if e is launch else e for e in recording.launches)
            other = replace(program, recording=replace(recording, launches=launches))
            finding = found(driver, call, other, launch.index)
            assert finding.right
            assert "is another number in each capture" in finding.text
            changed += 1
    assert changed


@pytest.mark.parametrize(("name", "right"), [("_ZN2at6native6kernelEv", True), ("triton_poi_fused_0", False)])
def test_an_address_where_another_capture_has_a_number_may_be_unset_bytes_of_an_aten_kernel(
    driver: HostDriver, name: str, right: bool
) -> None:
    call = region("mlp")
    program = make_program(driver, call.fn, call.args)
    launches = tuple(replace(each, name=name) for each in program.recording.launches)
    program = replace(program, recording=replace(program.recording, launches=launches))
    lost, *others = sorted(program.slots, key=lambda slot: slot.launch)
    table = SlotTable(tuple(others), (), sequence(program.recording), ())
    with mock.patch("pygraph.debug.diagnose._captured_again", return_value=table):
        finding = found(driver, call, program, lost.launch)
    assert finding.right == right
    with mock.patch("pygraph.debug.diagnose._captured_again", return_value=replace(table, slots=program.slots)):
        assert not found(driver, call, replace(program, slots=table.slots), lost.launch).right, "an address is left out"


def test_the_first_of_several_is_named(driver: HostDriver) -> None:
    call = region("branches")
    program = make_program(driver, call.fn, call.args)
    for launch in (11, 4, 7):
        program = shifted(program, next(s for s in program.slots if s.launch == launch), 64)
    wrong(driver, call, program, 4)


def test_what_cannot_be_found_out_is_said(driver: HostDriver) -> None:
    call, other = region("mlp"), region("reused")
    assert "unstable-launches" in diagnose(call.fn, driver, make_program(driver, other.fn, other.args), call.args).text

    class Refusing:
        def capture(self, *_: Any) -> Any:
            raise CaptureError("capture-busy", "now")

    refusing: Any = Refusing()
    finding = diagnose(call.fn, refusing, make_program(driver, call.fn, call.args), call.args)
    assert finding == Finding("which launch differs could not be found out: CaptureError: capture-busy: now")


def test_verify_always_names_the_launch() -> None:
    call, driver = region("mlp"), HostDriver()
    checked = Region(call.fn, driver, name="real", options=RegionOptions(verify_every=1))
    for seed in range(3):
        checked(call.fresh(seed))
    assert checked.record.replays == 1
    key: Any = checked._lives.key
    (variant,) = checked._lives.table.under(key.of(call.args))
    program = misread(make_program(driver, call.fn, call.args), 2)
    with UNVERIFIED:
        variant.checked, variant.held = Checked(program, tolerant=False), (driver.instantiate(program),)
    expected = r"^region real: a replay differs from an uncaptured run: .*; launch 2 of \d+ \(.+\)"
    with pytest.raises(ReplayError, match=expected):
        checked(call.fresh(5))
    assert "launch 2 of " in str(checked.record.reason)


def tensor_bytes() -> int:
    """Bytes of all dense tensors that are alive."""
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.nbytes for each in alive if each.layout is torch.strided)


def test_a_capture_that_is_refused_names_the_launch_and_leaves_no_memory_to_the_garbage_collector() -> None:
    class Faulty(HostDriver):
        def instantiate(self, program: Program) -> Executable:
            object.__setattr__(program, "slots", misread(program, 6).slots)
            with UNVERIFIED:
                return super().instantiate(program)

    call = region("branches")
    case = Region(call.fn, Faulty(), name="real")
    case(call.fresh(0))
    gc.collect()
    gc.disable()
    try:
        held = tensor_bytes()
        case(call.fresh(1))
        assert tensor_bytes() == held
    finally:
        gc.enable()
    refusal = case.record.refusals["comparison-failed"]
    assert "; launch 6 of 15 " in refusal.detail
    assert refusal.launch is not None
    assert f"({refusal.launch}" in refusal.detail
