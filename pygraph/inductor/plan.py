"""From an FX graph to a decision: lift it, run the passes, read off where each node goes. Inductor is not asked yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraph.calibration.store import stored_model
from pygraph.frontend.lift import lift
from pygraph.inductor.decision import Decision, decide
from pygraph.inductor.failed import Failed
from pygraph.inductor.write_back import Fingerprint, fingerprint
from pygraph.ir import CAPTURABLE, H200, HOST, REASON, DeviceModel, Graph, TensorType
from pygraph.passes.base import Pass, PassContext
from pygraph.passes.legality import Legality
from pygraph.passes.legality.rules import captured_device
from pygraph.passes.manager import PassManager, PipelineResult

__all__ = ["MODELS", "Plan", "judge_graph", "model_for", "plan"]

MODELS: dict[str, DeviceModel] = {"cpu": HOST, "cuda": H200}
"""The built-in device models, by the kind of device whose work is captured: used where none was calibrated."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The IR after the passes and its fingerprint from before, what it was costed with, the passes and what they did,
    the decision, and times in ms."""

    graph: Graph
    lifted: Fingerprint
    model: DeviceModel
    passes: tuple[Pass, ...]
    result: PipelineResult
    decision: Decision
    lift_ms: float
    passes_ms: float


def plan(
    gm: torch.fx.GraphModule,
    kind: str,
    static_inputs: tuple[int, ...],
    manager: PassManager,
    failed: Failed | None = None,
) -> Plan:
    """Decide on ``gm``, of which the operators ``failed`` were tried. Raises PygraphError (PassError, VerifyError, …)
    and leaves ``gm`` as it is."""
    start = time.perf_counter()
    graph = lift(gm, kind=kind, static_inputs=static_inputs)
    if failed:
        failed.mark(graph)
    before = fingerprint(graph)
    lifted = time.perf_counter()
    ctx = _context(graph)
    result = manager.run(graph, ctx)
    done = time.perf_counter()
    decision = decide(graph, ctx.device, manager.text)
    return Plan(
        graph, before, ctx.model, manager.passes, result, decision, (lifted - start) * 1e3, (done - lifted) * 1e3
    )


def _context(graph: Graph) -> PassContext:
    device = captured_device(graph)
    places = (value.type.device for value in graph.values() if isinstance(value.type, TensorType))
    index = next((place.index for place in places if place.kind == device and place.index is not None), None)
    return PassContext(device, model_for(device, index))


def model_for(device: str, index: int | None = None) -> DeviceModel:
    """The device model that a graph is costed with: calibrated on this machine, or else built in."""
    model = stored_model(device, index) or MODELS[device]
    return model if torch.get_float32_matmul_precision() == "highest" else model.with_tf32()


def judge_graph(fx_graph: Any, device: str, passes: Sequence[Pass]) -> Mapping[str, str | None]:
    """The reason of each node of an FX graph by name, None where it is capturable, by the legality of ``passes``: for
    nodes that Inductor made."""
    gm = fx_graph.owning_module or torch.fx.GraphModule(torch.nn.Module(), fx_graph)
    graph = lift(gm, kind="inference")
    legality = next((item for item in passes if isinstance(item, Legality)), Legality())
    legality.run(graph, PassContext(device, MODELS[device]))
    return {n.name: None if n.meta.get(CAPTURABLE) else n.meta.get(REASON) or "unknown-node" for n in graph.nodes}
