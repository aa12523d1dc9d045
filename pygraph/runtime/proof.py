"""Proven kernels of a region: a capture of only such kernels is used without being compared.

    size 4    captured twice, compared     proves its kernels, and which of their words are addresses
    size 6    captured once                the same kernels with the same dependences: replayed at once
    size 8    captured once, compared      a matrix product chose a kernel that the region never had

A kernel is proven once a replay that contained it was judged right in this region. That shows that the patched words
are all of its addresses, and that it does nothing which a replay leaves out. Both follow from its code, not from sizes.
Facts that depend on sizes are read anew from each capture: numbers, grids, the allocation of each address, and the
memory that each launch uses.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from pygraph.cache import kept_under, load_json, store_json, warn_once
from pygraph.program.program import NonPointerWord, Program, Slot
from pygraph.program.recording import Allocation, AllocationKind, Launch, Recording
from pygraph.runtime.identity import program_key
from pygraph.runtime.slots import AddressMap, SlotTable, foreign, sequence
from pygraph.version import PACKAGE, package_digest

__all__ = ["Proof", "proof_path"]

_log = logging.getLogger("pygraph.runtime")

_Addresses = dict[str, set[frozenset[int]]]
"""By kernel, the sets of words that were replaced in its launches: an operand may be missing in some."""

_WRONG = "a replay of what was proven was wrong"
"""Contents of the file in place of proofs, once one was wrong."""

_NEAR = 1 << 24
"""Bytes (16 MiB) around the memory of a capture in which an address of an unproven kernel, outside of its tensor, may
lie."""


def proof_path(fn: Callable[..., Any], args: Sequence[Any], cache_dir: str | None, passes: str) -> Path | None:
    """The file in ``cache_dir`` for proofs of ``fn``, with launch passes of the key ``passes``; None if nothing is
    kept. The file's key covers everything on which a proof depends, this package's source included."""
    program = None if cache_dir is None else program_key(fn, args)
    key = program and (package_digest(PACKAGE), *program, passes)
    return None if key is None else kept_under(cache_dir, "proofs", key)


class Proof:
    """The kernels that are proven in one region, and the dependences between their launches.

    Args:
        path: file of this region, which other processes may write as well; None: nothing is kept
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._addresses: _Addresses = {}
        self._met = False
        """True once this process has proven something itself."""
        self._structures: set[str] = set()
        self._load()

    @property
    def kept(self) -> bool:
        """True if an earlier process has proven kernels, and this one has proven nothing itself yet."""
        return bool(self._addresses) and not self._met

    def add(self, program: Program) -> None:
        """Add the kernels of ``program``, of which a replay was judged right."""
        new, self._met = False, True
        for launch, words in zip(program.recording.launches, _patched(program), strict=True):
            known = self._addresses.setdefault(_kernel(launch), set())
            new = new or words not in known
            known.add(words)
        structure = _structure(program)
        new = new or structure not in self._structures
        self._structures.add(structure)
        if new:
            self._store()

    def forget(self) -> None:
        """Drop all proofs, here and on disk. Other processes drop theirs, and stop using the file, when they next read
        it."""
        self._addresses, self._structures = {}, set()
        path, self._path = self._path, None
        try:
            if path is not None:
                store_json(path, _WRONG)
        except (OSError, ValueError) as error:
            _log.warning("what was proven wrongly stays on disk, for later processes: remove it: %s", error)

    def covers(self, program: Program) -> bool:
        """True if a replay of ``program`` need not be compared: its kernels are proven, and their dependences are those
        of a proven program. Operators that may have internal state are never proven."""
        launches = program.recording.launches
        if program.recording.python or not all(map(_is_closed, launches)):
            return False
        pairs = zip(launches, _patched(program), strict=True)
        known = all(words in self._addresses.get(_kernel(launch), ()) for launch, words in pairs)
        return known and _structure(program) in self._structures

    def resolve(self, recording: Recording, memory: Sequence[Allocation] = ()) -> SlotTable | None:
        """The slots of a single capture. Each word that lies in memory of the capture is a slot.

        Returns None, so that a second capture is made, if nothing is proven yet, or if a word does not point to a
        single place, or may be an address of somebody else's ``memory``. If the addresses of a launch are not those of
        a proven kernel, it has to be one of ATen, with addresses only of memory that its call can use. None of its
        other words may lie near the capture's memory, as one of a kernel that begins before its tensor does. Words that
        lie elsewhere are inert as in ``discover``.
        """
        addresses, others = AddressMap(recording.allocations), AddressMap(memory)
        if addresses.overlap is not None or not self._addresses:
            return None
        first, behind = addresses.bounds
        low, high = first - _NEAR, behind + _NEAR
        start, end = others.bounds
        least = min(low, start) if end else low
        known: dict[str, frozenset[int]] = {}  # by kernel, the words that were an address in any launch
        slots: list[Slot] = []
        non_pointers: list[NonPointerWord] = []
        for launch in recording.launches:
            unowned = {each.word for each in launch.unowned}
            found, stray, words = len(slots), False, set[int]()
            # most of some ten thousand words are small numbers
            likely = [at for at, word in enumerate(launch.words) if word >= least or at in unowned]
            for position in likely:
                word = launch.words[position]
                near = low <= word < high
                if not near and not start <= word < end and position not in unowned:
                    continue
                places = addresses.places(word, launch.index) if near else []
                if places:
                    if len(places) > 1:
                        return None
                    (kind, index), offset, _ = places[0]
                    slots.append(Slot(launch.index, position, kind, index, offset))
                    words.add(position)
                    continue
                stray = stray or near
                inert = foreign(launch, position) if position in unowned else None
                if isinstance(inert, NonPointerWord):
                    non_pointers.append(inert)
                    words.update([position] * inert.scratch)
                elif inert is not None or (near and addresses.inside(word)) or others.inside(word):
                    return None
            kernel = _kernel(launch)
            proven = self._addresses.get(kernel, ())
            if words in proven:
                if kernel not in known:
                    known[kernel] = frozenset().union(*proven)
                missing = known[kernel] - words  # null, or an address of unknown memory
                if not any(launch.words[position] for position in missing):
                    continue
            reach = launch.may_access
            if stray or reach is None or any(slot.key not in reach for slot in slots[found:]):
                return None
        return SlotTable(tuple(slots), (), sequence(recording), tuple(non_pointers))

    # -- on disk -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Add the proofs in the file."""
        found = None if self._path is None else load_json(self._path)
        if self._path is None or found is None:
            return
        if found == _WRONG:
            self._addresses, self._structures, self._path = {}, set(), None
            return
        try:
            kept = {str(kernel): {frozenset(map(int, words)) for words in each} for kernel, each in found["kernels"]}
            structures = set(map(str, found["structures"]))
        except (KeyError, TypeError, ValueError) as error:
            warn_once(self._path, f"{type(error).__name__}: {error}")
            return
        for kernel, words in kept.items():
            self._addresses.setdefault(kernel, set()).update(words)
        self._structures |= structures

    def _store(self) -> None:
        """Write all proofs, and those that other processes have written: at worst, the latest of these are lost."""
        if self._path is None:
            return
        self._load()
        if self._path is None:
            return
        kernels = [(kernel, sorted(map(sorted, words))) for kernel, words in sorted(self._addresses.items())]
        try:
            store_json(self._path, {"kernels": kernels, "structures": sorted(self._structures)})
        except (OSError, ValueError) as error:
            _log.warning("what is proven is not kept across processes: %s", error)


