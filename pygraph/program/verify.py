"""Proves that a launch program may be replayed, using only the program: before it is instantiated, and after passes.

    numbers   launches, phases and allocations are numbered correctly, and every name exists
    words     each word has at most one owner, its slot matches the captured address, and no address lacks a slot
    uses      known uses of a launch lie inside of the allocation
    bodies    bodies of loops and branches keep all rules, and use only memory that their launch declares
    calls     operands and results of eager calls have memory of the right kind, and lie inside of it
    outputs   outputs exist, and lie inside of their memory
    steps     each launch is part of one step, in order; each eager call is a step of its own
    order     a launch waits only for earlier ones; launches of a lane wait for each other
    waits     if two launches use the same memory, and one writes it, the later waits for the earlier
    renamed   allocations that were one when captured follow each other, and each is written before it is read
    layout    intermediates lie in the workspace, and share bytes only if one is finished before the other begins
    memory    memory of a step is taken by then, and released later; blocks follow the rules of the workspace

No rule trusts the planners of the program (``layout``, ``steps``, ``Order.before``): each reads launches, slots and
edges. The first broken rule raises a ProgramError with its name, the launch and the allocation::

    words: l7 (triton_relu) has a word 2 that is an address without a slot: of %buf3

A pass may move words of an allocation to a new one, which must have an equal captured ``address``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import chain, pairwise
from operator import and_, itemgetter, or_
from typing import Any, NamedTuple, TypeAlias

from pygraph.errors import ProgramError
from pygraph.program.dependences import accesses_of, chains
from pygraph.program.nested import ARGUMENTS, DECIDES, WORKSPACE, decided_by, outside
from pygraph.program.order import Order
from pygraph.program.program import EagerStep, NonPointerWord, Program, Slot, returned_by_calls, used_by_calls
from pygraph.program.recording import (
    Access,
    AllocationKind,
    Bytes,
    Launch,
    LaunchKind,
    OutputKind,
    Recording,
    TensorLayout,
    name_of,
)
from pygraph.waits import Waits

_Key = tuple[AllocationKind, int]
INPUT, POOL, CONSTANT = AllocationKind.INPUT, AllocationKind.POOL, AllocationKind.CONSTANT

Violation: TypeAlias = tuple[Launch | None, str]
"""The launch concerned, or None, and a description of the defect."""


def verify(program: Program) -> None:
    """Raise ProgramError unless every rule holds for ``program``."""
    facts = _Facts(program)
    for name, rule in _RULES.items():
        _raise_first(name, rule(facts))


def verify_edges(program: Program, edges: Collection[tuple[int, int]], gone: Collection[int] = ()) -> None:
    """Raise ProgramError (``waits``) unless ``edges`` (earlier, later), which a driver made from the order, order
    launches that use the same memory, by its place in a replay. Launches that are ``gone`` use nothing."""
    waited: list[set[int]] = [set() for _ in program.recording.launches]
    for earlier, later in edges:
        waited[later].add(earlier)
    _raise_first("waits", _unordered(program, Order.of(waited).before, _places(program), gone))


def _raise_first(rule: str, violations: Iterable[Violation]) -> None:
    for launch, detail in violations:
        where = "" if launch is None else f"l{launch.index} ({launch.name}) "
        raise ProgramError(rule, f"{where}{detail}", launch=None if launch is None else launch.index)


class _Life(NamedTuple):
    """Lifetime of an allocation.

    Args:
        first: first launch that uses it. A kernel may leave addresses in memory for the next one of its call, so all
            launches of a call use the allocations of each
        last: last launch that uses it
        launches: bits of all launches that use it
        done: bits of launches that have completed before any of these starts
    """

    first: int
    last: int
    launches: int
    done: int


class _Facts:
    """A program, and derived data for the rules. Each rule may rely on the rules before it."""

    def __init__(self, program: Program) -> None:
        self.program, self.recording = program, program.recording
        self.launches = program.recording.launches
        self.allocations = {allocation.key: allocation for allocation in program.recording.allocations}
        self.slots = {(slot.launch, slot.word): slot for slot in program.slots}
        self.outputs = {o.index for o in self.recording.outputs if o.kind is OutputKind.FRESH}
        self._apart: list[Mapping[int, int]] = []
        """Placements already checked by ``clobbered``, without a violation."""

    @cached_property
    def lives(self) -> dict[_Key, _Life]:
        """Lifetime of each allocation."""
        users: dict[_Key, set[int]] = {}
        calls = self.recording.calls()
        for slot in self.program.slots:
            users.setdefault(slot.key, set()).update(calls[slot.launch])
        return {key: self._life(used) for key, used in users.items()}

    def _life(self, launches: Collection[int]) -> _Life:
        done = reduce(and_, [self.before[launch] for launch in launches])
        return _Life(min(launches), max(launches), reduce(or_, [1 << launch for launch in launches]), done)

    @cached_property
    def before(self) -> list[int]:
        """By launch, the bits of those that have completed before it starts: all of earlier steps, and in its own step
        by the order's edges, or by phase."""
        order, phases, count = self.program.order, self.recording.phases, len(self.launches)
        if order is not None:
            found = list(Order.of([set(waited) for waited in order.edges]).before)
        else:
            found = [(1 << (bisect_left(phases, phases[at]) if phases else at)) - 1 for at in range(count)]
        for step in self.program.steps:
            for launch in range(step.begin, step.end):
                found[launch] |= (1 << step.begin) - 1
        return found

    def misplaced(self, what: str, nbytes: int, places: Mapping[int, int]) -> Iterator[Violation]:
        """Intermediates at ``places`` in ``nbytes`` bytes that do not lie inside, or are not aligned as captured."""
        for index, offset in places.items():
            key = POOL, index
            allocation = self.allocations.get(key)
            inside = allocation is not None and 0 <= offset <= nbytes - allocation.nbytes
            if not inside or offset % self.recording.alignment:
                yield None, f"{name_of(key)} is at byte {offset} of {nbytes} of {what}"

    def clobbered(self, places: Mapping[int, int]) -> Iterator[Violation]:
        """Intermediates at these ``places``, in bytes, whose launches do not all start after those of the intermediate
        that had some of the bytes before."""
        if places in self._apart:  # a workspace that is one block
            return
        lives = {index: self.lives[POOL, index] for index in places if (POOL, index) in self.lives}
        taken: list[tuple[int, int, int]] = []  # bytes (begin, end), and their last owner
        right_so_far = True
        for index in sorted(lives, key=lambda index: lives[index].first):
            life, begin = lives[index], places[index]
            end = begin + self.allocations[POOL, index].nbytes
            if begin == end:
                continue
            low, high = bisect_right(taken, begin, key=itemgetter(1)), bisect_left(taken, end, key=itemgetter(0))
            there = taken[low:high]
            for _, _, other in there:
                if lives[other].launches & ~life.done:
                    right_so_far = False
                    detail = f"which shares bytes with {name_of((POOL, other))}, while that may be in use"
                    yield self.launches[life.first], f"uses {name_of((POOL, index))}, {detail}"
            left = [(at, begin, other) for at, _, other in there[:1] if at < begin]
            right = [(end, to, other) for _, to, other in there[-1:] if to > end]
            taken[low:high] = [*left, (begin, end, index), *right]
        if right_so_far:
            self._apart.append(places)


