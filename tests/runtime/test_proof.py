"""Kernels that are proven: which captures need no second one and no comparison, and which do."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph import cache
from pygraph.errors import CaptureError, ReplayError
from pygraph.program.default import DEFAULT_PASSES, as_captured
from pygraph.program.program import Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, PythonCall, UnownedAddress, UnownedMemory
from pygraph.program.steps import WORTHWHILE
from pygraph.runtime.life import Lives
from pygraph.runtime.proof import Proof
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import Region
from pygraph.runtime.slots import SlotTable, discover
from pygraph.runtime.variants import State, Variant
from tests.runtime.captures import Capture, reads, writes
from tests.runtime.fake import FakeDriver, Function, double, make

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
HERE, ELSEWHERE, WEIGHTS = 0x7F00_0000_0000, 0x6600_0000_0000, 0x5500_0000_0000


def sized(base: int, n: int, *extra: int, **facts: Any) -> Capture:
    """A launch with the addresses of an input and an intermediate, the number ``n``, and ``extra``."""
    capture = Capture(base)
    x, y = capture.input(8 * n), capture.pool(8 * n)
    uses = [reads(0, 4 * n), writes(1, 8 * n)]
    capture.launch(*facts.pop("words", (x + 4 * n, y, n, *extra)), **{"uses": uses, **facts})
    return capture


def proof_of(build: Callable[[int], Capture]) -> Proof:
    """A proof by a right replay of ``build``."""
    first, second = build(ELSEWHERE).recording(), build(WEIGHTS).recording()
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    proof = Proof()
    proof.add(as_captured(first, table.slots, non_pointers=table.non_pointers))
    return proof


@pytest.mark.parametrize(
    ("again", "resolved"),
    [
        (sized(HERE, 32, 1), True),
        (sized(HERE, 32, 0x3004), True),
        (sized(HERE, 32, HERE + 4), False),
        (sized(HERE, 32), False),
        (sized(HERE, 32, 1, name="other"), False),
        (sized(HERE, 32, 1, code="compiled otherwise"), False),
        (sized(HERE, 32, words=(HERE + 128, 5, 32, 1)), False),
    ],
)
def test_slots_are_found_again_at_another_size(again: Capture, resolved: bool) -> None:
    """Not where a number became an address, or an address a number or anybody else's, and of no other kernel."""
    proof = proof_of(lambda base: sized(base, 8, 1))
    found = proof.resolve(again.recording())
    if not resolved:
        assert found is None
        return
    assert found is not None
    assert found.slots == (Slot(0, 0, INPUT, 0, 128), Slot(0, 1, POOL, 0, 0))
    others = [Allocation(INPUT, 0, 0x3000, 64)]
    assert (proof.resolve(again.recording(), others) is None) == (again.launches[0].words[3] == 0x3004)
    again.launch(1)
    assert proof.resolve(again.recording()) is None


@pytest.mark.parametrize(
    ("numbers", "reach", "resolved"),
    [
        ((5, 0, 1 << 40), {(INPUT, 0), (POOL, 0)}, True),
        ((5, HERE - (1 << 20)), {(INPUT, 0), (POOL, 0)}, False),
        ((5, HERE + (1 << 20)), {(INPUT, 0), (POOL, 0)}, False),
        ((5,), {(INPUT, 0)}, False),
        ((5,), None, False),
    ],
)
def test_a_new_kernel_of_a_known_operator_is_captured_once_and_compared(
    numbers: tuple[int, ...], reach: set[tuple[AllocationKind, int]] | None, resolved: bool
) -> None:
    """Not where a word lies near the capture's memory, nor where it points to what its call cannot use."""
    proof = proof_of(lambda base: sized(base, 8))
    again = sized(HERE, 32, *numbers, name="other", may_access=None if reach is None else frozenset(reach)).recording()
    found = proof.resolve(again)
    assert (found is not None) == resolved
    if found is not None:
        assert found.slots == (Slot(0, 0, INPUT, 0, 128), Slot(0, 1, POOL, 0, 0))
        assert not proof.covers(as_captured(again, found.slots))
    assert Proof().resolve(again) is None


def test_an_operand_may_be_missing_where_it_was_missing_before() -> None:
    """A null pointer proves nothing of an address that is not found in the same place."""

    def build(base: int, second: int = 0) -> Capture:
        capture = Capture(base)
        x, y = capture.input(64), capture.input(64)
        capture.launch(x, y)
        capture.launch(x, second)
        return capture

    proof = proof_of(build)
    assert proof.resolve(build(HERE).recording()) is not None
    assert proof.resolve(build(HERE, 0x1234).recording()) is None


