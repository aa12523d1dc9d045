"""What an input of a graph is, as far as AOTAutograd's names and the list of static inputs tell.

Roles inform reports, and what memory is worth giving back; only ``static`` is a promise, and it is the caller's.
"""

from __future__ import annotations

from torch import fx

from pygraph.frontend.call import schema_facts
from pygraph.ir import Graph, ScalarType, TensorType, Type

__all__ = ["backward_static_inputs", "held_inputs", "lent_inputs", "role_of"]


def role_of(node: fx.Node, type: Type, kind: str, *, static: bool) -> tuple[str, bool]:
    """The role of a placeholder, and whether its address stays.

    Saved activations and tangents are new in each call, whatever the caller's list says.
    """
    if isinstance(type, ScalarType):
        return "scalar", False
    if node.name.startswith("tangents_"):
        return "tangent", False
    if kind == "backward":
        static = static and node.name.startswith("primals_")
        return ("parameter" if static else "saved"), static
    if not static:
        return "input", False
    trained = isinstance(type, TensorType) and type.dtype.is_floating and not _written(node)
    return ("parameter" if trained else "buffer"), True


def _written(node: fx.Node) -> bool:
    """Whether some operator of the graph writes the placeholder itself."""
    for user in node.users:
        facts = schema_facts(user.target)
        if facts is None:
            continue
        named = dict(zip(facts.names, user.args, strict=False)) | dict(user.kwargs)
        if any(named.get(name) is node for name in facts.written):
            return True
    return False


def backward_static_inputs(gm: fx.GraphModule, forward: Graph) -> tuple[int, ...]:
    """Positions of the inputs of the backward ``gm`` that are static inputs of ``forward``, by name.

    Inductor marks every saved tensor of a backward graph static; only those that were static before stay in place.
    """
    static = {value.name for value in forward.inputs if value.static}
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    return tuple(index for index, name in enumerate(names) if name in static)


def held_inputs(graph: Graph) -> frozenset[str]:
    """The inputs that somebody holds until the program returns: all but what a backward may be left with."""
    return frozenset(value.name for value in graph.inputs if value.role not in ("saved", "tangent"))


def lent_inputs(graph: Graph) -> frozenset[str]:
    """The inputs that somebody may hold until the program returns: autograd holds the tangents that it calls a backward
    with, of which AOTAutograd passes on those whose strides it did not have to change."""
    return frozenset(value.name for value in graph.inputs if value.role == "tangent")
