"""Slot discovery: which parameter words of a capture are addresses, and into what they point.

Pure functions over two Recordings made with disjoint memory; ``proof`` needs only one if all of its kernels are proven.
A doubt is a Refusal: an address mistaken for a number would read or write memory that the caller no longer owns.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import NamedTuple

from pygraph.program.program import NonPointerWord, Slot
from pygraph.program.recording import Allocation, AllocationKind, Launch, LaunchKind, Output, Recording, UnownedMemory
from pygraph.runtime.provenance import Refusal

SPORADIC = (
    "half-address",
    "unpaired-address",
    "stray-address",
    "unstable-allocations",
    "unstable-order",
    "unmoved-address",
    "foreign-address",
)
"""Doubts that uninitialised parts of parameters can raise: their contents may differ in another capture. Streams that
are made anew for each call can raise them, too: torch hands out 32 in turn, so that two are the same now and then."""

_Shape = tuple[tuple[LaunchKind, str, int], ...]

_REACH = 1 << 20
"""Bytes (1 MiB) by which a kernel's pointer may lie outside of its tensor, plus 4 times the tensor's size: convolutions
begin where padding would be, some rows of pixels before it."""

_PAIRS = 1 << 44
"""Below this, an address may as well be two 32-bit numbers in one word. Above, the upper number would exceed 4096, and
the lower one would still have to be exactly where somebody's memory begins."""

OF_ATEN = "_ZN2at6native"
"""Prefix of the symbols of ATen's own kernels. Their parameters are addresses of tensors' elements, at offsets that
follow from sizes. A library's kernels may round addresses in a workspace up, so that offsets depend on its address."""

_CLEARED = 0xFFFF
"""The low bytes of a word that is left of an earlier address, partly overwritten by shorter values."""


