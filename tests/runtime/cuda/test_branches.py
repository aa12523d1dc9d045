"""Graphs with branches, cut into segments: what is left of their order, and which intermediates share memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraph.runtime.cuda import segments
from pygraph.runtime.cuda.executable import Part, split
from pygraph.runtime.cuda.nodes import EmptyNode
from pygraph.runtime.cuda.phases import phases
from pygraph.runtime.driver import Program, Slot
from pygraph.runtime.layout import plan
from pygraph.runtime.recording import AllocationKind
from tests.runtime.branches import Branched, branched, closure
from tests.runtime.captures import Capture

POOL = AllocationKind.POOL
ORIGINAL = 1


class Graphs:
    """Graphs as the driver keeps them: numbers for graphs and nodes. A node that is destroyed takes its edges along,
    and nothing takes their place."""

    CUgraph = CUgraphNode = CUgraphExec = CUstream = staticmethod(int)

    def __init__(self, graph: Branched) -> None:
        self.nodes: dict[int, set[int]] = {ORIGINAL: {1000 + node for node in range(graph.count)}}
        self.edges = {(1000 + a, 1000 + b) for a, b in graph.edges}
        self.instances: dict[int, tuple[frozenset[int], frozenset[tuple[int, int]]]] = {}

    def cuGraphClone(self, graph: int) -> tuple[int, int]:
        copy = len(self.nodes) + 1
        self.nodes[copy] = {self._twin(node, copy) for node in self.nodes[graph]}
        own = {(a, b) for a, b in self.edges if a in self.nodes[graph]}
        self.edges |= {(self._twin(a, copy), self._twin(b, copy)) for a, b in own}
        return (0, copy)

    @staticmethod
    def _twin(node: int, graph: int) -> int:
        return 1000 * graph + node % 1000

    def cuGraphNodeFindInClone(self, node: int, copy: int) -> tuple[int, int]:
        return (0, self._twin(node, copy))

    def cuGraphDestroyNode(self, node: int) -> tuple[int]:
        self.nodes[node // 1000].remove(node)
        self.edges = {edge for edge in self.edges if node not in edge}
        return (0,)

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        kept = self.nodes[graph]
        edges = frozenset((a % 1000, b % 1000) for a, b in self.edges if a in kept)
        self.instances[graph] = (frozenset(node % 1000 for node in kept), edges)
        return (0, graph)

    def cuGraphUpload(self, instance: int, stream: int) -> tuple[int]:
        return (0,)


def parts_of(graph: Branched, bounds: list[tuple[int, int]]) -> tuple[Graphs, list[Part]]:
    driver = Graphs(graph)
    whole: Any = SimpleNamespace(
        raw_cuda_graph=lambda: ORIGINAL,
        instantiate=lambda: driver.cuGraphInstantiate(ORIGINAL, 0),
        raw_cuda_graph_exec=lambda: ORIGINAL,
    )
    nodes = [EmptyNode(1000 + node) for node in range(graph.count)]
    return driver, split(driver, whole, nodes, bounds)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@settings(deadline=None, max_examples=200)
@given(branched(), st.data())
def test_segments_one_after_the_other_keep_every_path(graph: Branched, data: st.DataObject) -> None:
    """Edges lead forward, so that a path between two nodes of a segment never leaves it."""
    inner = data.draw(st.sets(st.integers(1, graph.count - 1), max_size=4)) if graph.count > 1 else set()
    bounds = list(pairwise((0, *sorted(inner), graph.count)))
    driver, parts = parts_of(graph, bounds)
    before = graph.before()
    assert len(parts) == len(bounds)
    for part, (begin, end) in zip(parts, bounds, strict=True):
        nodes, edges = driver.instances[part.graph or ORIGINAL]
        assert nodes == set(range(begin, end))
        assert closure(edges) == {(a, b) for a, b in before if begin <= a and b < end}
        assert {launch: handle % 1000 for launch, handle in part.handles.items()} == {i: i for i in range(begin, end)}
    where = {node: number for number, bound in enumerate(bounds) for node in range(*bound)}
    assert all(where[a] <= where[b] for a, b in before)


def _launch(slot: Slot) -> int:
    return slot.launch


def program_of(graph: Branched, uses: list[set[int]], nbytes: int) -> Program:
    """Intermediate i is used by the launches ``uses[i]``."""
    capture = Capture()
    for _ in uses:
        capture.pool(nbytes)
    for _ in range(graph.count):
        capture.launch()
    slots = tuple(sorted((Slot(at, i, POOL, i, 0) for i, used in enumerate(uses) for at in used), key=_launch))
    recording = replace(capture.recording(), alignment=512, phases=phases(graph.count, graph.edges))
    return Program(recording, slots, plan(recording, slots, alignment=512), tuple(range(graph.count)), {})


@settings(deadline=None, max_examples=200)
@given(branched(), st.data())
def test_memory_is_shared_by_what_is_ordered_only(graph: Branched, data: st.DataObject) -> None:
    """In one segment by the graph's edges; from one segment to the next by the order of their launches."""
    if graph.count < 2 * segments.FEWEST_LAUNCHES:
        return
    chosen = st.sets(st.integers(0, graph.count - 1), min_size=1, max_size=4)
    uses = data.draw(st.lists(chosen, min_size=1, max_size=8))
    program = program_of(graph, uses, segments.WORTHWHILE)
    facts = segments._Facts(program)
    for made in (segments.cut(program), facts.plan(facts.everything, program.layout)):
        where = {launch: number for number, bound in enumerate(made.bounds) for launch in range(*bound)}
        before = graph.before() | {(a, b) for a in where for b in where if where[a] < where[b]}
        blocks = {block.index: block for block in made.blocks}
        for index, used in enumerate(uses):
            if index in blocks:
                assert all(blocks[index].born <= where[launch] <= blocks[index].died for launch in used)
        for workspace in made.workspaces:
            for piece in workspace:
                for a, b in combinations(piece.offsets, 2):
                    if abs(piece.offsets[a] - piece.offsets[b]) < segments.WORTHWHILE:
                        one = all((x, y) in before for x in uses[a] for y in uses[b])
                        assert one or all((y, x) in before for x in uses[a] for y in uses[b])
