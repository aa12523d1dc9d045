"""Small hand-made reports that the tests of all renderers share."""

from __future__ import annotations

from unittest.mock import Mock
from weakref import ref

from pygraph.frontend.location import GraphOrigin
from pygraph.inductor.emitted import EmittedProgram
from pygraph.ir import HOST, Graph, Location, Stage, parse_graph
from pygraph.passes.manager import PassRecord
from pygraph.report.model import GraphReport, RegionReport
from pygraph.runtime.contest import Decision
from pygraph.runtime.contract import Executable
from pygraph.runtime.provenance import Refusal
from pygraph.runtime.region import RegionRecord
from pygraph.runtime.variants import State, VariantTable

EVIL = "x = f('<script>alert(1)</script>').item()  # [bold]\x1b[31m"
LINE = Location("model.py", 12, "forward", EVIL)
TEXT = """\
graph @sample {kind = inference, stage = partitioned} (
  %x : f32[8, 8]@cpu {role = input}, %w : f32[8, 8]@cpu {role = parameter, static}
) {
  %mm = aten.mm(%x, %w) : f32[8, 8]@cpu {flops = 1024, read = 512, written = 256, launches = 1, capturable = true, region = 0}
  %relu = aten.relu(%mm) : f32[8, 8]@cpu {flops = 64, read = 256, written = 256, launches = 1, capturable = true, region = 0}
  %item = aten.item(%relu) : float !sync {flops = 0, read = 4, written = 4, launches = 1, capturable = false, detail = "the host reads a device value", reason = "host-read", in = "layers.0.gate", loc = "model.py:12", function = "forward", code = "x = f('<script>alert(1)</script>').item()  # [bold]\\u001b[31m"}
  %neg = neg(%item) : float {capturable = true, reason = "no-launch"}
  %add = aten.add(%relu, %neg) : f32[8, 8]@cpu {flops = 64, read = 256, written = 256, launches = 1, capturable = true, region = 1}
  %view = aten.view(%add, [64]) : f32[64]@cpu !aliases[0:0] {flops = 0, read = 0, written = 0, launches = 0, capturable = true, region = 1}
  return (%view)
} regions {
  0 {selected = true} ()
  1 {selected = true} ()
}
"""  # noqa: E501


def cut_graph(known: bool = True) -> Graph:
    """``mm`` and ``relu`` (of ``known`` cost) in region 0, an ``item`` and its scalar outside, ``add`` in region 1."""
    cost = "flops = 64, read = 256, written = 256, launches = 1, "
    return parse_graph(TEXT if known else TEXT.replace(cost, "", 1))


DECISION = Decision("dependences", 30.0, 20.0, 90)
"""Of the order of a variant's launches."""


TABLE = VariantTable(1)
TABLE.install(TABLE.find((), ()), list, Executable(Mock(), nbytes=3 << 20))


def full_report(index: int = 0, known: bool = True) -> GraphReport:
    """A report of ``cut_graph`` with one region replayed and one refused."""
    graph = cut_graph(known)
    replayed = RegionRecord(
        "r0", State.REPLAY, captures=2, replays=1234, slots=3, workspace_bytes=4096, _table=ref(TABLE)
    )
    replayed.python_runs["lib.op.default"] = 2
    refused = RegionRecord("r1", State.UNCAPTURED, "address-escapes: a word is nobody's")
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
            PassRecord("legality", "legality", Stage.JUDGED, 1.25, True, ("1 node is not capturable",)),
            PassRecord("partitioning", "partitioning{max-regions=4}", Stage.PARTITIONED, 2.5, True, ()),
        ),
        emitted=EmittedProgram((), ("item",)),
        source="def call(args):\n    return ('<b>',)\n",
        regions=[
            RegionReport(0, (0,), ("mm", "relu"), ("extern_kernels.mm", "cpp_fused_relu_0"), True, "", replayed),
            RegionReport(1, (1,), ("add", "view"), ("cpp_fused_add_1",), True, "", refused, "layers.1"),
        ],
        times_ms={"lift": 3.0, "passes": 3.75, "inductor": 512.0},
        notes=["region 1 was split off by Inductor"],
    )


def failed_report(index: int = 1) -> GraphReport:
    """A graph that was given up before it was lifted."""
    return GraphReport(index=index, kind="backward", device="cpu", error="LiftError: <unknown> operand & more")