# -- launches and words ------------------------------------------------------------------------------------------------


def _numbers(facts: _Facts) -> Iterator[Violation]:
    recording, count = facts.recording, len(facts.launches)
    for index, launch in enumerate(facts.launches):
        if launch.index != index:
            yield launch, f"is launch number {index}"
        named = (launch.read_only, launch.in_place, launch.may_access or (), [a.key for a in launch.operands or ()])
        for key in chain.from_iterable(named):
            if key not in facts.allocations:
                yield launch, f"names {name_of(key)}, which is not allocated"
        for use in launch.uses or ():
            if use.word not in range(len(launch.words)):
                yield launch, f"uses word {use.word}, and has {len(launch.words)}"
    if len(facts.allocations) < len(recording.allocations):
        yield None, "two allocations have one name"
    if min(facts.program.alignment, recording.alignment) < 1:
        yield None, "addresses are aligned to no byte"
    phases = recording.phases
    if phases and (len(phases) != count or any(later < earlier for earlier, later in pairwise(phases))):
        yield None, "phases are not one of each launch, ascending"


def _words(facts: _Facts) -> Iterator[Violation]:
    recording, owned = facts.recording, set[tuple[int, int]]()
    owners: list[Slot | NonPointerWord] = [*facts.program.slots, *facts.program.non_pointers]
    for each in owners:
        launch = facts.launches[each.launch] if 0 <= each.launch < len(facts.launches) else None
        if launch is None or not 0 <= each.word < len(launch.words):
            yield launch, f"l{each.launch} has no word {each.word}"
            return
        if (each.launch, each.word) in owned:
            yield launch, f"has two owners of word {each.word}"
        owned.add((each.launch, each.word))
        if isinstance(each, Slot):
            if detail := _wrong(facts, launch, each):
                yield launch, f"has a word {each.word} that {detail}"
        elif each.scratch and not recording.scratch:
            yield launch, f"has a word {each.word} that points at scratch memory, of which there is none"
    moving = [a for a in recording.allocations if a.kind is not AllocationKind.CONSTANT and a.address and a.nbytes]
    moving.sort(key=lambda allocation: allocation.address)
    starts = [allocation.address for allocation in moving]
    lowest, end = (starts[0], moving[-1].address + moving[-1].nbytes) if moving else (0, 0)
    for launch in facts.launches:
        for word in [word for word, value in enumerate(launch.words) if lowest <= value < end]:
            found = moving[bisect_right(starts, launch.words[word]) - 1]
            if (launch.index, word) not in owned and found.covers(launch.words[word]):
                yield launch, f"has a word {word} that is an address without a slot: of {name_of(found.key)}"


