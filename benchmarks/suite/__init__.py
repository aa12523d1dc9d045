"""The workloads: what users run, with random weights. One module per domain."""

from __future__ import annotations

from benchmarks.suite import (
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
from benchmarks.workload import Workload

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
