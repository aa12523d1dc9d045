"""A diffusion UNet of our own, and sampling with it: the network alone, and a few steps of DDIM around it.

The network is built like those of latent diffusion models: time embedding, residual blocks, attention where the
resolution is low, skip connections. It has random weights, and no zero ones, which would hide blocks from comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.suite.inference import Inputs, Make, inference, made, placed
from benchmarks.workload import Build, Compile, Step, Workload

__all__ = ["WORKLOADS"]

LATENT_CHANNELS = 4


# -- the network -------------------------------------------------------------------------------------------------------


class TimeEmbedding(nn.Module):
    """Sines and cosines of time steps, and two layers on them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.width = width
        self.first = nn.Linear(width, out)
        self.second = nn.Linear(out, out)

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        exponents = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
        angles = timesteps[:, None].float() * torch.exp(-math.log(10_000) * exponents)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.first.weight.dtype)
        embedded: torch.Tensor = self.second(F.silu(self.first(waves)))
        return embedded


class ResidualBlock(nn.Module):
    """Two convolutions, with the time embedding added between them."""

    def __init__(self, channels: int, out: int, time: int, groups: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(groups, channels)
        self.conv_in = nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm_out = nn.GroupNorm(groups, out)
        self.conv_out = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_in(F.silu(self.norm_in(x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        hidden = self.conv_out(F.silu(self.norm_out(hidden)))
        result: torch.Tensor = self.skip(x) + hidden
        return result


class Attention(nn.Module):
    """Self-attention over all positions of an image."""

    def __init__(self, channels: int, head: int, groups: int) -> None:
        super().__init__()
        self.heads = channels // head
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).view(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, height * width, channels)
        result: torch.Tensor = x + self.out(mixed).transpose(1, 2).reshape(x.shape)
        return result


class Block(nn.Module):
    """A residual block, and attention where ``head`` gives the width of a head."""

    def __init__(self, channels: int, out: int, time: int, groups: int, head: int | None) -> None:
        super().__init__()
        self.residual = ResidualBlock(channels, out, time, groups)
        self.attention = nn.Identity() if head is None else Attention(out, head, groups)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attention(self.residual(x, time))
        return result


class Upsample(nn.Module):
    """Twice the resolution, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return result


class UNet(nn.Module):
    """Predicts the noise in ``latents`` (batch, 4, height, width) at ``timestep``, a scalar tensor on any device.

    One entry of ``widths`` for each resolution, each half of the last; attention from the second on.
    """

    def __init__(self, widths: Sequence[int], depth: int, head: int, groups: int) -> None:
        super().__init__()
        time = 4 * widths[0]
        block = partial(Block, time=time, groups=groups)
        self.time = TimeEmbedding(widths[0], time)
        self.stem = nn.Conv2d(LATENT_CHANNELS, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        at, skips = widths[0], [widths[0]]
        for level, width in enumerate(widths):
            for _ in range(depth):
                self.down.append(block(at, width, head=head if level else None))
                at = width
                skips.append(at)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(at, at, 3, stride=2, padding=1))
                skips.append(at)
        self.middle = nn.ModuleList([block(at, at, head=head), block(at, at, head=None)])
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(depth + 1):
                self.up.append(block(at + skips.pop(), width, head=head if level else None))
                at = width
            if level:
                self.up.append(Upsample(at))
        self.norm = nn.GroupNorm(groups, at)
        self.head = nn.Conv2d(at, LATENT_CHANNELS, 3, padding=1)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        time = self.time(timestep.to(latents.device).expand(latents.shape[0]))
        x = self.stem(latents)
        skips = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, Block) else part(x)
            skips.append(x)
        for part in self.middle:
            x = part(x, time)
        for part in self.up:
            x = part(torch.cat([x, skips.pop()], dim=1), time) if isinstance(part, Block) else part(x)
        noise: torch.Tensor = self.head(F.silu(self.norm(x)))
        return noise


unet = partial(UNet, widths=(128, 256, 384, 512), depth=2, head=64, groups=32)
tiny_unet = partial(UNet, widths=(8, 16), depth=1, head=8, groups=4)


# -- sampling ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ddim:
    """The deterministic sampler of Song et al. (2020), eq. 12 with sigma 0, on 1000 steps of a scaled-linear schedule.

    Its tables are on the CPU, as those of the schedulers that people use: its scalars are CPU tensors.
    """

    steps: int
    betas: tuple[float, float] = (0.00085, 0.012)
    trained_steps: int = 1000

    def timesteps(self) -> torch.Tensor:
        """Time steps from the noisiest on: int64, on the CPU."""
        stride = self.trained_steps // self.steps
        return torch.arange(self.steps - 1, -1, -1, device="cpu") * stride + 1

    def signal(self) -> torch.Tensor:
        """The signal's share of the variance at each of the ``timesteps``, and 1 for the end: float32, on the CPU."""
        low, high = (beta**0.5 for beta in self.betas)
        betas = torch.linspace(low, high, self.trained_steps, dtype=torch.float32, device="cpu") ** 2
        kept = torch.cumprod(1 - betas, dim=0)[self.timesteps()]
        return torch.cat([kept, torch.ones(1)])


def denoised(latents: torch.Tensor, noise: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    """``latents`` one step on: ``now`` and ``then`` are scalars, the signal's shares before and after."""
    clean = (latents - (1 - now) ** 0.5 * noise) / now**0.5
    return then**0.5 * clean + (1 - then) ** 0.5 * noise


def sampling(make: Make, inputs: Inputs, steps: int, compiled: Literal["network", "step"]) -> Build:
    """A whole loop of ``steps`` denoising steps from the same noise.

    ``network``: the network is compiled and the scheduler is not, the time steps are on the model's device.
    ``step``: one function of network and scheduler is compiled, its scalars are CPU tensors.
    """

    def build(compile: Compile, device: str) -> Step:
        model = made(make, device)
        latents = placed(inputs, device)
        timesteps, signal = Ddim(steps).timesteps(), Ddim(steps).signal()

        def denoise(x: torch.Tensor, timestep: torch.Tensor, now: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
            return denoised(x, network(x, timestep), now, then)

        network: Any = compile(model) if compiled == "network" else model
        step: Any = compile(denoise) if compiled == "step" else denoise
        times = timesteps.to(device) if compiled == "network" else timesteps

        def run() -> torch.Tensor:
            x: torch.Tensor = latents
            with torch.no_grad():
                for at in range(steps):
                    x = step(x, times[at], signal[at], signal[at + 1])
            return x

        return run

    return build


# -- workloads ---------------------------------------------------------------------------------------------------------


def latents(batch: int, size: int) -> Inputs:
    return lambda kind: torch.randn(batch, LATENT_CHANNELS, size, size).to(kind)


def latents_and_time(batch: int, size: int) -> Inputs:
    return lambda kind: (latents(batch, size)(kind), torch.tensor(500))


def predict(model: Any, given: tuple[torch.Tensor, torch.Tensor]) -> Any:
    return model(*given)


FP16 = (
    "cuDNN may choose other algorithms, and fused kernels keep group norms and activations in float32: units in the "
    "last place of float16 through some 60 layers, against the largest result"
)


def network_at(batch: int, calls: int, about: str) -> Workload:
    return Workload(
        name=f"unet-{batch}",
        kind="inference",
        domain="diffusion",
        about=about,
        build=inference(unet, latents_and_time(batch, 64), predict),
        tiny=inference(tiny_unet, latents_and_time(min(batch, 2), 8), predict),
        calls=calls,
        why_tolerance=FP16,
    )


def sampling_of(name: str, compiled: Literal["network", "step"], about: str) -> Workload:
    return Workload(
        name=name,
        kind="inference",
        domain="diffusion",
        about=about,
        build=sampling(unet, latents(1, 64), 4, compiled),
        tiny=sampling(tiny_unet, latents(1, 8), 4, compiled),
        calls=10,
        why_tolerance=FP16,
    )


WORKLOADS: tuple[Workload, ...] = (
    network_at(1, 30, "A UNet on one latent image of 64 by 64: many short kernels, and skips that live long."),
    network_at(8, 10, "The UNet on eight latent images: large activations, the GPU busy."),
    sampling_of("ddim-1", "network", "Four DDIM steps, the UNet compiled and the scheduler not: four replays a call."),
    sampling_of(
        "ddim-step-1", "step", "Four DDIM steps, network and scheduler compiled together: its scalars are CPU tensors."
    ),
)
