"""The verifier takes what captures and passes make, and names each way in which a program can be broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.errors import ParseError, ProgramError
from pygraph.program.default import DEFAULT_PASSES, as_captured
from pygraph.program.dependences import order_of
from pygraph.program.order import Order
from pygraph.program.program import GraphSegment, Layout, NonPointerWord, Program, Slot
from pygraph.program.recording import AllocationKind, LaunchKind, Output, OutputKind
from pygraph.program.rename import rename
from pygraph.program.steps import with_steps
from pygraph.program.text import parse_program, print_program
from pygraph.program.verify import verify, verify_edges
from pygraph.runtime.host import HostDriver
from tests.program.layouts import plan
from tests.program.programs import CAPTURED, made_up
from tests.program.test_rename import READ, WRITE, recorded
from tests.program.test_steps import MB, backward, program, tables
from tests.runtime.captures import Capture

INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT

Break = Callable[[Program], Program]


def large() -> Program:
    """Segments that are cut for memory."""
    return DEFAULT_PASSES(program(backward, 64, 32 * MB), "program")


def in_lanes() -> Program:
    """Launches in lanes."""
    return DEFAULT_PASSES(replace(CAPTURED["branches"](), steps=()), "dependences")


PROGRAMS: dict[str, Callable[[], Program]] = {
    **CAPTURED,
    "large": large,
    "lanes": in_lanes,
    "tables": lambda: with_steps(program(tables)),
}


# -- what is right -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_captures_and_their_texts_are_right(name: str) -> None:
    made = PROGRAMS[name]()
    verify(made)
    verify(parse_program(print_program(made)))


@pytest.mark.parametrize("name", ["branches", "draws", "calling", "planned", "cache"])
@pytest.mark.parametrize("order", ["program", "dependences"])
def test_what_the_default_passes_make_is_right(name: str, order: str) -> None:
    verify(DEFAULT_PASSES(replace(CAPTURED[name](), steps=()), order))


@settings(max_examples=40)
@given(made_up())
def test_made_up_programs_are_right(made: Program) -> None:
    made = with_steps(made)
    verify(made)
    verify(parse_program(print_program(made)))


def test_a_word_may_lie_outside_where_the_capture_says_so() -> None:
    capture = Capture()
    x = capture.input(64)
    capture.launch(x - 32, x + 64, x + 96)
    for off in (False, True):
        slots = tuple(Slot(0, word, INPUT, 0, at - x) for word, at in enumerate(capture.launches[0].words))
        made = Program(capture.recording(out_of_range_pointers=off), slots, Layout(0, {}, ()))
        if off:
            verify(with_steps(made))
        else:
            with pytest.raises(ProgramError, match=r"l0 \(kernel\) has a word 0 that points to byte -32 of %arg0"):
                verify(with_steps(made))


# -- what is broken ----------------------------------------------------------------------------------------------------


def launch(number: int, **facts: Any) -> Break:
    """Other facts of one launch."""

    def broken(made: Program) -> Program:
        launches = list(made.recording.launches)
        launches[number] = replace(launches[number], **facts)
        return recording(launches=tuple(launches))(made)

    return broken


def recording(**facts: Any) -> Break:
    return lambda made: replace(made, recording=replace(made.recording, **facts))


def allocation(kind: AllocationKind, index: int, **facts: Any) -> Break:
    def broken(made: Program) -> Program:
        changed = [replace(a, **facts) if a.key == (kind, index) else a for a in made.recording.allocations]
        return recording(allocations=tuple(changed))(made)

    return broken


def slot(at: int, number: int, /, **facts: Any) -> Break:
    """Other facts of the slot of word ``number`` of launch ``at``."""

    def broken(made: Program) -> Program:
        assert any((each.launch, each.word) == (at, number) for each in made.slots)
        return replace(
            made, slots=tuple(replace(s, **facts) if (s.launch, s.word) == (at, number) else s for s in made.slots)
        )

    return broken


def without_slot(at: int, word: int) -> Break:
    return lambda made: replace(made, slots=tuple(s for s in made.slots if (s.launch, s.word) != (at, word)))


def swapped(at: int, one: int, other: int) -> Break:
    """Two words of a launch that belong to each other's allocations."""

    def broken(made: Program) -> Program:
        a, b = ({s.word: s for s in made.slots if s.launch == at}[word] for word in (one, other))
        changed = slot(at, one, kind=b.kind, index=b.index, offset=b.offset)(made)
        return slot(at, other, kind=a.kind, index=a.index, offset=a.offset)(changed)

    return broken


