"""Constants of an FX module on another device: moved once, when the program is compiled, not by each call."""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from pygraph import compat

__all__ = ["moved_constant"]


def moved_constant(gm: torch.fx.GraphModule, constant: FxNode, device: torch.device) -> FxNode:
    """A node for what ``constant`` (a ``get_attr``) holds, as a constant of ``gm`` on ``device``.

    It stands behind ``constant``, and is made once for each device.
    """
    name = f"{constant.target}_on_{device.type}_{device.index or 0}".replace(".", "_")
    nodes: list[FxNode] = list(gm.graph.nodes)
    for node in nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    value: torch.Tensor = getattr(gm, str(constant.target))
    mode = compat.detect_fake_mode([node.meta.get("val") for node in nodes])
    with compat.without_dispatch_modes():  # AOTAutograd compiles under its fake mode, and this has to be real memory
        moved = value.detach().to(device)
    gm.register_buffer(name, moved)
    with gm.graph.inserting_after(constant):
        made: FxNode = gm.graph.create_node("get_attr", name)
    made.meta["val"] = mode.from_tensor(getattr(gm, name)) if mode is not None else getattr(gm, name)
    return made
