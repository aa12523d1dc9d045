"""Small graphs of two devices as text, judged and placed, with their meaning checked: for tests of placement."""

from __future__ import annotations

from pygraph.ir import CAPTURABLE, Graph, TensorType, parse_graph
from pygraph.ir.interp import interpret
from pygraph.passes import PassContext, PassManager
from pygraph.passes.legality import Legality
from pygraph.passes.manager import PassRecord
from pygraph.passes.placement import Placement

__all__ = ["COPY", "CPU", "GPU", "INPUTS", "place", "shown"]

GPU, CPU = "f32[4]@cuda:0", "f32[4]@cpu"
INPUTS = f"""
  %x : {GPU}, %y : {GPU}, %s : f32[]@cpu, %t : f32[]@cpu, %w : {CPU} {{role = parameter, static}}, %i : i64[4]@cpu,
  %k : int(s0), %z : f32[]@cuda:0
"""
COPY = "prims.device_put.default"


def place(*lines: str, returns: str, pipeline: Placement | None = None, forbid: str = "") -> tuple[Graph, PassRecord]:
    """The placed graph of ``lines`` over INPUTS; its meaning and the types that it returns are checked."""
    graph = parse_graph(f"graph @main ({INPUTS}) {{\n" + "\n".join(lines) + f"\nreturn ({returns})\n}}")
    graph.operators.update(node.op for node in graph.nodes if node.op.startswith("mylib."))
    before = graph.clone()
    passes = [Legality((forbid,) if forbid else ()), pipeline or Placement()]
    _, result = PassManager(passes, check="full").run(graph, PassContext("cuda")).passes
    assert interpret(graph) == interpret(before)
    assert [value.type for value in graph.output_values] == [value.type for value in before.output_values]
    return graph, result


def shown(graph: Graph) -> list[str]:
    """Each node as ``name = op(operands) @device``, with ✗ where it is not capturable."""
    lines = []
    for node in graph.nodes:
        operands = ", ".join(value.name for value in node.inputs)
        types = [value.type for value in node.outputs if isinstance(value.type, TensorType)]
        device = "".join(dict.fromkeys(f" @{type.device}" for type in types))
        mark = "" if node.meta.get(CAPTURABLE) else "✗"
        lines.append(f"{node.name} = {node.op.split('.')[1]}({operands}){device}{mark}")
    return lines
