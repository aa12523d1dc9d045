"""Which words of a captured launch's memory are read and which may be written, from what the region's calls said.

An extent inside an allocation is not known of a kernel: all of the allocation counts. Copies and fills are exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.observation import Span
from pygraph.runtime.recording import Access, Allocation, AllocationKind, Launch, LaunchKind

__all__ = ["with_accesses"]

_Key = tuple[AllocationKind, int]


def with_accesses(
    launches: Sequence[Launch],
    spans: Sequence[Span],
    allocations: Sequence[Allocation],
    random: Sequence[int],
    own: Callable[[int], bool],
) -> tuple[Launch, ...]:
    """``launches`` with their accesses, None where nobody explained them, or where a word is an address between
    ``allocations`` (as ``own`` tells). Those that use a word of ``random`` draw."""
    addresses = AddressMap(allocations)
    begins = [span.begin for span in spans]
    made: list[Launch] = []
    for launch in launches:
        span = spans[bisect_right(begins, launch.index) - 1] if spans else None
        inside = span if span is not None and span.begin <= launch.index < span.end else None
        draws = any(word in random for word in launch.words)
        only_read = _only_read(inside, addresses)
        accesses = _accesses(launch, inside, only_read, addresses, own)
        made.append(replace(launch, accesses=accesses, random=draws, read_only=only_read))
    return tuple(made)


def _only_read(span: Span | None, addresses: AddressMap) -> frozenset[_Key]:
    """Allocations that a call was given and does not write."""
    return frozenset() if span is None else _owners(span.reads, addresses) - _owners(span.writes, addresses)


def _accesses(
    launch: Launch,
    span: Span | None,
    only_read: frozenset[_Key],
    addresses: AddressMap,
    own: Callable[[int], bool],
) -> tuple[Access, ...] | None:
    if launch.kind is LaunchKind.MEMCPY:
        nbytes = _nbytes(launch)
        return (Access(0, 0, nbytes, False, True), Access(1, 0, nbytes, True, False))
    if launch.kind is LaunchKind.MEMSET:
        return (Access(0, 0, _nbytes(launch), False, True),)
    if launch.kind is LaunchKind.OPERATOR:
        return ()
    if span is None:
        return None
    found: list[Access] = []
    for position, word in enumerate(launch.words):
        owner = addresses.inside(word)
        if owner is None and own(word) and not addresses.ends(word):
            return None
        if owner is not None:
            writes = owner.key not in only_read
            found.append(Access(position, owner.address - word, owner.nbytes, reads=True, writes=writes))
    return tuple(found)


def _nbytes(launch: Launch) -> int:
    """Bytes of a one-dimensional copy or fill, from its signature."""
    facts = launch.signature
    if not isinstance(facts, tuple):
        raise TypeError("a copy's signature is a tuple")
    return int(facts[0]) if launch.kind is LaunchKind.MEMCPY else int(facts[1]) * int(facts[2])


def _owners(words: Iterable[int], addresses: AddressMap) -> frozenset[_Key]:
    return frozenset(owner.key for owner in map(addresses.inside, words) if owner is not None)
