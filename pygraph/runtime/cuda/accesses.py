"""What is known of the memory that captured launches touch: which allocations they only read, and which draw.

Which words of a kernel are addresses is not known from one capture, so that its accesses stay unknown here. Copies
and fills are exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pygraph.runtime.addresses import AddressMap
from pygraph.runtime.cuda.observation import Span
from pygraph.runtime.recording import Access, Allocation, AllocationKind, Launch, LaunchKind

__all__ = ["with_accesses"]

_Key = tuple[AllocationKind, int]


def with_accesses(
    launches: Sequence[Launch], spans: Sequence[Span], allocations: Sequence[Allocation], random: Sequence[int]
) -> tuple[Launch, ...]:
    """``launches`` with what the calls that they came from (``spans``) say of them. Those that use a word of
    ``random`` draw."""
    addresses = AddressMap(allocations)
    begins = [span.begin for span in spans]
    made: list[Launch] = []
    for launch in launches:
        span = spans[bisect_right(begins, launch.index) - 1] if spans else None
        inside = span is not None and span.begin <= launch.index < span.end
        only_read = _only_read(span, addresses) if span is not None and inside else frozenset()
        draws = any(word in random for word in launch.words)
        made.append(replace(launch, accesses=_accesses(launch), random=draws, read_only=only_read))
    return tuple(made)


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