def _wrong(facts: _Facts, launch: Launch, slot: Slot) -> str:
    """Defect in the slot of a word; empty if there is none."""
    allocation = facts.allocations.get(slot.key)
    if allocation is None or slot.kind is AllocationKind.CONSTANT:
        return f"belongs to {name_of(slot.key)}, which no replay moves"
    if allocation.born > launch.index:
        return f"belongs to {name_of(slot.key)}, which is allocated later"
    if launch.words[slot.word] != allocation.address + slot.offset:
        return f"did not point to byte {slot.offset} of {name_of(slot.key)} when captured"
    if not facts.recording.out_of_range_pointers and not 0 <= slot.offset <= allocation.nbytes:
        return f"points to byte {slot.offset} of {name_of(slot.key)}, which has {allocation.nbytes}"
    return ""


def stray_uses(recording: Recording, slots: Sequence[Slot]) -> Iterator[tuple[Launch, str]]:
    """Known uses that reach beyond their allocation, by launch."""
    known = [launch for launch in recording.launches if launch.uses]
    sizes = {allocation.key: allocation.nbytes for allocation in recording.allocations}
    owners = {(slot.launch, slot.word): slot for slot in slots} if known else {}
    for launch in known:
        for use in launch.uses or ():
            slot = owners.get((launch.index, use.word))
            if slot is None or not use.nbytes:
                continue
            start = slot.offset + use.start
            if start < 0 or start + use.nbytes > sizes[slot.key]:
                reach = f"bytes {start} to {start + use.nbytes} of {name_of(slot.key)}"
                yield launch, f"uses {reach}, which has {sizes[slot.key]}, by word {use.word}"


def _uses(facts: _Facts) -> Iterator[Violation]:
    return stray_uses(facts.recording, facts.program.slots)


# -- loops and branches ------------------------------------------------------------------------------------------------

_BODIES = {LaunchKind.WHILE: (1,), LaunchKind.IF: (1, 2)}
"""Numbers of bodies that a launch may have, by kind."""


