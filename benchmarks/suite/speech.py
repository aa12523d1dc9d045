"""Speech models of ``transformers`` with random weights, on synthetic features and waveforms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.suite.inference import Inputs, Make, inference, made, placed
from benchmarks.workload import Build, Compile, Step, Workload

__all__ = ["WORKLOADS"]

WHISPER_BASE = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
TINY_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 20,
    "num_mel_bins": 8,
}
TINY_WAV2VEC2 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

PROMPT = (50258, 50259, 50359, 50363)
"""Start of transcript, English, transcribe, no timestamps: what a multilingual Whisper's decoder begins with."""


# -- Whisper -----------------------------------------------------------------------------------------------------------


def whisper(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))
    return made


def spectrogram(batch: int, bins: int, frames: int) -> Inputs:
    """Log-mel features, between -1 and 1 as Whisper's extractor scales them, and the prompt."""

    def inputs(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.rand(batch, bins, frames) * 2 - 1
        return features.to(kind), torch.tensor([PROMPT]).repeat(batch, 1)

    return inputs


def transcription(make: Make, inputs: Inputs) -> Build:
    """The encoder, and the decoder's first step on what it returns: compiled one by one, as generation calls them."""

    def build(compile: Compile, device: str) -> Step:
        model: Any = made(make, device)
        features, prompt = placed(inputs, device)
        encode, decode = compile(model.get_encoder()), compile(model)

        def run() -> torch.Tensor:
            with torch.no_grad():
                encoded = encode(input_features=features)
                result: torch.Tensor = decode(encoder_outputs=encoded, decoder_input_ids=prompt, use_cache=False).logits
                return result

        return run

    return build


# -- wav2vec2 ----------------------------------------------------------------------------------------------------------


def wav2vec2(**sizes: Any) -> nn.Module:
    import transformers

    made: nn.Module = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**sizes))
    return made


def waveform(batch: int, samples: int) -> Inputs:
    """Sound at 16 kHz of mean 0 and variance 1, as the extractor normalises it."""
    return lambda kind: torch.randn(batch, samples).to(kind)


def characters(model: Any, given: torch.Tensor) -> Any:
    return model(input_values=given).logits


# -- workloads ---------------------------------------------------------------------------------------------------------

FP16 = (
    "sums over up to 2048 products in another order, and intermediates that fused kernels keep in float32, through the "
    "layers: some units in the last place of float16, against the largest logit"
)


def whisper_at(batch: int, calls: int, about: str) -> Workload:
    return Workload(
        name=f"whisper-base-{batch}",
        kind="inference",
        domain="speech",
        about=about,
        build=transcription(partial(whisper, **WHISPER_BASE), spectrogram(batch, 80, 3000)),
        tiny=transcription(partial(whisper, **TINY_WHISPER), spectrogram(min(batch, 2), 8, 40)),
        calls=calls,
        why_tolerance=FP16,
        packages=("transformers",),
        imports=("transformers.models.whisper.modeling_whisper",),
    )


WAV2VEC2 = Workload(
    name="wav2vec2-base-1",
    kind="inference",
    domain="speech",
    about="wav2vec2-base on five seconds of sound: strided convolutions over the waveform, then an encoder.",
    build=inference(wav2vec2, waveform(1, 80_000), characters),
    tiny=inference(partial(wav2vec2, **TINY_WAV2VEC2), waveform(1, 4_000), characters),
    why_tolerance=FP16,
    packages=("transformers",),
    imports=("transformers.models.wav2vec2.modeling_wav2vec2",),
)

WORKLOADS: tuple[Workload, ...] = (
    whisper_at(1, 30, "Whisper-base on 30 seconds of sound: a long encoder, then a decoder step on what it returned."),
    whisper_at(16, 10, "Whisper-base on 16 recordings: the encoder fills the GPU, the decoder step does not."),
    WAV2VEC2,
)
