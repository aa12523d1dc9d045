"""What is known of the memory that captured launches touch: what they can reach, what they only read, which draw.

Which words of a kernel are addresses is not known from one capture, so that its accesses stay unknown here. Copies
and fills are exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.observation import Span
from pygraph.runtime.recording import Access, Allocation, AllocationKind, Launch, LaunchKind

__all__ = ["with_accesses"]

_Key = tuple[AllocationKind, int]

_CLOSED = "aten."
"""How the names of calls begin that use their operands, what they allocate, the generator and libraries' own memory."""


def with_accesses(
    launches: Sequence[Launch],
    spans: Sequence[Span],
    allocations: Sequence[Allocation],
    random: Sequence[int],
) -> tuple[Launch, ...]:
    """``launches`` with what the calls that they came from (``spans``) say of them. Those that use a word of
    ``random`` draw."""
    addresses, reach = AddressMap(allocations), _Reach(allocations)
    begins = [span.begin for span in spans]
    made: list[Launch] = []
    for launch in launches:
        draws = any(word in random for word in launch.words)
        known = replace(launch, accesses=_accesses(launch), random=draws)
        number = bisect_right(begins, launch.index) - 1
        if number < 0 or launch.index >= spans[number].end:
            made.append(known)
            continue
        span = spans[number]
        known = replace(known, loc=span.origin.loc, nodes=span.origin.nodes, call=span.name)
        known = replace(known, nondeterministic=span.nondeterministic)
        limits = reach.of(span) if launch.kind is LaunchKind.KERNEL else None
        made.append(replace(known, read_only=_only_read(span, addresses), may_access=limits))
    return tuple(made)


class _Reach:
    """What a call can use at all, where that is known: for operators of ATen, which keep no memory to themselves."""

    def __init__(self, allocations: Sequence[Allocation]) -> None:
        self._addresses = AddressMap(allocations)
        self._pool = sorted((a for a in allocations if a.kind is AllocationKind.POOL), key=lambda a: a.born)
        self._births = [a.born for a in self._pool]
        self._constants = [a for a in allocations if a.kind is AllocationKind.CONSTANT]
        self._end = 1 + max((a.born for a in allocations), default=0)

    def of(self, span: Span) -> frozenset[_Key] | None:
        """The allocations that the call was given, and those that it may have made. None for other libraries' calls,
        and where the call was given memory of nobody's."""
        if not span.name.startswith(_CLOSED):
            return None
        given: set[_Key] = set()
        for word in filter(None, (*span.reads, *span.writes)):
            owners = {place.key for place in self._addresses.places(word, self._end)}
            if not owners and not any(constant.covers(word) for constant in self._constants):
                return None
            given |= owners
        first, last = bisect_left(self._births, span.begin), bisect_right(self._births, span.end)
        return frozenset(given.union(a.key for a in self._pool[first:last]))


def _only_read(span: Span, addresses: AddressMap) -> frozenset[_Key]:
    """Allocations that a call was given and does not write."""
    return _owners(span.reads, addresses) - _owners(span.writes, addresses)


def _owners(words: Iterable[int], addresses: AddressMap) -> frozenset[_Key]:
    return frozenset(owner.key for owner in map(addresses.inside, words) if owner is not None)


def _accesses(launch: Launch) -> tuple[Access, ...] | None:
    if launch.kind is LaunchKind.MEMCPY:
        nbytes = _nbytes(launch)
        return (Access(0, 0, nbytes, False, True), Access(1, 0, nbytes, True, False))
    if launch.kind is LaunchKind.MEMSET:
        return (Access(0, 0, _nbytes(launch), False, True),)
    return () if launch.kind is LaunchKind.OPERATOR else None


def _nbytes(launch: Launch) -> int:
    """Bytes of a one-dimensional copy or fill, from its signature."""
    facts = launch.signature
    if not isinstance(facts, tuple):
        raise TypeError("a copy's signature is a tuple")
    return int(facts[0]) if launch.kind is LaunchKind.MEMCPY else int(facts[1]) * int(facts[2])
