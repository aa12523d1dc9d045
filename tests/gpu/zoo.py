"""Models of transformers, timm and torchvision, small enough to compile in seconds, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

__all__ = ["SWEEP", "Entry"]

WORDS, LENGTH, BATCH = 503, 32, 2


@dataclass(frozen=True)
class Entry:
    """How to make a model and its keyword arguments; ``dtype`` is that of inference (training is in float32)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    dtype: torch.dtype = torch.float32
    trains: bool = True


def tokens(name: str = "input_ids") -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randint(0, WORDS, (BATCH, LENGTH))}


def pairs() -> dict[str, torch.Tensor]:
    source, target = torch.randint(0, WORDS, (2, BATCH, LENGTH))
    return {"input_ids": source, "decoder_input_ids": target}


def image(size: int = 64, name: str = "x") -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randn(4 * BATCH, 3, size, size)}


def language(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A small ``<kind>ForCausalLM``, ``…ForMaskedLM`` or ``…LMHeadModel`` without a cache."""

    def make() -> nn.Module:
        config = getattr(hf, f"{kind}Config")(vocab_size=WORDS, **sizes)
        config.use_cache = False
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        for head in ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration"):
            model = getattr(hf, kind + head, None)
            if model is not None:
                return model(config)
        raise LookupError(kind)

    return make


ENCODER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
DECODER = {**ENCODER, "num_key_value_heads": 2}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4}

HALF, BF16 = torch.float16, torch.bfloat16

SWEEP: dict[str, Entry] = {
    "bert": Entry(language("Bert", **ENCODER), tokens(), HALF),
    "roberta": Entry(language("Roberta", **ENCODER, max_position_embeddings=64), tokens(), HALF),
    "distilbert": Entry(language("DistilBert", dim=64, n_layers=2, n_heads=4, hidden_dim=128), tokens(), HALF),
    "electra": Entry(language("Electra", **ENCODER, embedding_size=64), tokens()),
    "gpt2": Entry(language("GPT2", **GPT), tokens(), HALF),
    "gpt_neox": Entry(language("GPTNeoX", **ENCODER), tokens(), HALF),
    "opt": Entry(
        language(
            "OPT", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, word_embed_proj_dim=64
        ),
        tokens(),
        HALF,
    ),
    "llama": Entry(language("Llama", **DECODER), tokens(), BF16),
    "mistral": Entry(language("Mistral", **DECODER), tokens(), BF16),
    "qwen2": Entry(language("Qwen2", **DECODER), tokens(), BF16),
    "gemma": Entry(language("Gemma", **DECODER, head_dim=16), tokens(), BF16),
    "phi": Entry(language("Phi", **DECODER), tokens(), HALF),
    "t5": Entry(
        language("T5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0),
        pairs,
        torch.float32,
    ),
    "bart": Entry(
        language(
            "Bart",
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=64,
        ),
        pairs,
        HALF,
    ),
    "resnet18": Entry(lambda: torchvision.models.resnet18(num_classes=10), image(), HALF),
    "resnet50": Entry(lambda: torchvision.models.resnet50(num_classes=10), image(), HALF),
    "mobilenet_v3": Entry(lambda: torchvision.models.mobilenet_v3_small(num_classes=10), image(), HALF),
    "vgg11": Entry(lambda: torchvision.models.vgg11_bn(num_classes=10), image(), HALF, trains=False),
    "squeezenet": Entry(lambda: torchvision.models.squeezenet1_1(num_classes=10), image(), HALF, trains=False),
    "vit": Entry(lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10), image(32), HALF),
    "convnext": Entry(lambda: timm.create_model("convnext_atto", num_classes=10), image(), HALF),
    "mixer": Entry(lambda: timm.create_model("mixer_s32_224", img_size=64, num_classes=10), image(), HALF),
    "efficientnet": Entry(lambda: timm.create_model("efficientnet_b0", num_classes=10), image(), HALF, trains=False),
}