def _bodies(facts: _Facts) -> Iterator[Violation]:
    for launch in facts.launches:
        if len(launch.bodies) not in _BODIES.get(launch.kind, (0,)):
            yield launch, f"is of kind {launch.kind.value} and has {len(launch.bodies)} bodies"
        if not launch.bodies:
            continue
        slot, repeats = facts.slots.get((launch.index, DECIDES)), launch.kind is LaunchKind.WHILE
        nbytes = decided_by(launch.kind)
        if slot is None or not 0 <= slot.offset <= facts.allocations[slot.key].nbytes - nbytes:
            yield launch, f"is decided by {nbytes} bytes, to which its first word does not point"
        elif not launch.may_read(DECIDES) or (repeats and not launch.may_write(DECIDES, slot.key)):
            yield launch, "does not say that it uses what decides"
        for use in launch.uses or ():
            if use.writes and not use.reads:
                yield launch, f"may leave what word {use.word} points to as it was, and says that it is overwritten"
        for body in launch.bodies:
            for detail in _wrong_body(facts, launch, body):
                yield launch, f"has a body that {detail}"


def _wrong_body(facts: _Facts, launch: Launch, body: Program) -> Iterator[str]:
    """Defects of a body of ``launch``."""
    inside = _Facts(body)
    for name, rule in _RULES.items():
        for inner, detail in rule(inside):
            yield f"breaks the rule {name}: {'' if inner is None else f'l{inner.index} ({inner.name}) '}{detail}"
            return
    slots = {word: slot for (index, word), slot in facts.slots.items() if index == launch.index}
    if body.calls or len(body.steps) > 1:
        yield "is no single segment"
    if body.recording.outputs or body.layout.fresh:
        yield "returns something"
    if body.recording.device != facts.recording.device:
        yield f"runs on {body.recording.device}"
    if any(each.random for each in body.recording.launches) and not launch.random:
        yield "draws, which its launch does not say"
    sizes = [(WORKSPACE, body.layout.nbytes)]
    sizes += [(ARGUMENTS + index, each.nbytes) for (kind, index), each in inside.allocations.items() if kind is INPUT]
    for word, nbytes in sizes:
        slot = slots.get(word)
        if nbytes and (slot is None or not 0 <= slot.offset <= facts.allocations[slot.key].nbytes - nbytes):
            yield f"needs {nbytes} bytes at word {word}"
            return
    alignment, given = body.recording.alignment, slots.get(WORKSPACE)
    if given is not None and (
        given.kind is not POOL or facts.recording.alignment % alignment or given.offset % alignment
    ):
        yield f"needs a workspace that is aligned to {alignment} bytes"
    known = list(accesses_of(facts.recording, facts.program.slots))[launch.index]
    for inner, accesses in zip(inside.launches, accesses_of(body.recording, body.slots), strict=True):
        if known is None:
            continue
        if accesses is None:
            yield f"may use anything, by l{inner.index} ({inner.name}), which its launch does not say"
        for access in accesses or ():
            used = access if access.key[0] is CONSTANT else outside(body, access, slots)
            if used is None or not any(_includes(each, used) for each in known):
                reach = f"bytes {access.bytes.start} to {access.bytes.end} of {name_of(access.key)}"
                yield f"{'writes' if access.writes else 'reads'} {reach}, which its launch does not say"
    for index in body.written if known is None else ():
        if (slot := slots.get(ARGUMENTS + index)) is not None and not launch.may_write(slot.word, slot.key):
            yield f"may write {name_of((INPUT, index))}, which its launch does not say"
    for slot in body.slots:
        word = ARGUMENTS + slot.index if slot.kind is INPUT else WORKSPACE
        if inside.launches[slot.launch].may_read(slot.word) and not launch.may_read(word):
            yield f"may read {name_of(slot.key)}, which its launch does not say"


def _includes(known: Access, access: Access) -> bool:
    return known.key == access.key and known.bytes.covers(access.bytes) and known.writes >= access.writes


# -- eager calls and outputs -------------------------------------------------------------------------------------------


