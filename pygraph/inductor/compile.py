"""Compiles a whole graph with Inductor under a decision, and compares the resulting program with the decision."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pygraph import compat, version
from pygraph.calibration.store import stored_model
from pygraph.inductor.decision import Decision
from pygraph.inductor.emitted import ProgramRecord
from pygraph.inductor.partition_hooks import PartitionHooks
from pygraph.ir import CONSTANT, MODELS, DeviceModel, Graph, TensorType
from pygraph.passes.base import BasePass, PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.rules import captured_device
from pygraph.passes.pipeline import sources


def pass_context(graph: Graph) -> PassContext:
    """The context of passes over ``graph``: the device whose work is captured, and its model."""
    device = captured_device(graph)
    places = (value.type.device for value in graph.values() if isinstance(value.type, TensorType))
    index = next((place.index for place in places if place.kind == device and place.index is not None), None)
    return PassContext(device, model_for(device, index))


def model_for(device: str, index: int | None = None) -> DeviceModel:
    """The device model for the costs of a graph: calibrated on this machine, or else built in."""
    model = stored_model(device, index) or MODELS[device]
    return model if torch.get_float32_matmul_precision() == "highest" else model.with_tf32()


def compile_under(
    decision: Decision,
    passes: Sequence[BasePass],
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    tag: str,
    rewrite: Callable[[torch.fx.GraphModule], None] | None = None,
) -> Any:
    """Inductor's compiled graph for ``gm``, cut where ``decision`` says. The ``Legality`` of ``passes`` judges nodes
    made by Inductor's own passes, and by ``rewrite``, which runs after them.

    The user's configuration of Inductor is kept, except for the partition itself and ``memory_planning``, which treats
    the results of a partition as dead. ``tag``, the user's tag with ``program_key``, enters Inductor's cache key,
    so that plain compilations of the same graph have another key.
    """
    # Combo kernels join kernels without asking whether they may be fused.
    unjoined = {"combo_kernels": False} if decision.exact else {}
    legality = next((item for item in passes if isinstance(item, Legality)), Legality())
    with (
        PartitionHooks(decision, legality).active(rewrite),
        compat.own_partitions(),
        compat.compiler_config.patch(cache_key_tag=tag),
        compat.inductor_config.patch(graph_partition=True, memory_planning=False, **unjoined),
    ):
        return compat.compile_fx_inner(gm, inputs, **kwargs)


def program_key(decision: Decision, passes: Sequence[BasePass], gm: torch.fx.GraphModule) -> str:
    """Hash of everything that shapes a program, except its graph and Inductor's configuration, which Inductor hashes.

    It covers the decision with its pipeline, the source of this package and of passes from elsewhere, the version of
    torch, the device, and the declarations of the operators that ``gm`` calls: their defaults are in the program.
    """
    digests = (version.package_digest(version.PACKAGE), *sources(passes))
    device = torch.cuda.get_device_name() if decision.device == "cuda" else decision.device
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    called = (
        each for graph in graphs for node in graph.nodes for each in (node.target, *node.args, *node.kwargs.values())
    )
    operators = (compat.declaration(each) for each in called if isinstance(each, compat.OpOverload))
    parts = (version.__version__, torch.__version__, device, decision.digest(), *digests, *operators)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compare(decision: Decision, record: ProgramRecord) -> tuple[list[str], set[int]]:
    """Compare program and decision. Returns notes for the report, and the regions that must not be captured."""
    notes, forbidden = [], set()
    for index, steps in enumerate(record.regions):
        for name in dict.fromkeys(origin for step in steps for origin in step.origins):
            placed = decision.nodes.get(name)
            # A constant launches nothing: if a kernel names one, Inductor has folded it or moved it to the device.
            if placed is not None and not placed.capturable and placed.eager is None and placed.op != CONSTANT:
                notes.append(f"region {index} holds {name} ({placed.op}), judged not capturable: {placed.reason}")
                forbidden.add(index)
        for one in (one for step in steps for one in step.made if one.reason is not None):
            notes.append(f"region {index} holds {one.name} ({one.op}), which has to stay outside: {one.reason}")
            forbidden.add(index)
    notes += record.differences
    if record.planned:
        launching = dict.fromkeys(p.region for p in decision.nodes.values() if p.region is not None and p.launches)
        missing = [region for region in launching if region not in record.planned]
        notes += [f"Inductor left nothing of region {region} to launch" for region in missing]
        return notes, forbidden
    decided = {placed.region for placed in decision.nodes.values()} - {None}
    if len(record.regions) > len(decided):
        notes.append(f"{len(record.regions)} regions were emitted where {len(decided)} were decided")
    inside = {name for steps in record.regions for step in steps for name in step.origins}
    made = {one.name: one for step in record.outside for one in step.made if one.reason is not None}
    for one in made.values():
        sources = ", ".join(one.sources) or "nodes that are not known"
        notes.append(f"{one.name} ({one.op}), made from {sources}, was left outside: {one.reason}")
    planned = {name for name, placed in decision.nodes.items() if placed.region is not None} - inside
    lost = Counter(step.reason or "" for step in record.outside for name in step.origins if name in planned)
    notes += [f"{count} operators decided into a region were left outside: {reason}" for reason, count in lost.items()]
    return notes, forbidden