def _kernel(launch: Launch) -> str:
    """Text of the facts that all launches of a kernel share, in any process."""
    return _kernel_of(launch.kind.value, launch.name, launch.code, len(launch.words))


@functools.lru_cache(maxsize=4096)
def _kernel_of(*facts: Hashable) -> str:
    return repr(facts)


def _is_closed(launch: Launch) -> bool:
    """True if a launch is known to affect only its operands, so that it has no internal state. Launches with bodies are
    always compared."""
    return not launch.bodies and (launch.uses is not None or launch.operands is not None or launch.eager is not None)


def _patched(program: Program) -> list[frozenset[int]]:
    """For each launch, the words that are replaced: addresses, and words whose use as one a comparison would show."""
    words: list[set[int]] = [set() for _ in program.recording.launches]
    for slot in program.slots:
        words[slot.launch].add(slot.word)
    for inert in program.non_pointers:
        words[inert.launch].update([inert.word] * inert.scratch)
    return list(map(frozenset, words))


def _structure(program: Program) -> str:
    """A hash of the operands of each launch, with intermediates numbered as they are met, and of the order of launches.
    The verifier checks that launches wait for all that they depend on, in the bytes of any size."""
    met: dict[int, int] = {}
    pool = AllocationKind.POOL
    given = sorted(
        {
            (slot.launch, met.setdefault(slot.index, -1 - len(met)) if slot.kind is pool else slot.index)
            for slot in program.slots
        }
    )
    waits = program.recording.phases if program.order is None else program.order.edges
    return hashlib.sha256(repr((given, program.order is None, waits)).encode()).hexdigest()