def _calls(facts: _Facts) -> Iterator[Violation]:
    drawn = 0
    for launch in facts.launches:
        call = launch.eager
        if call is None:
            continue
        if call.drawn < drawn:
            yield launch, f"draws at {call.drawn}, and what is before it at {drawn}"
        drawn = call.drawn
        owned = [result.layout for result in call.results if result.operand < 0]
        given = [None if operand.like is not None else operand.layout for operand in call.operands]
        for word, layout in enumerate([*given, *owned]):
            slot = facts.slots.get((launch.index, word))
            if layout is None or not layout.nbytes:
                continue
            if slot is None or (word >= len(given) and slot.kind is not POOL):
                yield launch, f"has no memory for tensor {word} of its call"
            elif slot.kind is POOL:
                yield from ((launch, detail) for detail in _beyond(facts, slot.key, slot.offset, layout))
            elif call.operands[word].argument not in (-1, slot.index):
                yield launch, f"is given {name_of(slot.key)} for argument {call.operands[word].argument}"
        count, places = len(given), list(_places_in(call.returned))
        if (leaf := _outside(call.leaves, count)) is not None:
            yield launch, f"is given operand {leaf}, and has {count}"
        if (operand := _outside([each.operand for each in call.results if each.operand != -1], count)) is not None:
            yield launch, f"returns operand {operand}, and has {count}"
        if (place := _outside(places, len(call.results))) is not None:
            yield launch, f"returns result {place}, and has {len(call.results)}"


def _outside(numbers: Iterable[int], count: int) -> int | None:
    """The first of ``numbers`` outside of ``range(count)``, or None."""
    return next((number for number in numbers if number not in range(count)), None)


def _places_in(returned: Any) -> Iterator[int]:
    """Numbers of results in the returned structure of a call."""
    if isinstance(returned, (list, tuple)):
        for each in returned:
            yield from _places_in(each)
    elif returned is not None:
        yield returned


def _outputs(facts: _Facts) -> Iterator[Violation]:
    outputs = facts.recording.outputs
    for position, output in enumerate(outputs):
        if output.kind is OutputKind.SAME:
            if output.index not in range(position) or outputs[output.index].kind is OutputKind.SAME:
                yield None, f"output {position} is that at {output.index}, which is no earlier one"
            continue
        key = facts.recording.owner(output)
        if key is not None and key not in facts.allocations:
            yield None, f"output {position} is {name_of(key)}, which is not allocated"
        elif key is not None and output.kind is OutputKind.FRESH and output.dtype is not None:
            layout = TensorLayout(output.size, output.stride, output.dtype)
            yield from ((None, detail) for detail in _beyond(facts, key, output.offset * layout.dtype.itemsize, layout))


def _beyond(facts: _Facts, key: _Key, offset: int, layout: TensorLayout) -> Iterator[str]:
    """Yield a defect if a tensor at byte ``offset`` leaves its allocation. An empty one may begin anywhere."""
    nbytes = facts.allocations[key].nbytes
    if layout.nbytes and not 0 <= offset <= nbytes - layout.nbytes:
        yield f"shows bytes {offset} to {offset + layout.nbytes} of {name_of(key)}, which has {nbytes}"


# -- order -------------------------------------------------------------------------------------------------------------


def _order(facts: _Facts) -> Iterator[Violation]:
    order, count = facts.program.order, len(facts.launches)
    if order is None:
        return
    if len(order.edges) != count or len(order.lanes) not in (0, count):
        yield None, f"orders {len(order.edges)} launches in {len(order.lanes)} lanes, and there are {count}"
        return
    for launch, waited in zip(facts.launches, order.edges, strict=True):
        for other in waited:
            if other not in range(launch.index):
                yield launch, f"waits for l{other}, which is no earlier one"
                return
    last: dict[int, int] = {}
    for launch, lane in zip(facts.launches, order.lanes, strict=False):
        other = last.get(lane, launch.index)
        if other != launch.index and not facts.before[launch.index] >> other & 1:
            yield launch, f"does not wait for l{other}, the one before it in lane {lane}"
        last[lane] = launch.index


def _waits(facts: _Facts) -> Iterator[Violation]:
    return iter(()) if facts.program.order is None else _unordered(facts.program, facts.before)


