"""How a region lives, as its user asks, and what reports read of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from weakref import ref

from pygraph.errors import first_line
from pygraph.program.default import DEFAULT_PASSES, LaunchPasses
from pygraph.program.program import EagerStep, GraphSegment, Program
from pygraph.program.steps import timeline
from pygraph.runtime.contest import Decision
from pygraph.runtime.events import counts
from pygraph.runtime.ledger import Ledger
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.variants import State, VariantTable


@dataclass(frozen=True, slots=True)
class RegionOptions:
    """How a region lives.

    ``capture_after``: the occurrence of a variant at which it is captured (at least 2). ``memory_limit``: bytes of the
    device that the captures of all regions may take once another one of this region is made (None: what the driver
    says); the least recently used go. ``verify_every``: of so many replays, one is compared with an uncaptured run,
    which answers the call (0: none). ``ledger``: a capture must pay. ``cache_dir``: where decisions are
    kept, if at all. ``order``: what launches of a replay wait for: ``program``, ``dependences``, or, as real calls
    decide, ``measured``. ``launch_passes`` make the program that is replayed of the captured one.
    ``exempt``: positions of arguments that comparisons neither copy nor look at: all runs write them in place.
    ``collectives``: replays call them (``eager``), or they are captured where all ranks agree, and have ``measured``
    that to be no slower.
    """

    capture_after: int = 2
    memory_limit: int | None = None
    verify_every: int = 0
    ledger: bool = False
    cache_dir: str | None = None
    order: str = "program"
    launch_passes: LaunchPasses = DEFAULT_PASSES
    collectives: str = "eager"
    exempt: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EagerCalls:
    """Calls of one operator by one line of the user's, in each replay."""

    operator: str
    loc: str | None
    count: int


@dataclass(repr=False)
class RegionRecord:
    """State and counters of one region.

    ``slots``, ``launches``, ``workspace_bytes``, ``segments`` and the ``eager`` calls between them are those of the
    last capture. ``proven``: captures that were not compared, since all of their kernels were proven. ``eager_since``
    says why operators are called that were to be captured. ``python_runs``: how often bodies of operators written in
    Python ran for captures and comparisons. ``refusals`` holds the first of each reason.
    ``ledger``: what captures cost and replays saved; None where captures need not pay. ``orders`` are the decisions on
    the order of launches; ``contests`` variants still wait for one.
    ``passes``: notes of the launch passes on the last capture. ``longest_path``: of its launches that depend on each
    other (0: nobody asked); ``timeline``: of the last one that ran side by side. ``events``: how often something else
    happened, by kind, and by kind and reason."""

    name: str
    state: State = State.COLD
    reason: str | None = None
    captures: int = 0
    proven: int = 0
    replays: int = 0
    uncaptured: int = 0
    slots: int = 0
    launches: int = 0
    workspace_bytes: int = 0
    segments: int = 0
    eager: list[EagerCalls] = field(default_factory=list)
    eager_since: dict[str, str] = field(default_factory=dict)
    python_runs: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    refusals: dict[str, Refusal] = field(default_factory=dict)
    ledger: Ledger | None = None
    orders: list[Decision] = field(default_factory=list)
    contests: int = 0
    passes: tuple[str, ...] = ()
    longest_path: int = 0
    timeline: tuple[tuple[str, int, int], ...] = ()
    events: Counter[str] = field(default_factory=Counter)
    _table: ref[VariantTable] | None = None
    """Weak: reports outlive programs, and replays lead to all that these hold."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that its captures take now, by the driver's estimate."""
        table = None if self._table is None else self._table()
        return 0 if table is None else table.held_bytes

    def __repr__(self) -> str:
        counts = f"captures: {self.captures}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<RegionRecord {self.name}: {self.state.value}; {counts}{why}>"

    def settle(self) -> None:
        """Have the ledger's sum include all replays."""
        if self.ledger is not None:
            self.ledger.settle(self.replays)

    def describe(self, program: Program) -> None:
        """``program`` is replayed from now on."""
        self.slots, self.launches = len(program.slots), sum(each.count for each in program.recording.launches)
        self.workspace_bytes = program.layout.nbytes
        self.timeline = timeline(program) or self.timeline
        self.passes = program.notes
        self.segments = sum(isinstance(step, GraphSegment) for step in program.steps)
        called = Counter((step.call.name, step.origin.loc) for step in program.steps if isinstance(step, EagerStep))
        self.eager = [EagerCalls(*call, count) for call, count in called.items()]

    def count_replay(self) -> None:
        """Here, and for the process."""
        self.replays += 1
        counts["replays"] += 1

    def count_uncaptured(self) -> None:
        """Here, and for the process."""
        self.uncaptured += 1
        counts["uncaptured"] += 1
