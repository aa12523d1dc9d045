"""Models of ``timm`` and ``torchvision`` with random weights: classification by convolutions and by attention,
segmentation, and parallel branches of several resolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import Call, Inputs, Make, inference, normalised
from benchmarks.workload import Workload

__all__ = ["WORKLOADS"]

TINY_CLASSES = 10


# -- models, in their usual and in a tiny size -------------------------------------------------------------------------


def resnet50() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet50(weights=None)
    return model


def tiny_resnet() -> nn.Module:
    """One block of each of ResNet-50's stages."""
    from torchvision.models import resnet

    model: nn.Module = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=TINY_CLASSES, width_per_group=8)
    return model


def vit_b16() -> nn.Module:
    return timm_model("vit_base_patch16_224")


def tiny_vit() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": TINY_CLASSES}
    return timm_model("vit_base_patch16_224", **sizes)


def convnext_tiny() -> nn.Module:
    """Layer scale begins at 1, not at 1e-6, which would hide the blocks of an untrained model from comparison."""
    return timm_model("convnext_tiny", ls_init_value=1.0)


def tiny_convnext() -> nn.Module:
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32), "num_classes": TINY_CLASSES}
    return timm_model("convnext_tiny", ls_init_value=1.0, **sizes)


def efficientnet_b0() -> nn.Module:
    return timm_model("efficientnet_b0")


def tiny_efficientnet() -> nn.Module:
    return timm_model("test_efficientnet", num_classes=TINY_CLASSES)


def swin_t() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.swin_t(weights=None)
    return model


def tiny_swin() -> nn.Module:
    """Two stages of two blocks each, so that every other block's windows are shifted and one merging lies between."""
    from torchvision.models.swin_transformer import SwinTransformer

    model: nn.Module = SwinTransformer([4, 4], 16, [2, 2], [2, 4], window_size=[2, 2], num_classes=TINY_CLASSES)
    return model


def deeplabv3_resnet50() -> nn.Module:
    from torchvision.models import segmentation

    model: nn.Module = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    return model


def tiny_deeplabv3() -> nn.Module:
    from torchvision.models import resnet
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3, IntermediateLayerGetter

    dilated = [False, True, True]
    network = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], width_per_group=8, replace_stride_with_dilation=dilated)
    features = IntermediateLayerGetter(network, return_layers={"layer4": "out"})
    model: nn.Module = DeepLabV3(features, DeepLabHead(2048, 5))
    return model


def googlenet() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.googlenet(weights=None, aux_logits=False, init_weights=False)
    return model


def tiny_googlenet() -> nn.Module:
    """Two of GoogLeNet's blocks of four branches."""
    from torchvision.models.googlenet import BasicConv2d, Inception

    blocks = (Inception(8, 4, 4, 8, 2, 4, 4), Inception(20, 4, 4, 8, 2, 4, 4))
    return nn.Sequential(BasicConv2d(3, 8, kernel_size=3), *blocks, *_head(20))


def inception_v3() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.inception_v3(weights=None, aux_logits=False, init_weights=False)
    return model


def tiny_inception_v3() -> nn.Module:
    """One of Inception's blocks of four branches."""
    from torchvision.models.inception import BasicConv2d, InceptionA

    return nn.Sequential(BasicConv2d(3, 8, kernel_size=3), InceptionA(8, pool_features=8), *_head(232))


def _head(channels: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, TINY_CLASSES)


def densenet121() -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.densenet121(weights=None)
    return model


def tiny_densenet() -> nn.Module:
    """Two blocks of two layers, each of which is given the results of all before it."""
    from torchvision.models.densenet import DenseNet

    model: nn.Module = DenseNet(8, (2, 2), 8, num_classes=TINY_CLASSES)
    return model


def hrnet_w18() -> nn.Module:
    return timm_model("hrnet_w18")


def tiny_hrnet() -> nn.Module:
    """Four branches as in HRNet-W18, with one block for each of four."""
    from timm.models.hrnet import HighResolutionNet

    def stage(kind: str, *channels: int) -> dict[str, Any]:
        count = len(channels)
        sizes = {"num_branches": count, "num_blocks": (1,) * count, "num_channels": channels}
        return {"num_modules": 1, "block_type": kind, "fuse_method": "SUM", **sizes}

    stages = {
        "stage1": stage("BOTTLENECK", 8),
        "stage2": stage("BASIC", 4, 8),
        "stage3": stage("BASIC", 4, 8, 12),
        "stage4": stage("BASIC", 4, 8, 12, 16),
    }
    model: nn.Module = HighResolutionNet({"stem_width": 8, **stages}, num_classes=TINY_CLASSES)
    return model


def timm_model(name: str, **sizes: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **sizes)
    return model


# -- inputs and calls --------------------------------------------------------------------------------------------------


def images(batch: int, size: int) -> Inputs:
    return lambda kind: torch.randn(batch, 3, size, size).to(kind)


def classes(model: Any, given: torch.Tensor) -> Any:
    return model(given)


def segments(model: Any, given: torch.Tensor) -> Any:
    return model(given)["out"]