def layout(**facts: Any) -> Break:
    return lambda made: replace(made, layout=replace(made.layout, **facts))


def placed(index: int, offset: int) -> Break:
    return lambda made: layout(offsets={**made.layout.offsets, index: offset})(made)


def step(number: int, change: Callable[[Any], dict[str, Any]]) -> Break:
    """Step ``number`` with other facts, which follow from what it was."""

    def broken(made: Program) -> Program:
        steps = list(made.steps)
        steps[number] = replace(steps[number], **change(steps[number]))
        return replace(made, steps=tuple(steps))

    return broken


def steps(change: Callable[[list[Any]], list[Any]]) -> Break:
    return lambda made: replace(made, steps=tuple(change(list(made.steps))))


def waiting(change: Callable[[list[set[int]]], None], lanes: tuple[int, ...] = ()) -> Break:
    """Launches that wait for others; ``before`` is as it was."""

    def broken(made: Program) -> Program:
        assert made.order is not None
        waits = [set(waited) for waited in made.order.edges]
        change(waits)
        edges = tuple(tuple(sorted(each)) for each in waits)
        return replace(made, order=Order(edges, made.order.before, lanes))

    return broken


def moved(block: int, index: int, offset: int) -> Callable[[Any], dict[str, Any]]:
    """An intermediate elsewhere in a block of a step."""

    def changed(was: Any) -> dict[str, Any]:
        blocks = list(was.blocks)
        nbytes, died, offsets = blocks[block]
        blocks[block] = (nbytes, died, {**offsets, index: offset})
        return {"blocks": tuple(blocks)}

    return changed


def both(*breaks: Break) -> Break:
    def broken(made: Program) -> Program:
        for one in breaks:
            made = one(made)
        return made

    return broken


def inside(change: Break) -> Break:
    """A change of the first body of launch 0."""

    def broken(made: Program) -> Program:
        (body,) = made.recording.launches[0].bodies
        return launch(0, bodies=(change(body),))(made)

    return broken


def using(word: int, **facts: Any) -> Break:
    """Other facts of what launch 0 does to a word; without any, nothing."""

    def broken(made: Program) -> Program:
        uses = made.recording.launches[0].uses or ()
        assert any(use.word == word for use in uses)
        changed = [replace(use, **facts) if use.word == word else use for use in uses if facts or use.word != word]
        return launch(0, uses=tuple(changed))(made)

    return broken


def eager(made: Program) -> Any:
    """The first eager call."""
    return made.calls[0].eager


FRESH = Output(OutputKind.FRESH, 0)

