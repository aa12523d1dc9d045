"""Programs as text: each prints to one, which parses to a program that prints the same and of which passes make the
same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from pygraph.errors import ParseError
from pygraph.program import text
from pygraph.program.default import DEFAULT_PASSES
from pygraph.program.dependences import order_of
from pygraph.program.program import EagerStep, NonPointerWord, Program
from pygraph.program.recording import AllocationKind, Bytes, UnownedAddress, UnownedMemory
from pygraph.program.text import parse_program, print_program
from tests.program.layouts import plan
from tests.program.programs import CAPTURED, made_up
from tests.runtime.captures import Capture, reads, writes

EXAMPLE = "\n".join(line[4:] for line in (text.__doc__ or "").split("\n\n")[1].split("\n"))
"""The program in the module's docstring."""


def assert_round_trip(program: Program) -> Program:
    printed = print_program(program)
    parsed = parse_program(printed)
    assert print_program(parsed) == printed
    return parsed


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_programs_print_parse_and_print_back(name: str) -> None:
    program = CAPTURED[name]()
    parsed = assert_round_trip(program)
    assert (parsed.slots, parsed.layout, parsed.order) == (program.slots, program.layout, program.order)
    assert len(parsed.calls) == len(program.calls)
    for one, other in zip(parsed.steps, program.steps, strict=True):
        assert type(one) is type(other)
        assert (one.begin, one.end, one.blocks, one.taken) == (other.begin, other.end, other.blocks, other.taken)
        assert (one.released, one.dead) == (other.released, other.dead)
        if isinstance(one, EagerStep) and isinstance(other, EagerStep):
            assert (one.call.name, one.call.leaves, one.origin) == (other.call.name, other.call.leaves, other.origin)
            assert [each.layout.nbytes for each in one.call.results] == [r.layout.nbytes for r in other.call.results]


@pytest.mark.parametrize("name", CAPTURED)
def test_passes_make_the_same_of_a_parsed_program(name: str) -> None:
    program = replace(CAPTURED[name](), steps=(), order=None)
    parsed = parse_program(print_program(program))
    for order in ("program", "dependences"):
        assert print_program(DEFAULT_PASSES(parsed, order)) == print_program(DEFAULT_PASSES(program, order))


@settings(max_examples=30)
@given(made_up())
def test_whatever_a_program_holds_comes_back(program: Program) -> None:
    parsed = assert_round_trip(program)
    assert (parsed.slots, parsed.layout, parsed.order) == (program.slots, program.layout, program.order)
    assert order_of(parsed.recording, parsed.slots) == order_of(program.recording, program.slots)
    assert plan(parsed.recording, parsed.slots) == plan(program.recording, program.slots)
    for one, other in zip(parsed.recording.launches, program.recording.launches, strict=True):
        assert replace(one, words=(), signature=None) == replace(other, words=(), signature=None)


def test_words_that_are_no_operands_have_no_value() -> None:
    """Their bytes are addresses of a process, or nobody's: another process would print others."""
    capture = Capture()
    x = capture.input(64)
    stranger = UnownedAddress(3, UnownedMemory.OTHER, "memory of a library")
    capture.launch(x - 16, 0x7A00_0000_0610, 0x7A00_0000_0620, 0x7A00_0000_0630, unowned=(stranger,), call="aten.mm")
    words = (NonPointerWord(0, 1, call="aten.mm"), NonPointerWord(0, 2, scratch=True, call="aten.mm"))
    (slot,) = parse_program(EXAMPLE).slots[:1]
    program = replace(parse_program("program @a : cuda {} {return ()}"), recording=capture.recording())
    program = replace(program, slots=(replace(slot, offset=-16),), non_pointers=words)
    assert "(%arg0-16, inert, scratch, foreign)" in print_program(program)
    parsed = assert_round_trip(program)
    assert parsed.non_pointers == words
    assert (parsed.recording.launches[0].words[0], parsed.slots) == (
        parsed.recording.allocations[0].address - 16,
        program.slots,
    )