@dataclass(frozen=True, slots=True)
class SlotTable:
    """The slots of a capture, and its launch sequence (kinds, names, numbers of words).

    ``padding``: (launch, word) of words that differ between captures and are not an address in either;
    ``non_pointers``: words that read as addresses, but are not operands.
    """

    slots: tuple[Slot, ...]
    padding: tuple[tuple[int, int], ...]
    sequence: _Shape
    non_pointers: tuple[NonPointerWord, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for reports."""
        notes = [f"{self.sequence[i][1]}: word {w} differs between captures and is no address" for i, w in self.padding]
        for scratch, what in (
            (True, "that nobody sets point at scratch memory"),
            (False, "read as addresses of what their calls do not use: left as captured"),
        ):
            words = [word for word in self.non_pointers if word.scratch is scratch]
            if words:
                name, one = self.sequence[words[0].launch][1], words[0]
                first = f"{name} word {one.word} of {one.call or 'an unknown call'}"
                notes.append(f"{len(words)} word{'s' if len(words) > 1 else ''} {what} (first: {first})")
        return tuple(notes)


# -- addresses in one capture -----------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A word read as an address: ``offset`` bytes into the allocation ``key``.

    ``rank``: 0 inside, 1 one past the end, 2 the start of an empty allocation. The last two are never dereferenced, and
    matter only when nothing of a lower rank explains the word.
    """

    key: tuple[AllocationKind, int]
    offset: int
    rank: int


class AddressMap:
    """The ``moving`` allocations of a capture by address: those that a replay replaces. They exclude constants and null
    pointers. ``overlap``: the first two that share a byte, if any do."""

    def __init__(self, allocations: Iterable[Allocation]) -> None:
        self.moving = [a for a in allocations if a.kind is not AllocationKind.CONSTANT and a.address]
        self._solid = sorted((a for a in self.moving if a.nbytes), key=lambda a: a.address)
        self._starts = [a.address for a in self._solid]
        self._ends = {a.address + a.nbytes: a for a in self._solid}
        self._empty = {a.address: a for a in reversed(self.moving) if not a.nbytes}
        pairs = ((low, high) for low, high in pairwise(self._solid) if high.address < low.address + low.nbytes)
        self.overlap = next(pairs, None)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first address of any, and the one after the last that counts as one; both 0 if there are none."""
        if not self.moving:
            return 0, 0
        return min(each.address for each in self.moving), 1 + max(each.address + each.nbytes for each in self.moving)

    def inside(self, word: int) -> Allocation | None:
        """The allocation into which ``word`` points, born or not."""
        position = bisect_right(self._starts, word) - 1
        found = self._solid[position] if position >= 0 else None
        return found if found is not None and word < found.address + found.nbytes else None

    def empty(self, word: int) -> Allocation | None:
        """The first allocation without bytes that begins at ``word``."""
        return self._empty.get(word)

    def places(self, word: int, launch: int) -> list[Place]:
        """All readings of ``word`` as an address into allocations born by ``launch``, the most certain first."""
        inside, end, empty = self.inside(word), self._ends.get(word), self._empty.get(word)
        if inside is not None and end is None and empty is None:  # as nearly always
            return [Place(inside.key, word - inside.address, 0)] if inside.born <= launch else []
        readings = enumerate((inside, end, empty))
        return [Place(a.key, word - a.address, rank) for rank, a in readings if a is not None and a.born <= launch]


# -- two captures -----------------------------------------------------------------------------------------------------


def discover(first: Recording, second: Recording, known: Sequence[Allocation] = ()) -> SlotTable | Refusal:
    """Compare two captures of one region word by word.

    ``known``: memory, not allocated by a capture, into which no word may point, such as the caller's real tensors. A
    word that differs is a slot if in both captures it lies at the same offset of corresponding allocations that were
    live at its launch. One past the end counts as an offset, unless another allocation begins there. In captures with
    ``out_of_range_pointers``, an address outside belongs to the one live allocation that moved by the same distance.

    A launch with a known ``may_access`` uses nothing else. Its words that read as addresses of other memory are
    numbers, or uninitialised bytes: inert. They keep their captured bytes, since a word that reads as an address may be
    a number in part. There is one exception: a word that is exactly the start of somebody's memory is not a number. It
    is replaced by a scratch address, so that comparison shows whether it is used after all.
    """
    doubt = _unstable(first, second) or _overlapping(first, second) or _counting(first, second)
    if doubt is not None:
        return doubt
    pair = _Pair(first, second, known)
    python = {call.name for call in first.python}
    explained = {index for call in first.python for launches in call.explained for index in launches}
    slots: list[Slot] = []
    padding: list[tuple[int, int]] = []
    non_pointers: list[NonPointerWord] = []
    for a, b in zip(first.launches, second.launches, strict=True):
        for position in pair.doubtful(a, b):
            verdict = pair.verdict(a, b, position)
            if isinstance(verdict, Refusal):
                return verdict
            if isinstance(verdict, Slot):
                slots.append(verdict)
            elif verdict is not None:
                non_pointers.append(verdict)
            elif a.words[position] != b.words[position]:
                if a.call in python and a.index not in explained:
                    said = f"word {position} is another number in the second capture of {a.call}"
                    return Refusal.at(a, "unstable-number", f"{said}, which depends on more than its arguments")
                padding.append((a.index, position))
    return SlotTable(tuple(slots), tuple(padding), sequence(first), tuple(non_pointers))


def sequence(recording: Recording) -> _Shape:
    return tuple((launch.kind, launch.name, len(launch.words)) for launch in recording.launches)


def _counting(first: Recording, second: Recording) -> Refusal | None:
    """A doubt if an operator written in Python passed other numbers to ATen operators in the second capture."""
    for one, other in zip(first.python, second.python, strict=False):
        for call, again in zip_longest(one.calls, other.calls, fillvalue="nothing"):
            if call != again:
                said = f"{one.name} calls {call}, then {again}: it depends on more than its arguments"
                return Refusal("unstable-number", said, one.name, one.loc, one.nodes, (one.name,))
    return None


class _Pair:
    """Two captures in comparison. ``moves``: allocations by the number of bytes that they moved between the two; with
    ``out_of_range_pointers``, only this may identify the allocation of an address outside of all of them."""

    def __init__(self, first: Recording, second: Recording, known: Sequence[Allocation]) -> None:
        self.left, self.right = AddressMap(first.allocations), AddressMap(second.allocations)
        self.known = AddressMap(known)
        self.out_of_range_pointers = first.out_of_range_pointers and second.out_of_range_pointers
        there = {a.key: a.address for a in self.right.moving}
        self.moves: dict[int, list[Allocation]] = {}
        for allocation in self.left.moving:
            self.moves.setdefault(there[allocation.key] - allocation.address, []).append(allocation)
        self._bounds = [each.bounds for each in (self.left, self.right, self.known)]

    def doubtful(self, a: Launch, b: Launch) -> list[int]:
        """The words of a launch that need a verdict. This excludes numbers, some ten thousand in a large region, that
        are the same in both captures, and far from all memory."""
        (first, behind), (low, high), (start, end) = self._bounds
        unowned = {each.word for each in (*a.unowned, *b.unowned)}
        return [
            position
            for position, (x, y) in enumerate(zip(a.words, b.words, strict=True))
            if x != y or first <= x < behind or low <= x < high or start <= x < end or position in unowned
        ]

    def verdict(self, a: Launch, b: Launch, position: int) -> Slot | NonPointerWord | Refusal | None:
        """The kind of a word, by both captures: a slot, inert, a doubt, or None for a number."""
        x, y = a.words[position], b.words[position]
        verdict = self._unmoved(a, position, x) if x == y else self._moved(a, position, x, y)
        if isinstance(verdict, Slot):
            return verdict
        if isinstance(verdict, Refusal) and not self._cannot_matter(a, b, position, verdict):
            return verdict
        if x == y and a.functional and (found := a.unowned_at(position)) and found.memory is UnownedMemory.OTHER:
            return None  # memory of the communicator, and constant like it
        inert = foreign(a, position)
        if inert is None and b.may_access is None:
            inert = foreign(b, position)
        if inert is not None or verdict is None:
            return inert
        return NonPointerWord(a.index, position, call=a.call or "")

    def _cannot_matter(self, a: Launch, b: Launch, position: int, doubt: Refusal) -> bool:
        """True if a doubtful word does not read as an address of anything that its launch can use. A word that is equal
        in both captures does not point at an operand in at least one of them. In an ATen kernel, a word that points at
        two places of one allocation, with its low bytes zero, is partly left on the stack by an earlier kernel of the
        call. So is a word that is an address in one capture only, if the call has the same operands in both."""
        if a.may_access is None or b.may_access is None or doubt.reason == "ambiguous-address":
            return False
        x, y = a.words[position], b.words[position]
        if x == y:
            return self.known.inside(x) is None or a.unowned_at(position) is not None
        of_aten = a.name.startswith(OF_ATEN)
        if of_aten and doubt.reason == "half-address" and a.may_access == b.may_access:
            return a.unowned_at(position) is None and b.unowned_at(position) is None
        left = {each.key for each in self.left.places(x, a.index)}
        right = {each.key for each in self.right.places(y, b.index)}
        apart = left == right and doubt.reason == "unpaired-address"
        if apart and of_aten and not (x | y) & _CLEARED:
            return True
        left |= {mover.key for mover in self.moves.get(y - x, ())}
        return not (left & a.may_access or right & b.may_access)

    def _moved(self, launch: Launch, position: int, x: int, y: int) -> Slot | Refusal | None:
        """The kind of a word that differs: a slot, a doubt, or (None) padding."""
        left, right = self.left.places(x, launch.index), self.right.places(y, launch.index)
        unborn = self.left.inside(x) or self.right.inside(y)
        common = [place for place in left if place in right]
        if len(common) > 1 and common[1].rank == 1:
            said = "is the end of one allocation and the start of another"
            return Refusal.at(launch, "ambiguous-address", f"word {position} {said}")
        if common:
            return Slot(launch.index, position, *common[0].key, common[0].offset)
        movers = [mover for mover in self.moves.get(y - x, ()) if _near(mover, x)]
        if self.out_of_range_pointers and len(movers) == 1 and movers[0].born <= launch.index:
            return Slot(launch.index, position, *movers[0].key, x - movers[0].address)
        if left and right:
            reason, said = "unpaired-address", f"points into {_name(left[0].key)}, then {_name(right[0].key)}"
        elif left or right:
            reason, said = "half-address", f"points into {_name((left or right)[0].key)} in one capture only"
        elif movers:
            reason, said = "stray-address", "moves with an allocation that it lies outside of"
        elif unborn is not None:
            reason, said = "half-address", f"points into {_name(unborn.key)} in one capture only, and too early"
        else:
            return None
        return Refusal.at(launch, reason, f"word {position} {said}")

    def _unmoved(self, launch: Launch, position: int, word: int) -> Refusal | None:
        """A doubt about a word that is equal in both captures, or None: a number, or the address of a constant."""
        found = self.left.inside(word) or self.right.inside(word) or self.known.inside(word)
        if found is None:
            return None
        said = f"is the same in both captures and lies in {_name(found.key)}"
        return Refusal.at(launch, "unmoved-address", f"word {position} {said}")


def _near(allocation: Allocation, address: int) -> bool:
    """True if an address may have been computed from the start of ``allocation``. Half a word of an earlier address,
    next to a number, moves like that address, but lies nowhere near it."""
    reach = _REACH + 4 * allocation.nbytes
    return allocation.address - reach <= address <= allocation.address + allocation.nbytes + reach


def foreign(launch: Launch, position: int) -> NonPointerWord | Refusal | None:
    """The kind of a word that reads as an address of memory with no known owner; None for all others."""
    found = launch.unowned_at(position)
    if found is None:
        return None
    replaced = found.memory is UnownedMemory.BLOCK
    unsure = found.memory is UnownedMemory.OTHER or (replaced and launch.words[position] < _PAIRS)
    if launch.may_access is None or unsure:
        caller = f" (in a call of {launch.call})" if launch.call else ""
        return Refusal.at(launch, "foreign-address", f"word {position} is {found.detail}{caller}")
    return NonPointerWord(launch.index, position, scratch=replaced, call=launch.call or "")


def _unstable(first: Recording, second: Recording) -> Refusal | None:
    """A doubt if the two captures did different things."""
    if len(first.launches) != len(second.launches):
        return Refusal("unstable-launches", f"{len(first.launches)} launches, then {len(second.launches)}")
    for a, b in zip(first.launches, second.launches, strict=True):
        if (a.kind, a.name, len(a.words)) != (b.kind, b.name, len(b.words)):
            return Refusal.at(a, "unstable-launches", f"launch {a.index} was {a.name}, then {b.name}")
        if any(getattr(a, fact) != getattr(b, fact) for fact in ("signature", "geometry", "uses", "random")):
            return Refusal.at(a, "unstable-launches", f"launch {a.index} did not do the same twice")
    if [(each.kind, each.bounds) for each in first.nests] != [(each.kind, each.bounds) for each in second.nests]:
        return Refusal("unstable-launches", "loops and branches have other bodies in the second capture")
    if first.phases != second.phases:
        return Refusal("unstable-order", "the same launches are put in another order by the second capture")
    doubt = _unstable_allocations(first, second)
    if doubt is not None:
        return doubt
    same = len(first.outputs) == len(second.outputs) and all(map(_same_output, first.outputs, second.outputs))
    return None if same else Refusal("unstable-outputs", "the captures did not return the same")


def _unstable_allocations(first: Recording, second: Recording) -> Refusal | None:
    """A doubt if the captures did not allocate alike, with the first allocation that differs."""
    if first.offset_sensitive != second.offset_sensitive:
        return Refusal("unstable-allocations", "other storage offsets were baked into the second capture")
    pairs = zip_longest(map(_described, first.allocations), map(_described, second.allocations), fillvalue="nothing")
    for a, b in pairs:
        if a != b:
            counts = f"{len(first.allocations)} allocations, then {len(second.allocations)}"
            return Refusal("unstable-allocations", f"{a}, then {b} ({counts})")
    return None


def _described(allocation: Allocation) -> str:
    """All facts of an allocation that must not change, including the address of a constant, and a null pointer."""
    fixed = allocation.kind is AllocationKind.CONSTANT or not allocation.address
    where = f" at {allocation.address:#x}" if fixed else ""
    return f"{_name(allocation.key)} of {allocation.nbytes} bytes before launch {allocation.born}{where}"


def _same_output(a: Output, b: Output) -> bool:
    if replace(a, value=None) != replace(b, value=None):
        return False
    scalar = isinstance(a.value, (bool, int, float, complex, str)) and type(a.value) is type(b.value)
    return a.value is b.value or (scalar and repr(a.value) == repr(b.value))


def _overlapping(first: Recording, second: Recording) -> Refusal | None:
    """A doubt if the captures share memory, with each other or among their own allocations."""
    for reason, said, allocations in (
        ("ambiguous-address", "overlap in one capture", first.allocations),
        ("ambiguous-address", "overlap in one capture", second.allocations),
        ("captures-overlap", "of two captures share memory", (*first.allocations, *second.allocations)),
    ):
        shared = AddressMap(allocations).overlap
        if shared is not None:
            return Refusal(reason, f"{_name(shared[0].key)} and {_name(shared[1].key)} {said}")
    return None


def _name(key: tuple[AllocationKind, int]) -> str:
    return f"{key[0].value} {key[1]}"
