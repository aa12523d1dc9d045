"""Single nodes and small graphs of two devices as text, for tests of legality."""

from __future__ import annotations

from pygraph.ir import Device, Graph, parse
from pygraph.passes.legality.rules import Objection, Target, judge

__all__ = ["CPU", "CUDA", "GPU", "graph_of", "judge_line", "subgraph"]

INPUTS = """
  %x : f32[4, 4]@cuda:0, %y : f32[4, 4]@cuda:1, %i : i64[4]@cuda:0, %m : b8[4, 4]@cuda:0, %v : f32[]@cuda:0,
  %c : f32[4, 4]@cpu, %ci : i64[4]@cpu, %cm : b8[4, 4]@cpu, %s : f32[]@cpu,
  %k : int(s0), %u : int(u0), %f : float,
  %g : opaque<"Generator">, %o : opaque<"FakeScriptObject">, %sp : opaque<"tensor.sparse_coo.float32">,
  %p : opaque<"tensor._mkldnn.float32">
"""
CUDA = Target(Device("cuda", 0))
CPU = Target(Device("cpu"))


def graph_of(*lines: str, subgraphs: str = "", returns: str = "") -> Graph:
    """A graph of ``lines`` over INPUTS."""
    body = "\n".join(lines)
    return parse(f"graph @main ({INPUTS}) {{\n{body}\nreturn ({returns})\n}}\n{subgraphs}")


def judge_line(line: str, target: Target = CUDA, subgraphs: str = "") -> Objection | None:
    """What is objected to a single node."""
    graph = graph_of(line, subgraphs=subgraphs)
    return judge(graph.nodes[0], Target(target.device, target.forbid, graph.subgraphs))


GPU = "f32[4, 4]@cuda:0"


def subgraph(line: str) -> str:
    """The text of a subgraph @body of one node ``%b`` over %a of the device and %z of the CPU."""
    return f"subgraphs {{ graph @body (%a : {GPU}, %z : f32[4, 4]@cpu) {{\n{line}\nreturn (%b)\n}} }}"
