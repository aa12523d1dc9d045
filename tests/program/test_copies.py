"""Copies that are not needed: results are written where they would be copied to, and nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pygraph.program.copies import without_copies
from pygraph.program.default import DEFAULT_PASSES, undecided
from pygraph.program.program import NonPointerWord, Program, Slot
from pygraph.program.recording import Access, AllocationKind, Bytes, LaunchKind, Recording
from pygraph.program.verify import verify
from pygraph.runtime.discover import Captured, capture
from pygraph.runtime.host import HostDriver
from tests.runtime.captures import Capture, reads

INPUT, POOL = AllocationKind.INPUT, AllocationKind.POOL
SIZE = 64
Use = tuple[str, str]
"""An allocation, ``a`` and ``b`` arguments, ``x`` and ``y`` intermediates, perhaps a half, as ``x0`` or ``x1``; and
``r``, ``w`` or ``rw``."""

KEYS = {"a": (INPUT, 0), "b": (INPUT, 1), "x": (POOL, 0), "y": (POOL, 1)}


def place(name: str) -> tuple[Any, int, int]:
    """Allocation, offset and bytes."""
    half = name[1:]
    return KEYS[name[0]], SIZE // 2 * int(half or 0), SIZE // 2 if half else SIZE


def program(*launches: Sequence[Use] | str, known: bool = True, **facts: Any) -> Program:
    """Launches that use arguments a and b, and intermediates x and y. ``x > a`` is a copy. Unless uses are ``known``,
    operands are what a launch reads, as of a captured operator."""
    made, slots = Capture(base=1 << 30, gap=SIZE), list[Slot]()
    addresses = {"a": made.input(SIZE), "b": made.input(SIZE), "x": made.pool(SIZE), "y": made.pool(SIZE)}
    for number, each in enumerate(launches):
        copies = isinstance(each, str)
        uses: Sequence[Use] = (
            each if not isinstance(each, str) else list(zip(each.split(" > ")[::-1], "wr", strict=True))
        )
        words, exact, operands = [], [], []
        for word, (name, how) in enumerate(uses):
            key, offset, nbytes = place(name)
            words.append(addresses[name[0]] + offset)
            slots.append(Slot(number, word, key[0], key[1], offset))
            exact.append(replace(reads(word, nbytes), reads="r" in how, writes="w" in how))
            if "r" in how:
                operands.append(Access(key, Bytes(offset, offset + nbytes), "w" in how))
        if copies:
            made.launch(*words, name="memcpy", kind=LaunchKind.MEMCPY, uses=exact)
        elif known:
            made.launch(*words, name=f"k{number}", uses=exact, in_place=facts.get("in_place", frozenset()))
        else:
            only_read = frozenset(access.key for access in operands if not access.writes)
            made.launch(
                *words,
                name=f"k{number}",
                operands=tuple(operands),
                read_only=only_read,
                may_access=frozenset(place(name)[0] for name, _ in uses),
                in_place=facts.get("in_place", frozenset()),
            )
    recording = replace(made.recording(), phases=facts.get("phases", ()))
    return undecided(recording, tuple(slots), alignment=16)


def left(made: Program) -> list[str]:
    """The names of its launches."""
    return [launch.name for launch in made.recording.launches]


def checked(made: Program, order: str = "dependences") -> Program:
    """``made`` without copies, which the verifier accepts in any order."""
    found = without_copies(made)
    for each in ("program", order):
        verify(DEFAULT_PASSES(found, each))
    return found


A, B = frozenset({(INPUT, 0)}), frozenset({(INPUT, 1)})
GOES: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "written anew": ([[("b", "r"), ("x", "w")], "x > a"], {}),
    "read before": ([[("a", "r"), ("y", "w")], [("y", "r"), ("x", "w")], "x > a"], {}),
    "read behind": ([[("b", "r"), ("x", "w")], "x > a", [("a", "r"), ("b", "w")]], {}),
    "written before": ([[("a", "w")], [("b", "r"), ("x", "w")], "x > a"], {}),
    "both read behind": ([[("x", "w")], "x > a", [("a", "r"), ("x", "r"), ("b", "w")]], {}),
    "overwritten behind all of it": ([[("x", "w")], "x > a", [("x", "r"), ("b", "w")], [("a", "w")]], {}),
    "written in parts": ([[("x0", "w")], [("x1", "w")], "x > a"], {}),
    "in place": ([[("a", "r"), ("x", "w")], "x > a"], {"in_place": A}),
    "the other half is read": ([[("x0", "w"), ("x1", "w")], "x > a", [("a", "r")]], {}),
    "phases that come one by one": ([[("a", "r"), ("y", "w")], [("x", "w")], "x > a"], {"phases": (0, 1, 2)}),
}
STAYS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "read by the launch that writes": ([[("a", "r"), ("x", "w")], "x > a"], {}),
    "read between": ([[("x", "w")], [("a", "r"), ("b", "w")], "x > a"], {}),
    "written between": ([[("x", "w")], [("a", "w")], "x > a"], {}),
    "written again behind": ([[("x", "w")], "x > a", [("x", "rw")], [("a", "r"), ("b", "w")]], {}),
    "overwritten and still read": ([[("x", "w")], "x > a", [("a", "w")], [("x", "r"), ("b", "w")]], {}),
    "overwritten by what reads it": ([[("x", "w")], "x > a", [("x", "r"), ("a", "w")]], {}),
    "nobody wrote it": (["x > a"], {}),
    "a part of it": ([[("x", "w")], "x0 > a0"], {}),
    "of an argument": ([[("b", "rw")], "b > a"], {}),
    "to an intermediate": ([[("x", "w")], "x > y", [("y", "r"), ("a", "w")]], {}),
    "in place of another one": ([[("a", "r"), ("x", "w")], "x > a"], {"in_place": B}),
    "in place, where it is written before": ([[("x", "w")], [("a", "r"), ("x", "rw")], "x > a"], {"in_place": A}),
    "in place, of another half": ([[("a1", "r"), ("x", "w")], "x > a"], {"in_place": A}),
    "beside one that reads it": ([[("a", "r"), ("y", "w")], [("x", "w")], "x > a"], {"phases": (0, 0, 1)}),
    "beside one that reads it behind": ([[("x", "w")], "x > a", [("a", "r"), ("b", "w")]], {"phases": (0, 1, 1)}),
    "in place beside another": (
        [[("a", "r"), ("x", "w")], [("b", "r"), ("y", "w")], "x > a"],
        {"in_place": A, "phases": (0, 0, 1)},
    ),
}


@pytest.mark.parametrize("known", [True, False], ids=["exact", "operands"])
@pytest.mark.parametrize("name", GOES)
def test_a_copy_goes_where_nobody_can_tell(name: str, known: bool) -> None:
    launches, facts = GOES[name]
    made = program(*launches, known=known, **facts)
    found = checked(made)
    assert left(found) == [each for each in left(made) if each != "memcpy"]
    assert (POOL, 0) not in {slot.key for slot in found.slots}
    assert 0 in found.written


@pytest.mark.parametrize("known", [True, False], ids=["exact", "operands"])
@pytest.mark.parametrize("name", STAYS)
def test_a_copy_stays_where_somebody_can_tell(name: str, known: bool) -> None:
    launches, facts = STAYS[name]
    made = program(*launches, known=known, **facts)
    assert checked(made) is made


def test_what_is_known_of_launches_is_known_of_the_argument() -> None:
    made = checked(program([("a", "r"), ("x", "w")], "x > a", [("x", "r"), ("b", "w")], known=False, in_place=A))
    first, second = made.recording.launches
    whole = Bytes(0, SIZE)
    assert first.operands == (Access((INPUT, 0), whole, writes=False), Access((INPUT, 0), whole, writes=True))
    assert (first.read_only, first.may_access, first.in_place) == (frozenset(), A, frozenset())
    assert second.operands == (Access((INPUT, 0), whole, writes=False),)
    assert (second.read_only, second.may_access) == (A, A | B)
    address = made.recording.allocations[0].address
    assert (first.words, second.words[0]) == ((address, address), address)


def test_unknown_launches_may_use_anything() -> None:
    made = program([("y", "w")], [("x", "w")], "x > a", [("b", "rw")])
    for number, goes in ((0, True), (1, False), (3, True)):
        launches = list(made.recording.launches)
        launches[number] = replace(launches[number], uses=None)
        unknown = replace(made, recording=replace(made.recording, launches=tuple(launches)))
        assert (checked(unknown) is not unknown) == goes


def test_a_place_that_is_less_aligned_is_copied_to() -> None:
    made = program([("x", "w")], "x > a")
    (first, *others), (writer, launch) = made.recording.allocations, made.recording.launches
    for offset, expected in ((8, 2), (16, 1)):
        copy = replace(launch, words=(launch.words[0] + offset, launch.words[1]))
        larger = (replace(first, nbytes=SIZE + 16), *others)
        recording = replace(made.recording, allocations=larger, launches=(writer, copy))
        slots = tuple(replace(s, offset=offset) if (s.launch, s.word) == (1, 0) else s for s in made.slots)
        found = checked(replace(made, recording=recording, slots=slots))
        assert len(found.recording.launches) == expected


def test_what_is_numbered_by_launch_is_numbered_anew() -> None:
    made = program([("x", "w")], "x > a", [("a", "r"), ("y", "w")], phases=(0, 1, 2))
    number = 7
    launches = [replace(each, words=(*each.words, number)) for each in made.recording.launches]
    born = [replace(each, born=2 * (each.key == (POOL, 1))) for each in made.recording.allocations]
    inert = (NonPointerWord(1, 2), NonPointerWord(2, 2))
    recording = replace(made.recording, launches=tuple(launches), allocations=tuple(born))
    found = checked(replace(made, recording=recording, non_pointers=inert))
    assert [launch.index for launch in found.recording.launches] == [0, 1]
    assert (found.non_pointers, found.recording.phases) == ((NonPointerWord(1, 2),), (0, 2))
    assert {each.key: each.born for each in found.recording.allocations}[POOL, 1] == 1


# -- of the host driver ------------------------------------------------------------------------------------------------


def recorded(fn: Any, *args: Any) -> Program:
    """``fn`` as captured, before any pass."""
    programs: list[Program] = []

    class Keeps:
        key = "keeps"

        def __call__(self, program: Program, order: str) -> Program:
            programs.append(program)
            return DEFAULT_PASSES(program, order)

    found = capture(fn, HostDriver(), list(args), None, (), "program", Keeps())
    assert isinstance(found, Captured), found
    return programs[0]


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda: (torch.zeros(4, 4), torch.zeros(4, 4)), True),
        (lambda: (torch.zeros(4, 4).t(), torch.zeros(4, 4).t()), True),
        (lambda: (torch.zeros(4, 4), torch.zeros(4, 4).t()), False),
        (lambda: (torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.int32)), False),
        (lambda: (torch.zeros(4, 4), torch.zeros(4)), False),
        (lambda: (torch.zeros(4, 8)[:, :4], torch.zeros(4, 8)[:, :4]), False),
        (
            lambda: (torch.zeros(2, 4, dtype=torch.int64).view(torch.bool)[0, :4], torch.zeros(4, dtype=torch.bool)),
            True,
        ),
    ],
)
def test_operators_that_copy_bytes_are_copies(make: Any, copies: bool) -> None:
    def fn(args: list[Any]) -> list[Any]:
        args[0].copy_(args[1])
        return []

    (launch,) = recorded(fn, *make()).recording.launches
    assert (launch.kind is LaunchKind.MEMCPY) == copies
    if copies:
        assert [(use.reads, use.writes) for use in launch.uses or ()] == [(False, True), (True, False)]


def test_recordings_share_no_payload_that_is_cut() -> None:
    def fn(args: list[Any]) -> list[Any]:
        args[0].copy_(torch.tanh(args[1]))
        args[1].copy_(torch.sin(args[0]))
        return []

    made: Recording = recorded(fn, torch.randn(4), torch.randn(4)).recording
    assert made.payload is not None
    whole: Any = made.payload
    cut: Any = whole.part([0, 2, 3])
    assert [each[0] for each in cut.payloads] == [each[0] for n, each in enumerate(whole.payloads) if n != 1]
    assert len(whole.payloads) == 4
