"""The suite of workloads that ``pygraph bench`` runs: what users run, with random weights. One module per domain.

What a workload is, is said in ``pygraph.bench.workload``.
"""

from __future__ import annotations

from pygraph.bench.suite import (
    addresses,
    decode,
    diffusion,
    gnn,
    language,
    moe,
    recommendation,
    scalars,
    sizes,
    small,
    speech,
    stencil,
    training,
    vision,
)
from pygraph.bench.workload import Workload

__all__ = ["WORKLOADS"]

_MODULES = (
    language,
    vision,
    speech,
    diffusion,
    recommendation,
    moe,
    gnn,
    stencil,
    decode,
    scalars,
    sizes,
    training,
    small,
    addresses,
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for module in _MODULES for workload in module.WORKLOADS}
"""Every workload by name, domain by domain."""