# l0 mm  l1 sigmoid  l2 bernoulli (eager)  l3 mm  l4 sort (eager)  l5 mm
BROKEN: dict[str, tuple[str, Break, str, str]] = {
    # launches
    "a launch twice": ("mlp", launch(1, index=0), "numbers", "l0 (cpp"),
    "a use of no word": ("mlp", launch(0, words=()), "numbers", "uses word 0, and has 0"),
    "an operand that is not allocated": (
        "mlp",
        launch(1, read_only=frozenset([(POOL, 99)])),
        "numbers",
        "names %buf99, which is not allocated",
    ),
    "phases that go back": ("drawing", recording(phases=(0, 1, 0, 1, 2)), "numbers", "phases"),
    "phases of other launches": ("drawing", recording(phases=(0, 0)), "numbers", "phases"),
    "an allocation twice": (
        "mlp",
        lambda made: recording(allocations=made.recording.allocations * 2)(made),
        "numbers",
        "two allocations",
    ),
    "an alignment of no byte": ("mlp", recording(alignment=0), "numbers", "aligned to no byte"),
    # words
    "a shifted offset": (
        "mlp",
        slot(0, 0, offset=8),
        "words",
        "l0 (aten.addmm.out) has a word 0 that did not point to",
    ),
    "a swapped slot": ("mlp", swapped(0, 0, 1), "words", "l0 (aten.addmm.out) has a word 0"),
    "a slot of another launch": ("mlp", slot(0, 0, launch=99), "words", "l99 has no word 0"),
    "a slot of no word": ("mlp", slot(0, 0, word=9), "words", "l0 has no word 9"),
    "two slots of a word": (
        "mlp",
        lambda made: replace(made, slots=(*made.slots, made.slots[0])),
        "words",
        "two owners of word 0",
    ),
    "a word that is an address and none": (
        "mlp",
        lambda made: replace(made, non_pointers=(NonPointerWord(0, 0),)),
        "words",
        "two owners of word 0",
    ),
    "scratch memory that is not there": (
        "mlp",
        both(without_slot(0, 0), lambda made: replace(made, non_pointers=(NonPointerWord(0, 0, scratch=True),))),
        "words",
        "points at scratch memory, of which there is none",
    ),
    "an address that is left behind": ("mlp", without_slot(0, 0), "words", "without a slot: of %arg0"),
    "a slot of nothing": ("mlp", slot(0, 0, index=77), "words", "belongs to %arg77, which no replay moves"),
    "a slot of a constant": ("mlp", slot(0, 0, kind=CONSTANT), "words", "belongs to %const0, which no replay moves"),
    "a slot before its allocation": ("mlp", allocation(POOL, 0, born=3), "words", "%buf0, which is allocated later"),
    "a word outside of its allocation": (
        "planned",
        allocation(POOL, 0, nbytes=100),
        "words",
        "points to byte 192 of %buf0, which has 100",
    ),
    # uses
    "a shrunk allocation": ("mlp", allocation(POOL, 0, nbytes=64), "uses", "of %buf0, which has 64"),
    # loops
    "a loop without a body": ("looping", launch(0, bodies=()), "bodies", "l0 (loop) is of kind while and has 0 bodies"),
    "an operator with a body": (
        "looping",
        launch(0, kind=LaunchKind.OPERATOR),
        "bodies",
        "is of kind operator and has 1",
    ),
    "a loop that does not use what decides": ("looping", using(0), "bodies", "does not say that it uses what decides"),
    "a loop that does not count": (
        "looping",
        using(0, writes=False),
        "bodies",
        "does not say that it uses what decides",
    ),
    "a loop that nothing decides": (
        "looping",
        both(using(0), launch(0, words=(0, 0, 0, 0, 0)), lambda made: replace(made, slots=())),
        "bodies",
        "is decided by 24 bytes, to which its first word does not point",
    ),
    "a loop that too little decides": (
        "looping",
        both(allocation(INPUT, 2, nbytes=16), using(0, nbytes=16), using(4, nbytes=16)),
        "bodies",
        "is decided by 24 bytes, to which its first word does not point",
    ),
    "a loop that surely writes": (
        "looping",
        using(2, reads=False),
        "bodies",
        "may leave what word 2 points to as it was",
    ),
    "a body that breaks a rule": (
        "looping",
        inside(without_slot(0, 0)),
        "bodies",
        "has a body that breaks the rule words: l0 (aten.mm.default) has a word 0 that is an address without a slot",
    ),
    "a body whose memory is shared": (
        "looping",
        inside(both(placed(1, 0), step(0, moved(0, 1, 0)))),
        "bodies",
        "breaks the rule layout: l1 (aten.tanh.default) uses %buf1, which shares bytes with %buf0",
    ),
    "a body in several segments": (
        "looping",
        inside(lambda _: large()),
        "bodies",
        "has a body that is no single segment",
    ),
    "a body that returns something": (
        "looping",
        inside(lambda made: with_steps(replace(made, layout=Layout(0, {}, (0, 1, 2, 4, 5))))),
        "bodies",
        "returns something",
    ),
    "a body elsewhere": ("looping", inside(recording(device="cuda")), "bodies", "runs on cuda"),
    "a body that draws": ("looping", inside(launch(0, random=True)), "bodies", "draws, which its launch does not say"),
    "a workspace that is too small for a body": (
        "looping",
        both(using(1, nbytes=64), layout(nbytes=64), allocation(POOL, 0, nbytes=64)),
        "bodies",
        "needs 128 bytes at word 1",
    ),
    "a workspace that is aligned to less": (
        "looping",
        inside(recording(alignment=128)),
        "bodies",
        "breaks the rule layout",
    ),
    "an argument of a body that is too small": (
        "looping",
        both(allocation(INPUT, 1, nbytes=32), using(3, nbytes=32)),
        "bodies",
        "needs 64 bytes at word 3",
    ),
    "a body that reads what its launch does not": ("looping", using(3), "bodies", "reads bytes 0 to 64 of %arg1"),
    "a body that reads more than its launch": (
        "looping",
        using(3, nbytes=32),
        "bodies",
        "reads bytes 0 to 64 of %arg1, which its launch does not say",
    ),
    "a body that writes what its launch reads": (
        "looping",
        using(2, writes=False),
        "bodies",
        "writes bytes 0 to 64 of %arg0, which its launch does not say",
    ),
    "a body that may use anything": (
        "looping",
        inside(launch(1, uses=None)),
        "bodies",
        "may use anything, by l1 (aten.tanh.default), which its launch does not say",
    ),
    "a body that may write what its launch only reads": (
        "looping",
        launch(0, uses=None, read_only=frozenset([(INPUT, 0)])),
        "bodies",
        "may write %arg0, which its launch does not say",
    ),
    "a body that waits for too little": (
        "looping in order",
        inside(waiting(lambda waits: waits[1].clear())),
        "bodies",
        "breaks the rule waits: l1 (aten.tanh.default) does not wait for l0",
    ),
    # eager calls
    "a shrunk operand of a call": (
        "calling",
        both(launch(1, uses=None), launch(2, uses=None), allocation(POOL, 1, nbytes=16)),
        "calls",
        "l2 (aten.bernoulli.default) shows bytes 0 to 64 of %buf1, which has 16",
    ),
    "an operand of a call without memory": (
        "calling",
        both(without_slot(2, 0), lambda made: replace(made, non_pointers=(NonPointerWord(2, 0),))),
        "calls",
        "has no memory for tensor 0 of its call",
    ),
    "a draw before an earlier one": (
        "calling",
        lambda made: launch(2, eager=replace(eager(made), drawn=4))(made),
        "calls",
        "l4 (aten.sort.default) draws at 0, and what is before it at 4",
    ),
    "another argument for a call": (
        "given",
        lambda made: launch(0, eager=replace(eager(made), operands=(replace(eager(made).operands[0], argument=1),)))(
            made
        ),
        "calls",
        "l0 (aten.cos_.default) is given %arg0 for argument 1",
    ),
    "a result that is no operand": (
        "given",
        lambda made: launch(0, eager=replace(eager(made), results=(replace(eager(made).results[0], operand=1),)))(made),
        "calls",
        "l0 (aten.cos_.default) returns operand 1, and has 1",
    ),
    "a leaf that is no operand": (
        "calling",
        lambda made: launch(2, eager=replace(eager(made), leaves=(1,)))(made),
        "calls",
        "l2 (aten.bernoulli.default) is given operand 1, and has 1",
    ),
    "a leaf before all operands": (
        "calling",
        lambda made: launch(2, eager=replace(eager(made), leaves=(-1,)))(made),
        "calls",
        "is given operand -1, and has 1",
    ),
    "a place of no result": (
        "calling",
        lambda made: launch(2, eager=replace(eager(made), returned=[0, [1]]))(made),
        "calls",
        "l2 (aten.bernoulli.default) returns result 1, and has 1",
    ),
    # outputs
    "an output of nothing": ("mlp", recording(outputs=(Output(OutputKind.FRESH, 50),)), "outputs", "%buf50"),
    "an output that comes later": (
        "mlp",
        recording(outputs=(Output(OutputKind.SAME, 1), FRESH)),
        "outputs",
        "output 0 is that at 1",
    ),
    "an output beyond its memory": (
        "mlp",
        lambda made: recording(
            outputs=(*made.recording.outputs[:-1], replace(made.recording.outputs[-1], offset=1)),
        )(made),
        "outputs",
        "shows bytes 4 to",
    ),
    # steps
    "no steps": ("mlp", steps(lambda were: []), "steps", "is in no step"),
    "a step that skips a launch": ("calling", step(2, lambda was: {"begin": 4}), "steps", "3 is next of 6"),
    "a step that repeats a launch": ("calling", step(2, lambda was: {"begin": 2}), "steps", "3 is next of 6"),
    "steps that change places": ("large", steps(lambda were: [*were[1:], were[0]]), "steps", "0 is next"),
    "a step left out at the end": ("calling", steps(lambda were: were[:-1]), "steps", "l5 (aten.mm.default) is in no"),
    "a step of nothing": (
        "calling",
        steps(lambda were: [*were, GraphSegment(6, 6, (), (), (), ())]),
        "steps",
        "launches 6 to 6",
    ),
    "an eager call within a segment": (
        "calling",
        steps(lambda were: [replace(were[0], end=3), *were[2:]]),
        "steps",
        "l2 (aten.bernoulli.default) is an eager call within the segment of step 0",
    ),
    "an eager step of a launch": (
        "calling",
        steps(lambda were: [*were[:2], replace(were[1], begin=3, end=4), *were[3:]]),
        "steps",
        "l3 (aten.mm.default) is no step of one eager call",
    ),
    "another call in the place of one": (
        "calling",
        lambda made: step(1, lambda was: {"call": made.calls[1].eager})(made),
        "steps",
        "l2 (aten.bernoulli.default) is no step of one eager call",
    ),
    # order
    "an order of other launches": (
        "lanes",
        lambda made: replace(made, order=Order.of([set()])),
        "order",
        "orders 1 launches in 0 lanes, and there are",
    ),
    "a launch that waits for a later one": (
        "lanes",
        waiting(lambda waits: waits[2].add(5)),
        "order",
        "l2 (cpp_fused_relu_0) waits for l5, which is no earlier one",
    ),
    "launches of a lane side by side": (
        "lanes",
        lambda made: waiting(lambda waits: None, (0,) * len(made.recording.launches))(made),
        "order",
        "in lane 0",
    ),
    # layout
    "a place of nothing": ("mlp", placed(60, 0), "layout", "%buf60 is at byte 0"),
    "a place that is not aligned": ("branches", placed(0, 8), "layout", "%buf0 is at byte 8 of 960 of the workspace"),
    "a place beyond the workspace": ("branches", placed(1, 1 << 20), "layout", "%buf1 is at byte 1048576"),
    "a workspace that is too small": ("branches", layout(nbytes=64), "layout", "of 64 of the workspace"),
    "an output in the workspace": (
        "branches",
        lambda made: layout(fresh=made.layout.fresh[1:])(made),
        "layout",
        "%buf2 needs memory of its own",
    ),
    "memory of its own for nothing": (
        "branches",
        lambda made: layout(fresh=(*made.layout.fresh, 40))(made),
        "layout",
        "%buf40 has memory of its own",
    ),
    "an intermediate without a place": (
        "branches",
        lambda made: layout(offsets={i: at for i, at in made.layout.offsets.items() if i != 4})(made),
        "layout",
        "l4 (aten.mm.out) uses %buf4, which has no place",
    ),
    "an intermediate in two places": ("branches", placed(2, 0), "layout", "%buf2 has two places"),
    "intermediates that are alive together in one place": (
        "branches",
        placed(5, 64),
        "layout",
        "l6 (aten.mm.out) uses %buf5, which shares bytes with %buf4, while that may be in use",
    ),
    "intermediates of a phase in one place": (
        "branches",
        recording(phases=(0, *[1] * 14)),
        "layout",
        "l4 (aten.mm.out) uses %buf4, which shares bytes with %buf3, while that may be in use",
    ),
    # memory
    "intermediates that share bytes of a block": (
        "branches",
        step(0, moved(0, 5, 64)),
        "memory",
        "l6 (aten.mm.out) uses %buf5, which shares bytes with %buf4, while that may be in use",
    ),
    "an intermediate outside of its block": ("branches", step(0, moved(0, 5, 960)), "memory", "%buf5 is at byte 960"),
    "an intermediate in no block": (
        "branches",
        step(0, lambda was: {"blocks": ()}),
        "memory",
        "l0 (aten.randint.low_out) uses %buf0, which has no memory",
    ),
    "an intermediate in two blocks": (
        "branches",
        step(0, lambda was: {"blocks": was.blocks * 2}),
        "memory",
        "step 0 has a second place for %buf0",
    ),
    "a block that is gone before it comes": (
        "large",
        step(1, lambda was: {"blocks": tuple((n, 0, o) for n, _, o in was.blocks)}),
        "memory",
        "a block of step 1 lives until step 0",
    ),
    "a block that is given back too early": (
        "large",
        step(0, lambda was: {"blocks": tuple((n, 0, o) for n, _, o in was.blocks)}),
        "memory",
        "in step 1, which is let go of after step 0",
    ),
    "an output in a block": (
        "branches",
        step(0, lambda was: {"blocks": (*was.blocks, (192, 0, {2: 0}))}),
        "memory",
        "%buf2 has memory of its own, and a place in a block",
    ),
    "an output that nobody takes": (
        "branches",
        step(0, lambda was: {"taken": was.taken[1:]}),
        "memory",
        "no step takes %buf2",
    ),
    "an output that is taken too late": (
        "large",
        both(
            lambda made: step(1, lambda was: {"taken": (*was.taken, made.steps[0].taken[0])})(made),
            step(0, lambda was: {"taken": was.taken[1:]}),
        ),
        "memory",
        "uses %buf1 in step 0, which has memory from step 1 on",
    ),
    "memory that is taken twice": (
        "branches",
        step(0, lambda was: {"taken": was.taken * 2}),
        "memory",
        "step 0 takes %buf2, which is not for it to take",
    ),
    "an intermediate that is taken": (
        "branches",
        step(0, lambda was: {"taken": (*was.taken, 0)}),
        "memory",
        "step 0 takes %buf0, which is not for it to take",
    ),
    "an output that is released": (
        "branches",
        step(0, lambda was: {"released": (2,)}),
        "memory",
        "step 0 releases %buf2, which is not for it to release",
    ),
    "an operand of a call that is released before": (
        "calling",
        both(
            step(0, lambda was: {"released": (1,)}),
            step(1, lambda was: {"released": ()}),
        ),
        "memory",
        "l2 (aten.bernoulli.default) uses %buf1 in step 1, which is let go of after step 0",
    ),
    "memory that is released twice": (
        "calling",
        step(3, lambda was: {"released": (*was.released, 1)}),
        "memory",
        "step 3 releases %buf1, which is not for it to release",
    ),
    "an argument that is dropped before its last use": (
        "large",
        step(0, lambda was: {"dead": (0,)}),
        "memory",
        "%arg0",
    ),
    "an argument that is returned, and dropped": (
        "calling",
        step(4, lambda was: {"dead": (*was.dead, 0)}),
        "memory",
        "step 4 drops %arg0, which is not for it to drop",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_break_is_named(name: str) -> None:
    source, broken, rule, said = BROKEN[name]
    made = PROGRAMS[source]()
    verify(made)
    with pytest.raises(ProgramError) as caught:
        verify(broken(made))
    assert caught.value.rule == rule, caught.value
    assert said in str(caught.value)
    assert caught.value.reason == "invalid-program"


def test_an_edge_that_is_missing_is_named() -> None:
    """No edge says what others say."""
    given = CAPTURED["branches"]()
    order = order_of(given.recording, given.slots)
    made = with_steps(replace(given, order=order, layout=plan(given.recording, given.slots, order)))
    edges = [(a, b) for b, waited in enumerate(order.edges) for a in waited]
    verify_edges(made, edges)
    last = len(made.recording.launches) - 1
    others = [edge for edge in edges if last not in edge]
    verify_edges(made, others, gone=(last,))
    with pytest.raises(ProgramError):
        verify_edges(made, others)
    for earlier, later in edges:
        with pytest.raises(ProgramError) as caught:
            verify(waiting(lambda waits, a=earlier, b=later: waits[b].remove(a))(made))  # type: ignore[misc]
        assert (caught.value.rule, caught.value.launch) == ("waits", later)
        unordered = re.search(r"does not wait for l(\d+) ", str(caught.value))
        assert unordered is not None
        assert int(unordered[1]) == earlier or order.before[earlier] >> int(unordered[1]) & 1
        assert caught.value.reason == "unordered-launches"


def test_draws_keep_their_order() -> None:
    """Two launches that draw into memory of their own depend on nothing else."""
    made = DEFAULT_PASSES(replace(CAPTURED["draws"](), steps=()), "dependences")
    drawing = [launch.index for launch in made.recording.launches if launch.random]
    assert len(drawing) > 2
    with pytest.raises(ProgramError, match=rf"l{drawing[-1]} .* does not wait for l{drawing[-2]} ") as caught:
        verify(waiting(lambda waits: waits[drawing[-1]].clear())(made))
    assert caught.value.rule == "waits"


def test_a_stale_closure_of_edges_is_not_trusted() -> None:
    made = in_lanes()
    assert made.order is not None
    edges = tuple(() for _ in made.order.edges)
    with pytest.raises(ProgramError, match="does not wait for"):
        verify(replace(made, order=replace(made.order, edges=edges, lanes=())))


def test_no_driver_replays_a_broken_program() -> None:
    with pytest.raises(ProgramError, match="words: l0 "):
        HostDriver().instantiate(slot(0, 0, offset=8)(CAPTURED["mlp"]()))


@pytest.mark.parametrize(
    ("number", "index", "message"),
    [
        (1, 0, "l1 (kernel) reads %buf0, which begins there: it was %buf3 when captured"),
        (2, 3, "l3 (kernel) reads %buf0, which begins there: it was %buf3 when captured"),
        (3, 3, "l2 (kernel) uses %buf0, and l3 still %buf3: they were one when captured"),
    ],
    ids=["too early", "too late", "between"],
)
def test_an_allocation_that_begins_anew_at_the_wrong_launch_is_named(number: int, index: int, message: str) -> None:
    """The first one, %buf0, is written and read twice: it is %buf3 the first time."""
    renamed, slots, count = rename(*recorded(WRITE, READ, WRITE, READ))
    verify(as_captured(renamed, slots))
    assert count == 2
    wrong = tuple(replace(s, index=index) if (s.launch, s.word) == (number, 0) else s for s in slots)
    with pytest.raises(ProgramError) as caught:
        verify(as_captured(renamed, wrong))
    assert (caught.value.rule, caught.value.detail) == ("renamed", f"renamed: {message}")


@settings(max_examples=50)
@given(made_up(), st.data())
def test_intermediates_share_bytes_exactly_where_all_launches_of_one_wait_for_the_others(
    made: Program, data: st.DataObject
) -> None:
    """The definition, pair by pair."""
    made = with_steps(made)
    offsets = {index: 8 * data.draw(st.integers(0, 2)) for index in made.layout.offsets}
    made = replace(made, layout=Layout(24, offsets, ()), recording=replace(made.recording, alignment=8))
    calls, phases = made.recording.calls(), made.recording.phases or range(len(made.recording.launches))
    order = made.order

    def waits(later: int, earlier: int) -> bool:
        return phases[earlier] < phases[later] if order is None else bool(order.before[later] >> earlier & 1)

    users = {index: {at for s in made.slots if s.key == (POOL, index) for at in calls[s.launch]} for index in offsets}
    apart = all(
        abs(offsets[a] - offsets[b]) >= 8
        or all(waits(x, y) for x in users[a] for y in users[b])
        or all(waits(y, x) for x in users[a] for y in users[b])
        for a, b in combinations(offsets, 2)
    )
    if apart:
        verify(made)
    else:
        with pytest.raises(ProgramError, match="shares bytes with") as caught:
            verify(made)
        assert caught.value.rule == "layout"


@settings(max_examples=50)
@given(made_up(), st.data())
def test_steps_that_skip_or_repeat_launches_are_refused(made: Program, data: st.DataObject) -> None:
    made = with_steps(made)
    bounds = data.draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=3))
    count = len(made.recording.launches)
    whole = [at for begin, end in bounds for at in range(begin, end)] == list(range(count))
    if whole and all(begin < end for begin, end in bounds):
        return
    wrong = tuple(GraphSegment(begin, end, (), (), (), ()) for begin, end in bounds)
    with pytest.raises(ProgramError) as caught:
        verify(replace(made, steps=wrong))
    assert caught.value.rule == "steps"