def test_constants_lie_as_they_did() -> None:
    """The third one holds the first two, the fourth is another's, the last one has no memory."""
    capture = Capture()
    base = 0x5500_0000_0000
    for address, nbytes in ((base + 64, 64), (base + 256, 64), (base, 512), (base + 512, 8), (0, 0)):
        capture.constant(address, nbytes)
    x = capture.input(64)
    for address in (base + 80, base + 256, base + 500, base + 512):
        capture.launch(address, x, uses=[writes(0, 8), reads(1, 64)])
    empty = parse_program("program @a : cpu {} {return ()}")
    slots = tuple(replace(parse_program(EXAMPLE).slots[0], launch=launch, word=1) for launch in range(4))
    program = replace(empty, recording=capture.recording(), slots=slots)
    parsed = assert_round_trip(program)
    assert order_of(parsed.recording, parsed.slots) == order_of(program.recording, program.slots)
    declared = [line.strip() for line in print_program(program).split("\n") if line.startswith("  %const")]
    assert declared == [
        "%const0 : constant 64 B",
        "%const1 : constant 64 B @ %const0+192",
        "%const2 : constant 512 B @ %const0-64",
        "%const3 : constant 8 B",
        "%const4 : constant 0 B",
    ]


def test_the_example_is_a_program() -> None:
    program = parse_program(EXAMPLE)
    assert_round_trip(program)
    assert program.recording.device == "cuda"
    first, second = program.recording.launches
    assert [(use.reads, use.writes, use.nbytes) for use in first.uses or ()] == [
        (True, False, 16384),
        (True, False, 2097152),
        (False, True, 32768),
    ]
    assert second.uses is not None
    assert Bytes(second.uses[0].start, second.uses[0].nbytes) == Bytes(0, 16384)
    assert program.order == order_of(program.recording, program.slots)
    assert [slot.key for slot in program.slots if slot.launch == 1] == [
        (AllocationKind.POOL, 0),
        (AllocationKind.POOL, 1),
    ]


@pytest.mark.parametrize(
    ("old", "new", "reason", "line"),
    [
        ("%buf0 : pool", "%tmp0 : pool", "an allocation is called '%arg', '%buf' or '%const' and a number", 4),
        ("%buf1 : pool", "%buf0 : pool", "'%buf0' is declared twice", 5),
        ("%buf1 writes)", "%buf7 writes)", "'%buf7' is no allocation of this program", 8),
        ("%buf1 writes)", "7 writes)", "unexpected ')': expected '['", 8),
        ("l1 = kernel", "l2 = kernel", "unexpected 'l2': expected 'l1'", 8),
        ("l1 = kernel", "l1 = shader", "unknown kind of launch 'shader'", 8),
        ("signature = 1", "signature = 1, signature = 1", "'signature' is given twice", 8),
        ("signature = 1", "signature = 1, unknown_uses", "a launch with unknown uses", 9),
        ("{held}", "{fresh}", "'fresh' is no fact of argument allocations", 3),
        ("after [l0]", "after [l1]", "expected one of the 1 launches before", 11),
        ("after [l0]", "lane 1", "either each launch has a lane, or none", 10),
        ("segment [0:2]", "call [0:2]", "l0 is no eager call", 14),
        ("takes [%buf1]", "takes [%arg1]", "expected '%buf' and a number", 16),
        ("takes [%buf1]", "makes [%buf1]", "a step has block, takes, releases, drops", 16),
        ("reads[0:16384]", "reads[0:1:2]", "expected 'begin:end' or 'begin:end:period:width'", 8),
    ],
)
def test_errors_point_at_the_place(old: str, new: str, reason: str, line: int) -> None:
    assert EXAMPLE.count(old) == 1
    with pytest.raises(ParseError) as caught:
        parse_program(EXAMPLE.replace(old, new), "file.pgir")
    assert reason in caught.value.reason
    assert caught.value.span.line == line