# -- workloads ---------------------------------------------------------------------------------------------------------

CONVOLUTIONS = (
    "cuDNN may choose other algorithms, and fused kernels keep norms and activations in float32: units in the last "
    "place of float16 through up to 100 layers, against the largest result"
)
DENSE = (
    CONVOLUTIONS + "; the furthest of 5.7 million results, where rounding eager's way and the fused way is 7e-3 apart"
)
SENSITIVE = CONVOLUTIONS + "; rounding eager's way and the fused way is 5e-3 apart behind 16 untrained gated blocks"
ATTENTION = (
    "sums over up to 3072 products in another order, and layer norms and softmax that fused kernels keep in float32: "
    "some units in the last place of float16, against the largest logit"
)


@dataclass(frozen=True)
class Network:
    """A network in its usual and in a tiny size. ``size`` and ``tiny_size`` are the edges of its images, in pixels.

    ``batch_norms`` for those that need statistics before their results say anything.
    """

    name: str
    package: str
    model: Make
    tiny: Make
    batch_norms: bool
    size: int = 224
    tiny_size: int = 32
    call: Call = classes
    tolerance: float = 1e-2
    why_tolerance: str = CONVOLUTIONS

    def at(self, batch: int, *, calls: int, about: str) -> Workload:
        """The network's workload at one batch size."""
        model, tiny = self.model, self.tiny
        if self.batch_norms:
            model, tiny = normalised(model, images(8, 128)), normalised(tiny, images(8, 32))
        return Workload(
            name=f"{self.name}-{batch}",
            kind="inference",
            domain="vision",
            about=about,
            build=inference(model, images(batch, self.size), self.call),
            tiny=inference(tiny, images(min(batch, 2), self.tiny_size), self.call),
            calls=calls,
            tolerance=self.tolerance,
            why_tolerance=self.why_tolerance,
            packages=(self.package,) if self.package == "torchvision" else (self.package, "torchvision"),
            imports=(self.package,),
        )


RESNET50 = Network("resnet50", "torchvision", resnet50, tiny_resnet, batch_norms=True)
VIT_B16 = Network("vit-b16", "timm", vit_b16, tiny_vit, batch_norms=False, why_tolerance=ATTENTION)
CONVNEXT = Network("convnext-tiny", "timm", convnext_tiny, tiny_convnext, batch_norms=False)
EFFICIENTNET = Network(
    "efficientnet-b0",
    "timm",
    efficientnet_b0,
    tiny_efficientnet,
    batch_norms=True,
    tolerance=2e-2,
    why_tolerance=SENSITIVE,
)
SWIN = Network("swin-t", "torchvision", swin_t, tiny_swin, batch_norms=False, why_tolerance=ATTENTION)
GOOGLENET = Network("googlenet", "torchvision", googlenet, tiny_googlenet, batch_norms=True)
INCEPTION = Network("inception-v3", "torchvision", inception_v3, tiny_inception_v3, batch_norms=True, size=299)
DENSENET = Network("densenet121", "torchvision", densenet121, tiny_densenet, batch_norms=True)
HRNET = Network("hrnet-w18", "timm", hrnet_w18, tiny_hrnet, batch_norms=True, tiny_size=64)
DEEPLAB = Network(
    "deeplabv3",
    "torchvision",
    deeplabv3_resnet50,
    tiny_deeplabv3,
    batch_norms=True,
    size=520,
    tiny_size=48,
    call=segments,
    tolerance=3e-2,
    why_tolerance=DENSE,
)

WORKLOADS: tuple[Workload, ...] = (
    RESNET50.at(1, calls=30, about="ResNet-50 on one image: convolutions short enough for launches to show."),
    RESNET50.at(128, calls=10, about="ResNet-50 on 128 images: large activations, the GPU busy throughout."),
    VIT_B16.at(1, calls=30, about="ViT-B/16 on one image: an encoder of 197 tokens."),
    VIT_B16.at(64, calls=10, about="ViT-B/16 on 64 images: matrix products that fill the GPU."),
    CONVNEXT.at(1, calls=30, about="ConvNeXt-tiny on one image: depthwise convolutions, layer norms and products."),
    EFFICIENTNET.at(1, calls=30, about="EfficientNet-B0 on one image: made for phones, very short kernels on a GPU."),
    SWIN.at(1, calls=30, about="Swin-T on one image: attention in shifted windows, with rolls and position biases."),
    GOOGLENET.at(1, calls=60, about="GoogLeNet on one image: nine blocks of four short branches."),
    INCEPTION.at(1, calls=30, about="Inception v3 on one image: eleven blocks of up to six branches, some long."),
    DENSENET.at(1, calls=30, about="DenseNet-121 on one image: short kernels, and slices of wide concatenations."),
    HRNET.at(1, calls=30, about="HRNet-W18 on one image: over a thousand short kernels in four parallel branches."),
    DEEPLAB.at(1, calls=20, about="DeepLabV3 with ResNet-50 on an image of 520 pixels: dilated branches side by side."),
)
