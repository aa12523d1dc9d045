"""Language models of ``transformers`` with random weights: encoders, decoders, an encoder-decoder, a prefill.

Decoding with caches is in another module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import Call, Inputs, inference
from benchmarks.workload import Workload

__all__ = ["WORKLOADS"]

LENGTH, WORDS = 128, 30000
TINY_LENGTH, TINY_WORDS = 16, 97


# -- models ------------------------------------------------------------------------------------------------------------


def bert(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    return made


def gpt2(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes))
    return made


def t5(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.T5ForConditionalGeneration(transformers.T5Config(use_cache=False, **sizes))
    return made


def xlnet(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes))
    return made


def llama(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made


TINY_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TINY_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
TINY_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}

XLNET_BASE = {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}
TINY_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}

LLAMA_8_LAYERS = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
TINY_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


# -- inputs and calls --------------------------------------------------------------------------------------------------


def tokens(batch: int, length: int, words: int) -> Inputs:
    return lambda _: {"input_ids": torch.randint(0, words, (batch, length))}


def translation(batch: int, length: int, words: int) -> Inputs:
    """A source, and a quarter of its length already translated."""

    def inputs(_: torch.dtype) -> dict[str, torch.Tensor]:
        source = torch.randint(0, words, (batch, length))
        return {"input_ids": source, "decoder_input_ids": source[:, : length // 4].contiguous()}

    return inputs


def logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = model(**given).logits
    return result


def logits_without_memory(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """XLNet would return its hidden states for the next segment as well, which nobody asks for here."""
    result: torch.Tensor = model(**given, use_mems=False).logits
    return result


def prefill(model: Any, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The logits of the last position, and the cache made on the way: what generation begins with."""
    result = model(**given, use_cache=True, logits_to_keep=1)
    caches = [cache for layer in result.past_key_values.layers for cache in (layer.keys, layer.values)]
    return [result.logits, *caches]


# -- workloads ---------------------------------------------------------------------------------------------------------

FP16 = (
    "sums over up to 3072 products in another order, and intermediates that fused kernels keep in float32, through the "
    "layers: some units in the last place of float16, against the largest logit"
)


@dataclass(frozen=True)
class Family:
    """A model in its usual and in a tiny size, with what it is called with (batch, length, vocabulary) and how."""

    name: str
    model: Callable[..., nn.Module]
    base: dict[str, Any]
    tiny: dict[str, Any]
    inputs: Callable[[int, int, int], Inputs] = tokens
    call: Call = logits

    def at(self, batch: int, *, calls: int, about: str, length: int = LENGTH) -> Workload:
        """The family's workload at one batch size, with sequences of ``length`` tokens."""
        small = partial(self.model, **self.tiny, vocab_size=TINY_WORDS)
        return Workload(
            name=f"{self.name}-{batch}",
            kind="inference",
            domain="language",
            about=about,
            build=inference(partial(self.model, **self.base), self.inputs(batch, length, WORDS), self.call),
            tiny=inference(small, self.inputs(min(batch, 4), TINY_LENGTH, TINY_WORDS), self.call),
            calls=calls,
            why_tolerance=FP16,
            packages=("transformers",),
            imports=(MODULES[self.model],),
        )


MODULES = {
    model: f"transformers.models.{model.__name__}.modeling_{model.__name__}" for model in (bert, gpt2, t5, xlnet, llama)
}

BERT = Family("bert", bert, {}, TINY_BERT)
GPT2 = Family("gpt2", gpt2, {}, TINY_GPT2)
T5 = Family("t5", t5, {}, TINY_T5, inputs=translation)
XLNET = Family("xlnet", xlnet, XLNET_BASE, TINY_XLNET, call=logits_without_memory)
PREFILL = Family("llama-prefill", llama, LLAMA_8_LAYERS, TINY_LLAMA, call=prefill)

WORKLOADS: tuple[Workload, ...] = (
    BERT.at(1, calls=30, about="BERT-base on one sentence of 128 tokens: many short kernels, bound by their launches."),
    BERT.at(64, calls=10, about="BERT-base on 64 sentences: the GPU is busy throughout, a graph has little to save."),
    GPT2.at(1, calls=30, about="GPT-2 on 128 tokens without a cache: short kernels, a large product at the end."),
    GPT2.at(64, calls=10, about="GPT-2 on 64 sequences: logits of 0.8 GB a call, which the caller has to own."),
    T5.at(1, calls=30, about="T5-small on one sentence: encoder and decoder, position biases, checks for infinities."),
    T5.at(64, calls=10, about="T5-small on 64 sentences: the same small layers, with the GPU busy."),
    XLNET.at(
        1, calls=30, about="XLNet-base on one sentence: relative positions by einsum, many kernels beside products."
    ),
    XLNET.at(32, calls=10, about="XLNet-base on 32 sentences: long copies and permutations, with the GPU busy."),
    PREFILL.at(
        1,
        calls=30,
        length=512,
        about="Prefill of 512 tokens by eight layers of Llama-3.2-1B's width: large products, a new cache returned.",
    ),
)