def scratched(base: int, n: int = 8, word: int = 0) -> Capture:
    """A launch of an operator's with a third word: a number, or where memory of somebody's begins."""
    memory = UnownedAddress(2, UnownedMemory.BLOCK, "of a tensor")
    capture = Capture(base)
    x, y = capture.input(8 * n), capture.pool(8 * n)
    known = frozenset({(INPUT, 0), (POOL, 0)})
    uses = [reads(0, 8 * n), writes(1, 8 * n)]
    capture.launch(x, y, word, uses=uses, call="aten.op", may_access=known, unowned=(memory,) if word else ())
    return capture


@pytest.mark.parametrize("compared", [0, 0x2000_0000_0000])
def test_a_word_that_scratch_memory_replaces_is_compared_first(compared: int) -> None:
    """Only a comparison shows whether it is used: where it was null, that has shown nothing."""
    proof = proof_of(lambda base: scratched(base, word=compared))
    again = scratched(HERE, 32, 0x3000_0000_0000).recording()
    found = proof.resolve(again)
    assert found is not None
    assert [word.scratch for word in found.non_pointers] == [True]
    assert proof.covers(as_captured(again, found.slots, non_pointers=found.non_pointers)) == bool(compared)


def chain(base: int, n: int = 8, *, swapped: bool = False, order: str = "program", **facts: Any) -> Program:
    """``x ▸ a, x ▸ b, (a, b) ▸ y``, of one kernel; ``swapped``: ``x ▸ a, a ▸ b, (x, b) ▸ y``."""

    def capture(base: int) -> Capture:
        made = Capture(base)
        x = made.input(8 * n)
        a, b, y = (made.pool(8 * n) for _ in range(3))
        given = [(x, x, a), (a, a, b) if swapped else (x, x, b), (x, b, y) if swapped else (a, b, y)]
        for words in given:
            made.launch(*words, uses=[reads(0, 8 * n), reads(1, 8 * n), writes(2, 8 * n)], **facts)
        made.fresh(2)
        return made

    first, second = capture(base).recording(), capture(base + 0x10_0000_0000).recording()
    table = discover(first, second)
    assert isinstance(table, SlotTable)
    return DEFAULT_PASSES(as_captured(first, table.slots), order)


def test_launches_that_depend_on_each_other_otherwise_are_compared() -> None:
    proof = Proof()
    proof.add(chain(HERE))
    assert proof.covers(chain(ELSEWHERE, 32))
    assert not proof.covers(chain(ELSEWHERE, 32, swapped=True))
    assert not proof.covers(chain(ELSEWHERE, 32, order="dependences"))
    proof.add(chain(HERE, order="dependences"))
    assert proof.covers(chain(ELSEWHERE, 32, order="dependences"))


@pytest.mark.parametrize("fact", [{"uses": None}, {"name": "other"}, {"code": "other"}])
def test_what_is_unknown_is_never_proven(fact: dict[str, Any]) -> None:
    program, proof = chain(HERE), Proof()
    launches = (replace(program.recording.launches[0], **fact), *program.recording.launches[1:])
    unlike = replace(program, recording=replace(program.recording, launches=launches))
    proof.add(unlike if "uses" in fact else program)
    assert not proof.covers(unlike)


def test_what_is_written_in_python_is_always_compared() -> None:
    program, proof = chain(HERE), Proof()
    written = replace(program, recording=replace(program.recording, python=(PythonCall("mine.op"),)))
    proof.add(written)
    assert not proof.covers(written)


# -- the life of a region ----------------------------------------------------------------------------------------------


def test_a_proven_size_is_answered_by_its_first_replay() -> None:
    region, driver = make()
    driver.code = "toy"
    for _ in range(2):
        region([torch.ones(4), 4])
    assert [executable.replays for executable in driver.executables] == [1]
    for _ in range(2):
        assert torch.equal(region([torch.ones(6), 4])[0], torch.full((6,), 6.0))
    assert [executable.replays for executable in driver.executables] == [1, 1]
    assert (region.record.captures, region.record.proven, region.record.uncaptured) == (2, 1, 3)


@pytest.mark.parametrize("verify_every", [1, 5])
def test_all_captures_are_compared_where_replays_are_verified(verify_every: int) -> None:
    region, driver = make(verify_every=verify_every)
    driver.code = "toy"
    for size in (4, 6):
        for _ in range(2):
            region([torch.ones(size), 4])
    assert (region.record.captures, region.record.proven) == (2, 0)


def test_what_a_wrong_replay_contained_is_not_proven() -> None:
    region, driver = make()
    driver.code = "toy"
    driver.kernel = lambda args: [args[0] * 3]
    for _ in range(2):
        region([torch.ones(4), 4])
    assert region.record.refusals
    assert not region._lives._proof._addresses


def test_a_proven_capture_that_declines_leaves_the_call_to_an_uncaptured_run() -> None:
    region, driver = make()
    driver.code = "toy"
    for _ in range(2):
        region([torch.ones(4), 4])
    driver.declines = lambda args: args[0].numel() == 6
    for _ in range(2):
        assert torch.equal(region([torch.ones(6), 4])[0], torch.full((6,), 6.0))
    assert (region.record.proven, region.record.replays) == (1, 0)


