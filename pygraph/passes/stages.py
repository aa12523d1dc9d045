"""Setting a graph back to an earlier stage: which annotations belong to which stage, and go with it.

What later stages said was said of another graph, so it must not outlive the pass that changed it. Running passes is
the manager's business.
"""

from __future__ import annotations

from pygraph.ir import CAPTURABLE, DETAIL, REASON, REGION, SELECTED, Graph, Stage

__all__ = ["set_back"]


def set_back(graph: Graph, stage: Stage) -> bool:
    """Drop the annotations of every stage after ``stage`` and make it the graph's stage; return whether it was later.

    Whether a node is capturable goes with JUDGED, the regions and why a capturable node is in none with PARTITIONED,
    the parameters of regions with INDIRECTED, their selection with SELECTED. What placement did to a node stays: it
    says what the program is now. So do annotations of keys that passes bring with them.
    """
    if graph.stage is stage or not graph.stage.reached(stage):
        return False
    graph.stage = stage
    if not stage.reached(Stage.SELECTED):
        _drop_selection(graph)
    if not stage.reached(Stage.INDIRECTED):
        _drop_parameters(graph)
    if not stage.reached(Stage.PARTITIONED):
        _drop_regions(graph)
    if not stage.reached(Stage.JUDGED):
        _drop_judgement(graph)
    return True


def _drop_selection(graph: Graph) -> None:
    for region in graph.regions.values():
        region.meta.drop(SELECTED)
        region.meta.drop(REASON)
        region.meta.drop(DETAIL)


def _drop_parameters(graph: Graph) -> None:
    for region in graph.regions.values():
        region.parameters.clear()


def _drop_regions(graph: Graph) -> None:
    graph.regions.clear()
    for node in graph.nodes:
        node.meta.drop(REGION)
        if node.meta.get(CAPTURABLE):
            node.meta.drop(REASON)
            node.meta.drop(DETAIL)


def _drop_judgement(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta.drop(CAPTURABLE)
        node.meta.drop(REASON)
        node.meta.drop(DETAIL)