# -- edits -------------------------------------------------------------------------------------------------------------


@settings(max_examples=75)
@given(st.data())
def test_an_edited_text_is_a_program_or_is_refused_with_a_reason(data: st.DataObject) -> None:
    """Whatever a person writes: no other exception comes, and what the verifier takes prints and parses back."""
    made = data.draw(
        made_up().map(with_steps) | st.sampled_from([CAPTURED["calling"](), CAPTURED["given"](), in_lanes()])
    )
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\w+|\s+|.', print_program(made), re.DOTALL)
    for _ in range(data.draw(st.integers(1, 3))):
        at, other = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
        edit = data.draw(st.sampled_from(["number", "drop", "repeat", "swap", "copy"]))
        if edit == "number":
            numbers = [place for place, word in enumerate(words) if word.isdigit()]
            words[numbers[at % len(numbers)]] = str(data.draw(st.integers(0, 9) | st.sampled_from([64, 512, 1 << 70])))
        elif edit == "drop":
            words[at] = ""
        elif edit == "repeat":
            words[at] *= 2
        elif edit == "swap":
            words[at], words[other] = words[other], words[at]
        else:
            words[at] = words[other]
    try:
        program = parse_program("".join(words))
        verify(program)
    except (ParseError, ProgramError):
        return
    printed = print_program(program)
    assert print_program(parse_program(printed)) == printed
