"""Shared parts of inference workloads of whole models: how a model is made, placed and called.

Which models, of which sizes, is in the modules of their domains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.workload import Build, Compile, Step

__all__ = ["Call", "Inputs", "Make", "floating", "inference", "made", "normalised", "placed"]

Make: TypeAlias = Callable[[], nn.Module]
"""Makes a model with random weights, in float32, on the device that is the default."""

Inputs: TypeAlias = Callable[[torch.dtype], Any]
"""Makes what a model is called with, on the device that is the default; floating-point tensors of the type given."""

Call: TypeAlias = Callable[[Any, Any], Any]
"""Calls a model, compiled or not, with its inputs, as a user does, and returns the tensors to be compared."""

SEED = 0

RESIDUAL_SCALE = 0.2
"""Small enough for rounding not to grow, large enough for a wrong block to show."""

RESIDUAL_BLOCKS = ("BasicBlock", "Bottleneck", "InvertedResidual")
"""Classes of residual blocks in ``torchvision`` and ``timm``, which keep their norms in the order of their use."""


def floating(device: str) -> torch.dtype:
    """float16 on a GPU; float32 on a CPU, where half precision is emulated in places."""
    return torch.float16 if torch.device(device).type == "cuda" else torch.float32


def made(make: Make, device: str) -> nn.Module:
    """The model, ready for inference on ``device``: the same weights whenever it is made there."""
    torch.manual_seed(SEED)
    with torch.device(device):
        model = make()
    return model.to(device, floating(device)).eval()  # some models make parameters on the CPU whatever the default is


def normalised(make: Make, inputs: Inputs) -> Make:
    """A convolutional network whose batch norms are those of a trained one, as far as results are concerned.

    Their statistics come from a batch of ``inputs``: without them activations vanish or grow from layer to layer, and
    results hardly depend on the input, so that nothing would be left to compare. The last norm of each residual block
    has a scale of ``RESIDUAL_SCALE``: branches as strong as what they are added to make a random network chaotic, and
    rounding grows from block to block as it does in no trained one.
    """

    def make_normalised() -> nn.Module:
        model = make().eval()
        for block in model.modules():
            norms = [part for part in block.children() if isinstance(part, nn.BatchNorm2d)]
            if type(block).__name__ in RESIDUAL_BLOCKS:
                nn.init.constant_(norms[-1].weight, RESIDUAL_SCALE)
        take_statistics(model, inputs)
        return model

    return make_normalised


def take_statistics(model: nn.Module, inputs: Inputs) -> None:
    """Set the running statistics of a model's batch norms to those of one batch of ``inputs``."""
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train().momentum = 1.0
    with torch.no_grad():
        model(inputs(torch.float32))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval().momentum = momentum


def inference(make: Make, inputs: Inputs, call: Call) -> Build:
    """A step that calls one compiled model with the same inputs each time, without gradients."""

    def build(compile: Compile, device: str) -> Step:
        model = made(make, device)
        given = placed(inputs, device)
        compiled = compile(model)

        def run() -> Any:
            with torch.no_grad():
                return call(compiled, given)

        return run

    return build


def placed(inputs: Inputs, device: str) -> Any:
    """Seeded inputs on ``device``, of the type that the model's weights have there."""
    torch.manual_seed(SEED + 1)
    with torch.device(device):
        return inputs(floating(device))
