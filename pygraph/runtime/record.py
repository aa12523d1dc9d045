"""Options of a region, and the record that reports read."""

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
    """Options of a region.

    Args:
        capture_after: occurrence of a variant at which it is captured, at least 2
        memory_limit: bytes of the device for captures of the owner (``make_room``); None: its limit, or the driver's
        verify_every: replays per comparison with an uncaptured run, which answers the call; 0: none
        ledger: captures must pay
        cache_dir: folder for decisions; None: keep none
        order: order of launches: ``program``, ``dependences``, or ``measured``, the one that real calls find faster
        launch_passes: turn the captured program into the one that is replayed
        collectives: ``eager``: replays call them; ``measured``: captured if all ranks agree, and find that no slower
        exempt: positions of arguments that comparisons neither copy nor read; all runs write them in place
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
    """Calls of one operator from one line of the user's code, in each replay."""

    operator: str
    loc: str | None
    count: int


@dataclass(repr=False)
class RegionRecord:
    """State and counters of one region.

    ``slots``, ``launches``, ``workspace_bytes``, ``segments`` and the ``eager`` calls between segments describe the
    last capture. ``proven``: captures that were not compared, since all of their kernels were proven. ``eager_since``:
    reason why replays call an operator instead of capturing it. ``python_runs``: how often bodies of operators written
    in Python ran for captures and comparisons. ``refusals``: the first one for each reason. ``ledger``: cost of
    captures and savings of replays; None if captures need not pay. ``orders``: decisions on the order of launches;
    ``contests``: number of variants that wait for one. ``passes``: notes of the launch passes on the last capture.
    ``longest_path``: number of launches on the longest path of dependences (0: not computed). ``timeline``: of the last
    capture whose launches run side by side. ``events``: counts of other events, by kind, and by kind and reason."""

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
    """Weak: reports outlive programs, and replays refer to everything that a program holds."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that its captures take now, as estimated by the driver."""
        table = None if self._table is None else self._table()
        return 0 if table is None else table.held_bytes

    def __repr__(self) -> str:
        counts = f"captures: {self.captures}, replays: {self.replays}, uncaptured calls: {self.uncaptured}"
        why = f"; {first_line(self.reason)}" if self.reason else ""
        return f"<RegionRecord {self.name}: {self.state.value}; {counts}{why}>"

    def settle(self) -> None:
        """Include all replays in the ledger's sum."""
        if self.ledger is not None:
            self.ledger.settle(self.replays)

    def describe(self, program: Program) -> None:
        """Record that ``program`` is replayed from now on."""
        self.slots, self.launches = len(program.slots), sum(each.count for each in program.recording.launches)
        self.workspace_bytes = program.layout.nbytes
        self.timeline = timeline(program) or self.timeline
        self.passes = program.notes
        self.segments = sum(isinstance(step, GraphSegment) for step in program.steps)
        called = Counter((step.call.name, step.origin.loc) for step in program.steps if isinstance(step, EagerStep))
        self.eager = [EagerCalls(*call, count) for call, count in called.items()]

    def count_replay(self) -> None:
        """Count a replay, here and for the process."""
        self.replays += 1
        counts["replays"] += 1

    def count_uncaptured(self) -> None:
        """Count an uncaptured call, here and for the process."""
        self.uncaptured += 1
        counts["uncaptured"] += 1