def _unordered(
    program: Program, before: Sequence[int], places: _Places | None = None, gone: Collection[int] = ()
) -> Iterator[Violation]:
    """Launches of a step that do not wait for one on which they depend. With ``places``, intermediates that share bytes
    are the same memory; without, the rules on memory check these."""
    accesses = list(accesses_of(program.recording, program.slots))
    for number, (begin, end) in enumerate([(step.begin, step.end) for step in program.steps]):
        table: Waits[Hashable] = Waits()
        for launch in program.recording.launches[begin:end]:
            if launch.index in gone:
                continue
            used = accesses[launch.index]
            physical = None if used is None else [_moved(places or {}, number, access) for access in used]
            for other in sorted(table.add(launch.index, physical, chains(launch))):
                if not before[launch.index] >> other & 1:
                    yield launch, f"does not wait for l{other} ({program.recording.launches[other].name})"


_Places: TypeAlias = Mapping[int, Sequence[tuple[int, int, Hashable, int]]]
"""Places of intermediates: for each, (first step, last step, block, byte in the block)."""


def _places(program: Program) -> _Places:
    """Places of the intermediates of ``program``."""
    found: dict[int, list[tuple[int, int, Hashable, int]]] = {}
    for number, step in enumerate(program.steps):
        for block, (_, died, offsets) in enumerate(step.blocks):
            for index, offset in offsets.items():
                found.setdefault(index, []).append((number, died, ("block", number, block), offset))
    return found


def _moved(places: _Places, step: int, access: Access) -> tuple[Hashable, Bytes, bool]:
    """Memory, bytes and writing of ``access`` in step number ``step``, with intermediates at their ``places``."""
    kind, index = access.key
    if kind is POOL:
        for first, last, block, offset in places.get(index, ()):
            if first <= step <= last:
                return block, access.bytes.moved(offset), access.writes
    return access.key, access.bytes, access.writes


def _renamed(facts: _Facts) -> Iterator[Violation]:
    captured: dict[int, list[tuple[_Life, _Key]]] = {}
    for key, life in facts.lives.items():
        allocation = facts.allocations[key]
        if key[0] is POOL and allocation.nbytes:
            captured.setdefault(allocation.address, []).append((life, key))
    for parts in captured.values():
        for (earlier, name), (life, key) in pairwise(sorted(parts, key=lambda part: part[0].first)):
            launch = facts.launches[life.first]
            if earlier.last >= life.first:
                yield (
                    launch,
                    f"uses {name_of(key)}, and l{earlier.last} still {name_of(name)}: they were one when captured",
                )
            owners = (facts.slots.get((launch.index, use.word)) for use in launch.uses or () if use.reads)
            if any(slot is not None and slot.key == key for slot in owners):
                yield launch, f"reads {name_of(key)}, which begins there: it was {name_of(name)} when captured"


# -- memory and steps --------------------------------------------------------------------------------------------------


def _layout(facts: _Facts) -> Iterator[Violation]:
    program, layout = facts.program, facts.program.layout
    yield from facts.misplaced("the workspace", layout.nbytes, layout.offsets)
    returned = returned_by_calls(program.recording, program.slots)
    wanted = (facts.outputs | used_by_calls(program.recording, program.slots)) - returned
    pool = {index for kind, index in facts.allocations if kind is POOL}
    for detail, wrong in (
        ("needs memory of its own, as an output or of an eager call", wanted.difference(layout.fresh)),
        ("has memory of its own, and is returned by an eager call, or none", set(layout.fresh) - (pool - returned)),
        ("has two places", set(layout.fresh).union(returned).intersection(layout.offsets)),
    ):
        for index in sorted(wrong):
            yield None, f"{name_of((POOL, index))} {detail}"
    places = {*layout.offsets, *layout.fresh, *returned}
    for (kind, index), life in facts.lives.items():
        if kind is POOL and index not in places:
            yield facts.launches[life.first], f"uses {name_of((kind, index))}, which has no place"
    yield from facts.clobbered(layout.offsets)