def test_a_capture_that_another_thread_frees_before_its_first_replay_leaves_the_call_to_an_uncaptured_run() -> None:
    region, driver = make()
    driver.code = "toy"
    lines, first = inspect.getsourcelines(Lives._replayed)
    at = first + next(number for number, line in enumerate(lines) if "replay(args)" in line)
    freed: list[int] = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is Lives._replayed.__code__ and frame.f_lineno == at:
            freed.append(region.release())
        return trace

    calls(region, 4, 4, 6)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        calls(region, 6)
    finally:
        sys.settrace(before)
    assert freed[0] == 2
    assert region.record.replays == 0


def baked(capture: Capture) -> None:
    """The address of the argument is a number."""
    launch = capture.launches[0]
    capture.launches[0] = replace(launch, words=(7, *launch.words[1:]))


def swapped(capture: Capture) -> None:
    """The launch is given the intermediate for the argument."""
    launch = capture.launches[0]
    capture.launches[0] = replace(launch, words=(launch.words[-1], *launch.words[1:]))


def shrunk(capture: Capture) -> None:
    """The intermediate is smaller than what is written to it."""
    capture.allocations[-1] = replace(capture.allocations[-1], nbytes=32)


def unlike(capture: Capture) -> None:
    """A kernel of that name is compiled otherwise."""
    capture.launches[0] = replace(capture.launches[0], code="other")


@pytest.mark.parametrize("edit", [baked, swapped, shrunk, unlike])
def test_a_third_size_that_is_captured_wrongly_is_never_taken_for_proven(edit: Callable[[Capture], None]) -> None:
    region, driver = make()
    driver.code = "toy"
    for size in (4, 6):
        for _ in range(2):
            region([torch.ones(size), 4])
    assert region.record.proven == 1
    driver.edits = [edit] * 4
    driver.kernel = lambda args: [args[0] * 3]
    for _ in range(4):
        assert torch.equal(region([torch.ones(8), 4])[0], torch.full((8,), 6.0))
    assert (region.record.captures, region.record.proven) == (2, 1)
    assert region.record.refusals


# -- what a later process does with it ---------------------------------------------------------------------------------


def process(folder: Path, code: str = "toy", *, fn: Function = double, **options: Any) -> tuple[Region, FakeDriver]:
    """A region as a new process has it, which knows but what is in ``folder``."""
    region, driver = make(fn, cache_dir=str(folder), **options)
    driver.code = code
    return region, driver


def calls(region: Region, *sizes: int) -> None:
    for size in sizes:
        assert torch.equal(region([torch.ones(size), 4])[0], torch.full((size,), 6.0))


