"""Small hand-made reports that the tests of all renderers share."""

from __future__ import annotations

from pygraph.frontend.location import GraphOrigin
from pygraph.inductor.decision import decide
from pygraph.inductor.emitted import EmittedProgram, EmittedRegion
from pygraph.ir import (
    CAPTURABLE,
    DETAIL,
    FREE,
    HOST,
    REASON,
    REGION,
    SELECTED,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    Location,
    Region,
    ScalarType,
    Stage,
    TensorType,
)
from pygraph.report.model import GraphReport, PassReport, RegionReport
from pygraph.runtime.measure import Decision
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import RegionRecord

CPU = Device("cpu")
MATRIX = TensorType(DType.F32, (8, 8), CPU)
EVIL = "x = f('<script>alert(1)</script>').item()  # [bold]\x1b[31m"
LINE = Location("model.py", 12, "forward", EVIL)


def cut_graph(known: bool = True) -> Graph:
    """``mm`` and ``relu`` in region 0, an ``item`` and its scalar outside, ``add`` in region 1."""
    graph = Graph("sample", "inference", Stage.PARTITIONED)
    x = graph.add_input(MATRIX, "x")
    w = graph.add_input(MATRIX, "w", role="parameter", static=True)
    product = graph.add("aten.mm", (x, w), (MATRIX,), name="mm", cost=Cost(1024, 512, 256, 1, 0))
    relu_cost = Cost(64, 256, 256, 1, 0) if known else Cost()
    relu = graph.add("aten.relu", (product.output,), (MATRIX,), name="relu", cost=relu_cost)
    item = graph.add(
        "aten.item",
        (relu.output,),
        (ScalarType("float"),),
        name="item",
        effects=Effects(sync=True),
        loc=LINE,
        cost=Cost(0, 4, 4, 1, 0),
    )
    scalar = graph.add("neg", (item.output,), (ScalarType("float"),), name="neg")
    add = graph.add("aten.add", (relu.output, scalar.output), (MATRIX,), name="add", cost=Cost(64, 256, 256, 1, 0))
    view = graph.add(
        "aten.view",
        (add.output, (64,)),
        (TensorType(DType.F32, (64,), CPU),),
        name="view",
        cost=FREE,
        effects=Effects(aliases=((0, 0),)),
    )
    graph.set_outputs((view.output,))
    _annotate(graph)
    return graph


def _annotate(graph: Graph) -> None:
    for index, names in enumerate((("mm", "relu"), ("add", "view"))):
        graph.regions[index] = Region(index)
        graph.regions[index].meta.set(SELECTED, True)
        for name in names:
            graph.node(name).meta.set(REGION, index)
            graph.node(name).meta.set(CAPTURABLE, True)
    item, scalar = graph.node("item").meta, graph.node("neg").meta
    item.set(CAPTURABLE, False)
    item.set(REASON, "host-read")
    item.set(DETAIL, "the host reads a device value")
    scalar.set(CAPTURABLE, True)
    scalar.set(REASON, "no-launch")


DECISION = Decision("uncaptured", 1200.0, 1000.0, 90)
"""What measured selection decided on a variant."""


def full_report(index: int = 0, known: bool = True) -> GraphReport:
    """A report of ``cut_graph`` with one region replayed and one refused."""
    graph = cut_graph(known)
    replayed = RegionRecord("r0", "replay", keys=1, captures=2, replays=1234, slots=3, workspace_bytes=4096)
    replayed.python_runs["lib.op.default"] = 2
    refused = RegionRecord("r1", "uncaptured", "address-escapes: a word is nobody's")
    refused.refusals["host-read"] = Refusal("host-read", "x.item()", "cpp_fused_add_1", "model.py:14")
    return GraphReport(
        index=index,
        kind="inference",
        device="cpu",
        origin=GraphOrigin("forward", Location("model.py", 9, "forward"), {LINE: "Unsupported Tensor.item() call"}),
        graph=graph,
        model=HOST,
        pipeline="legality,partitioning",
        passes=(
            PassReport("legality", 1.25, True, ("1 node is not capturable",)),
            PassReport("partitioning{max-regions=4}", 2.5, True, ()),
        ),
        decision=decide(graph, "cpu", "legality,partitioning"),
        emitted=EmittedProgram(
            (
                EmittedRegion(0, 3, ("x",), ("extern_kernels.mm", "cpp_fused_relu_0")),
                EmittedRegion(1, 9, ("y",), ("cpp_fused_add_1",)),
            ),
            ("item",),
        ),
        source="def call(args):\n    return ('<b>',)\n",
        regions=[
            RegionReport(0, (0,), ("mm", "relu"), ("extern_kernels.mm", "cpp_fused_relu_0"), True, "", replayed),
            RegionReport(1, (1,), ("add", "view"), ("cpp_fused_add_1",), True, "", refused),
        ],
        times_ms={"lift": 3.0, "passes": 3.75, "inductor": 512.0},
        notes=["region 1 was split off by Inductor"],
    )


def failed_report(index: int = 1) -> GraphReport:
    """A graph that was given up before it was lifted."""
    return GraphReport(index=index, kind="backward", device="cpu", error="LiftError: <unknown> operand & more")
