"""Small models with random weights, of the kinds that users run: each with a way to make fresh inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

__all__ = ["ZOO", "Entry", "outputs_of"]

Inputs = dict[str, torch.Tensor]

VOCABULARY = 101
LENGTH = 12
BATCH = 2


@dataclass(frozen=True)
class Entry:
    """How to make a model, and inputs for it; the model returns an object with ``loss`` and ``logits``."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def _tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def _language() -> Inputs:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def _translation() -> Inputs:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _images() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 5, (BATCH,))}


def _bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return hf.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def _llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return hf.MixtralForCausalLM(config)


ZOO: dict[str, Entry] = {
    "bert": Entry(_bert, _language),
    "gpt2": Entry(_gpt2, _language),
    "t5": Entry(_t5, _translation),
    "vit": Entry(_vit, _images),
    "llama": Entry(_llama, _language),
    "mixtral": Entry(_mixtral, _language),
}


def outputs_of(result: Any) -> list[torch.Tensor]:
    """The tensors that are compared: loss and logits."""
    return [result.loss, result.logits]