def _steps(facts: _Facts) -> Iterator[Violation]:
    reached, count = 0, len(facts.launches)
    for number, step in enumerate(facts.program.steps):
        begin, end = step.begin, step.end
        if begin != reached or not begin <= end <= count or (begin == end and count):
            yield None, f"step {number} is launches {begin} to {end}, and {reached} is next of {count}"
            return
        reached = end
        calls = [launch for launch in facts.launches[begin:end] if launch.eager is not None]
        if isinstance(step, EagerStep):
            if end != begin + 1 or [step.call] != [launch.eager for launch in calls]:
                yield facts.launches[begin], f"is no step of one eager call, as step {number} says"
        elif calls:
            yield calls[0], f"is an eager call within the segment of step {number}"
    if reached != count:
        yield facts.launches[reached], "is in no step"


def _memory(facts: _Facts) -> Iterator[Violation]:
    program, steps, end = facts.program, facts.program.steps, len(facts.program.steps) - 1
    where = [number for number, step in enumerate(steps) for _ in range(step.begin, step.end)]
    held: dict[int, tuple[int, int]] = {}  # the first and last step in which an intermediate has memory
    owned: dict[int, int] = {}  # the step that allocates memory of its own, by allocation
    for slot in program.slots:
        call = facts.launches[slot.launch].eager
        if call is not None and slot.kind is POOL and slot.word >= len(call.operands):
            owned[slot.index] = where[slot.launch]
    returned = frozenset(owned)
    for number, step in enumerate(steps):
        for nbytes, died, offsets in step.blocks:
            yield from facts.misplaced(f"a block of step {number}", nbytes, offsets)
            if died not in range(number, end + 1):
                yield None, f"a block of step {number} lives until step {died} of {end}"
            if twice := sorted(held.keys() & offsets.keys()):
                yield None, f"step {number} has a second place for {name_of((POOL, twice[0]))}"
            held.update(dict.fromkeys(offsets, (number, died)))
            yield from facts.clobbered(offsets)
        for index in step.taken:
            if index in owned or index not in program.layout.fresh:
                yield None, f"step {number} takes {name_of((POOL, index))}, which is not for it to take"
            owned[index] = number
    released: dict[int, int] = {}
    for number, step in enumerate(steps):
        for index in step.released:
            if index not in owned or index in released or index in facts.outputs:
                name = name_of((POOL, index))
                yield None, f"step {number} releases {name}, which is not for it to release"
            released[index] = number
    for index in sorted(owned.keys() & held.keys()):
        yield None, f"{name_of((POOL, index))} has memory of its own, and a place in a block"
    held.update({index: (number, released.get(index, end)) for index, number in owned.items()})
    for index in sorted({*facts.outputs, *program.layout.fresh} - owned.keys() - returned):
        yield None, f"no step takes {name_of((POOL, index))}"
    gone: dict[int, int] = {}
    needed = {o.index for o in facts.recording.outputs if o.kind in (OutputKind.ARGUMENT, OutputKind.VIEW)}
    for number, step in enumerate(steps):
        for index in step.dead:
            if (INPUT, index) not in facts.allocations or index in needed or index in gone:
                yield None, f"step {number} drops {name_of((INPUT, index))}, which is not for it to drop"
            gone[index] = number
    for (kind, index), life in facts.lives.items():
        first, last = where[life.first], where[life.last]
        if kind is POOL and index not in held:
            yield facts.launches[life.first], f"uses {name_of((kind, index))}, which has no memory"
            continue
        born, died = held[index] if kind is POOL else (0, gone.get(index, end))
        if first < born:
            detail = f"in step {first}, which has memory from step {born} on"
            yield facts.launches[life.first], f"uses {name_of((kind, index))} {detail}"
        if last > died:
            detail = f"in step {last}, which is let go of after step {died}"
            yield facts.launches[life.last], f"uses {name_of((kind, index))} {detail}"


_RULES: dict[str, Callable[[_Facts], Iterator[Violation]]] = {
    "numbers": _numbers,
    "words": _words,
    "uses": _uses,
    "bodies": _bodies,
    "calls": _calls,
    "outputs": _outputs,
    "steps": _steps,
    "order": _order,
    "waits": _waits,
    "renamed": _renamed,
    "layout": _layout,
    "memory": _memory,
}
"""Rules in the order of their checks: each may rely on those before it."""