def test_a_later_process_captures_once_at_its_first_call_and_replays_the_second(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, driver = process(tmp_path)
    calls(region, 4)
    assert (region.record.captures, region.record.proven, region.record.uncaptured) == (1, 1, 1)
    assert driver.captures == 1
    calls(region, 4, 6, 6)
    assert (region.record.replays, region.record.uncaptured) == (2, 2)
    assert [executable.replays for executable in driver.executables] == [1, 1]


def test_a_later_process_with_other_kernels_compares(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, _ = process(tmp_path, "compiled otherwise")
    calls(region, 4)
    assert (region.record.captures, region.record.uncaptured) == (0, 1)
    calls(region, 4, 4)
    assert (region.record.captures, region.record.proven, region.record.replays) == (1, 0, 1)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"kernels": [["x", [["y"]]]], "structures": []}', b'{"kernels": 1}'])
def test_a_file_that_says_nothing_proves_nothing(tmp_path: Path, content: bytes) -> None:
    calls(process(tmp_path)[0], 4, 4)
    (file,) = (tmp_path / "proofs").iterdir()
    cache.store(file, content)
    region, _ = process(tmp_path)
    calls(region, 4, 4, 4)
    assert (region.record.captures, region.record.proven, region.record.replays) == (1, 0, 1)


@pytest.mark.parametrize("options", [{"verify_every": 1}, {"verify_every": 7}, {"capture_after": 3}])
def test_options_hold_for_what_is_known(tmp_path: Path, options: dict[str, int]) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, _ = process(tmp_path, **options)
    calls(region, 4)
    assert region.record.captures == 0
    calls(region, 4, 4)
    assert region.record.captures == 1
    assert region.record.proven == (0 if "verify_every" in options else 1)


def test_large_arguments_that_the_caller_gives_away_are_not_held_for_it(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, _ = process(tmp_path)
    large = WORTHWHILE // 4 + 1
    calls(region, large)
    assert region.record.captures == 0
    calls(region, large)
    assert (region.record.captures, region.record.proven) == (1, 1)


def test_a_wrong_replay_takes_back_what_was_proven_for_later_processes(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, driver = process(tmp_path, verify_every=1)
    calls(region, 4, 4)
    driver.kernel = lambda args: [args[0] * 3]
    with pytest.raises(ReplayError):
        calls(region, 4)
    later, _ = process(tmp_path)
    calls(later, 4, 4)
    assert (later.record.captures, later.record.proven) == (1, 0)


def test_what_was_wrong_is_not_kept_again_by_a_process_that_had_read_it(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    reader, driver = process(tmp_path, "other")
    calls(reader, 4)
    wrong, _ = process(tmp_path)
    calls(wrong, 4)
    wrong._lives.retire(Refusal("comparison-failed"))
    calls(reader, 4, 4)
    assert (reader.record.captures, reader.record.proven) == (1, 0)
    driver.code = "toy"
    calls(reader, 6, 6)
    assert (reader.record.captures, reader.record.proven) == (2, 0)
    later, _ = process(tmp_path)
    calls(later, 4, 4)
    assert (later.record.captures, later.record.proven) == (1, 0)


def test_captures_that_fail_take_nothing_back(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    failing, driver = process(tmp_path)
    driver.refuses = CaptureError("unknown-kernel", "it is not known")
    for size in (4, 6, 8):
        calls(failing, size, size, size)
    assert failing._lives.left is not None
    later, _ = process(tmp_path)
    calls(later, 4)
    assert later.record.proven == 1


def test_a_wrong_replay_is_the_last_one_even_if_the_file_cannot_be_removed(tmp_path: Path) -> None:
    region, driver = process(tmp_path, verify_every=2)
    calls(region, 4, 4, 4)
    (file,) = (tmp_path / "proofs").iterdir()
    file.unlink()
    file.mkdir()
    driver.kernel = lambda args: [args[0] * 3]
    with pytest.raises(ReplayError):
        calls(region, 4, 4)
    calls(region, 4, 4)
    assert region.captures() == []


def test_what_is_known_is_not_captured_early_after_the_odd_replay_of_another_size(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, _ = process(tmp_path)
    args = [torch.ones(4), 4]
    region._lives.meet(args)
    region._lives._odd = Variant((), (), 1), b""
    calls(region, 4)
    assert region.record.captures == 0
    calls(region, 4)
    assert (region.record.captures, region.record.proven) == (1, 0)


def test_a_region_that_is_closed_takes_nothing_back(tmp_path: Path) -> None:
    region, _ = process(tmp_path)
    calls(region, 4, 4)
    region.close()
    later, _ = process(tmp_path)
    calls(later, 4)
    assert later.record.proven == 1


def test_a_capture_of_what_is_known_that_fails_is_made_again_as_ever(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, driver = process(tmp_path)
    driver.refuses = CaptureError("driver-error", "busy")
    calls(region, 4)
    assert (region.record.captures, region.record.refusals) == (0, {})
    assert region.record.state is State.WARM
    driver.refuses = None
    calls(region, 4)
    assert (region.record.captures, region.record.proven) == (1, 1)


def test_captures_make_room_where_a_call_that_is_to_be_captured_is_short_of_memory(tmp_path: Path) -> None:
    def short(args: list[Any]) -> Any:
        raise torch.OutOfMemoryError

    calls(process(tmp_path)[0], 4, 4)
    other, _ = make()
    calls(other, 4, 4)
    region, _ = process(tmp_path)
    region._lives._run = short
    with pytest.raises(torch.OutOfMemoryError):
        calls(region, 4)
    assert other.captures() == []


def test_what_watches_operators_sees_the_run_and_not_the_capture(tmp_path: Path) -> None:
    calls(process(tmp_path)[0], 4, 4)
    region, _ = process(tmp_path)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(4)
    with Watch():
        (result,) = region([x, 4])
    assert torch.equal(result, torch.full((4,), 6.0))
    assert region.record.captures == 1
    assert seen.count("aten.mul.Tensor") == 1


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=40))
def test_processes_that_share_a_folder_never_use_a_kernel_that_nobody_compared(steps: list[tuple[int, int]]) -> None:
    """Two have the same kernels, one has others. A process may end at any time: it is begun anew with size 4."""
    with TemporaryDirectory() as folder:
        codes = ("toy", "toy", "other")
        regions = [process(Path(folder), code) for code in codes]
        compared: set[str] = set()
        for index, size in steps:
            if size == 4:
                regions[index] = process(Path(folder), codes[index])
            region, driver = regions[index]
            before = region.record.captures, region.record.proven
            calls(region, size)
            if (captures := region.record.captures - before[0]) > region.record.proven - before[1]:
                compared.add(codes[index])
            assert not captures or codes[index] in compared
            assert driver.captures <= 2 * region.record.captures + 2
