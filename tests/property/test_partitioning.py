"""Properties of partitioning on random graphs with views, mutation, random numbers, collectives, syncs and barriers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import networkx as nx
from hypothesis import given, note, settings
from hypothesis import strategies as st

from pygraph.ir import CAPTURABLE, EAGER, REASON, REGION, Graph, KernelNode, Stage, dependences
from pygraph.ir.annotations import unit_of
from pygraph.passes import PassContext, PassManager
from pygraph.passes.analysis import dependence_lists
from pygraph.passes.partitioning import Partitioning
from pygraph.passes.region_order import Kind
from pygraph.testing.strategies import operator_graphs

CTX = PassContext()
LIMITS = st.none() | st.integers(0, 3)


def placed(most: int) -> st.SearchStrategy[Graph]:
    """Judged graphs, as placement would leave them."""
    return operator_graphs(max_nodes=most, judged=True).map(_at_placed)


def _at_placed(graph: Graph) -> Graph:
    graph.stage = Stage.PLACED
    return graph


def partition(graph: Graph, limit: int | None = None) -> Graph:
    """A partitioned copy; the verifier and ``modified`` are checked, and the input printed when a property fails."""
    note(f"// pygraph opt FILE -p '{PassManager([Partitioning(limit)]).text}'\n{graph}")
    copy = graph.clone()
    PassManager([Partitioning(limit)], check="full").run(copy, CTX)
    return copy


def kind_of(node: KernelNode) -> Kind:
    if not node.meta.get(CAPTURABLE):
        return Kind.EAGER if node.meta.get(EAGER) else Kind.OUTSIDE
    return Kind.FREE if node.cost.launches == 0 else Kind.LAUNCHES


@settings(max_examples=100)
@given(placed(14), LIMITS)
def test_regions_hold_all_that_launches_are_adjacent_and_have_an_acyclic_quotient(
    graph: Graph, limit: int | None
) -> None:
    done = partition(graph, limit)
    assert str(partition(done, limit)) == str(done)
    assert ordered_pairs(done) == ordered_pairs(graph)
    units = [(unit_of(a), unit_of(b)) for a, b in dependences(done)]
    assert nx.is_directed_acyclic_graph(nx.DiGraph([(a, b) for a, b in units if a != b]))
    found = [node.meta.get(REGION) for node in done.nodes]
    runs = [index for i, index in enumerate(found) if index is not None and (i == 0 or found[i - 1] != index)]
    assert runs == list(range(len(done.regions)))
    launching = {node.meta.get(REGION) for node in done.nodes if kind_of(node) is Kind.LAUNCHES}
    assert launching >= set(runs)
    called = [node for node in done.nodes if kind_of(node) is Kind.EAGER]
    assert all((REGION in node.meta) is (REASON not in node.meta) for node in done.nodes if node not in called)
    for index in done.regions:
        kinds = [
            kind_of(node) for node in done.nodes if node.meta.get(REGION) == index and kind_of(node) is not Kind.FREE
        ]
        assert Kind.EAGER not in (kinds[0], kinds[-1])
    if limit is None:
        assert all(REGION in node.meta for node in done.nodes if kind_of(node) is Kind.LAUNCHES)
    else:
        assert len(runs) <= limit


def ordered_pairs(graph: Graph) -> set[tuple[str, str]]:
    return {(a.name, b.name) for a, b in nx.transitive_closure_dag(nx.DiGraph(dependences(graph))).edges}


Lists = Sequence[Sequence[int]]
"""For each position, the positions that it depends on."""


def acyclic(units: Sequence[int], before: Lists) -> bool:
    edges = ((units[p], units[v]) for v, sources in enumerate(before) for p in sources if units[p] != units[v])
    return nx.is_directed_acyclic_graph(nx.DiGraph(edges))


def partitions(kinds: Sequence[Kind], most: int) -> Iterator[list[int]]:
    """Every choice of at most ``most`` regions (0, 1, …) for all but OUTSIDE nodes; others get negative numbers."""

    def extend(chosen: list[int], used: int) -> Iterator[list[int]]:
        v = len(chosen)
        if v == len(kinds):
            yield chosen
            return
        choices = [] if kinds[v] is Kind.OUTSIDE else list(range(min(used + 1, most)))
        choices += [] if kinds[v] is Kind.LAUNCHES else [-1 - v]
        for choice in choices:
            yield from extend([*chosen, choice], max(used, choice + 1))

    return extend([], 0)


def fewer_regions(kinds: Sequence[Kind], before: Lists, than: int) -> list[int] | None:
    """A valid partition of fewer regions ``than`` so many that covers all LAUNCHES nodes, or None."""
    if than == 0:
        return None
    return next((p for p in partitions(kinds, than - 1) if acyclic(p, before)), None)


@settings(max_examples=120)
@given(placed(7))
def test_no_partition_has_fewer_regions(graph: Graph) -> None:
    kinds = [kind_of(node) for node in graph.nodes]
    better = fewer_regions(kinds, dependence_lists(graph)[0], len(partition(graph).regions))
    assert better is None


@settings(max_examples=100)
@given(placed(14), LIMITS)
def test_the_rest_of_the_pipeline_changes_no_membership(graph: Graph, limit: int | None) -> None:
    done = partition(graph, limit)
    members = [(node.name, node.meta.get(REGION)) for node in done.nodes]
    PassManager("indirection,selection", check="full").run(done, CTX)
    assert [(node.name, node.meta.get(REGION)) for node in done.nodes] == members
    before = str(done)
    PassManager("indirection,selection", check="full").run(done, CTX)
    assert str(done) == before


_PRINT_MANY = """
import random
from pygraph.passes import PassManager
from tests.passes.build import layered
for seed in range(20):
    graph = layered(random.Random(seed), 60)
    PassManager(f"partitioning{{max-regions={seed}}},indirection,selection").run(graph)
    print(graph)
"""


def test_hash_seeds_do_not_matter() -> None:
    texts = set()
    for seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        root = Path(__file__).parents[2]
        done = subprocess.run([sys.executable, "-c", _PRINT_MANY], env=env, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    assert len(texts) == 1
    assert texts.pop().count("graph @") == 20
