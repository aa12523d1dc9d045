"""Small placed graphs from rows such as ``a: launch x``, to test passes that only look at kinds and operands."""

from __future__ import annotations

from random import Random

from pygraph.ir import (
    CAPTURABLE,
    EAGER,
    FREE,
    REASON,
    REGION,
    UNKNOWN,
    Cost,
    Device,
    DType,
    Effects,
    Graph,
    KernelNode,
    ScalarType,
    Stage,
    TensorType,
    Value,
)

__all__ = ["TENSOR", "build", "layered", "order", "regions"]

TENSOR = TensorType(DType.F32, (256,), Device("cpu"))
"""The type of every tensor: 1024 bytes."""

_COSTS = {
    "launch": Cost(256, 1024, 1024, 1),
    "heavy": Cost(256_000_000, 1024, 1024, 1),
    "many": Cost(256, 1024, 1024, 40),
    "unknown": UNKNOWN,
    "view": FREE,
    "write": Cost(256, 1024, 1024, 1),
    "size": FREE,
    "host": Cost(0, 4, 0, 0),
    "call": UNKNOWN,
}
_EFFECTS = {
    "view": Effects(aliases=((0, 0),)),
    "write": Effects(writes=(0,), aliases=((0, 0),)),
    "host": Effects(sync=True),
}


def build(*rows: str, returns: str = "", stage: Stage = Stage.PLACED) -> Graph:
    """A graph of ``rows``, each ``name: kind operand …``; operands that no row makes are inputs.

    Kinds: launch, heavy (much work), many (40 launches), unknown (cost), view, write (in place), size (a number), host
    (not capturable) and call (not capturable, but a region may call it). An input called ``w…`` is static, one called
    ``s…`` a number."""
    graph = Graph(stage=stage)
    graph.operators.update(f"test.{kind}" for kind in _COSTS)
    values: dict[str, Value] = {}
    parsed = [(row.partition(":")[0], row.partition(":")[2].split()) for row in rows]
    made = {name for name, _ in parsed}
    for name in dict.fromkeys(word for _, words in parsed for word in words[1:] if word not in made):
        type = ScalarType("int") if name.startswith("s") else TENSOR
        values[name] = graph.add_input(type, name, static=name.startswith("w"))
    for name, (kind, *operands) in parsed:
        values[name] = _add(graph, name, kind, [values[word] for word in operands]).output
    graph.set_outputs(values[word] for word in returns.split())
    return graph


def _add(graph: Graph, name: str, kind: str, operands: list[Value]) -> KernelNode:
    type = ScalarType("int") if kind == "size" else TENSOR
    effects = _EFFECTS.get(kind, Effects())
    node = graph.add(f"test.{kind}", operands, [type], name=name, cost=_COSTS[kind], effects=effects)
    node.meta.set(CAPTURABLE, kind not in ("host", "call"))
    if kind in ("host", "call"):
        node.meta.set(REASON, "host-read" if kind == "host" else "collective")
    if kind == "call":
        node.meta.set(EAGER, True)
    return node


def layered(random: Random, nodes: int) -> Graph:
    """A graph of ``nodes`` rows: mostly launches, some views, writes and host nodes, on recent values."""
    rows = []
    for i in range(nodes):
        kind = random.choices(["launch", "heavy", "view", "write", "host"], [8, 2, 3, 1, 1])[0]
        operands = [f"n{random.randrange(max(0, i - 64), i)}" if i and random.random() < 0.9 else "x" for _ in range(2)]
        rows.append(f"n{i}: {kind} {' '.join(operands[: 2 if kind == 'launch' else 1])}")
    return build(*rows, returns=f"n{nodes - 1}")


def order(graph: Graph) -> str:
    """The names of the nodes in program order, as one text."""
    return " ".join(node.name for node in graph.nodes)


def regions(graph: Graph) -> str:
    """The members of each region in order of index: ``a b | d e``."""
    members: dict[int, list[str]] = {index: [] for index in sorted(graph.regions)}
    for node in graph.nodes:
        index = node.meta.get(REGION)
        if index is not None:
            members[index].append(node.name)
    return " | ".join(" ".join(names) for names in members.values())
