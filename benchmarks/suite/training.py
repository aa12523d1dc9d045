"""Training steps on fixed batches: forward, backward and the optimizer, the model alone compiled.

A step returns the loss and two parameters after it. Steps that draw random numbers are seeded right before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.suite.inference import floating
from benchmarks.suite.parts import Block
from benchmarks.workload import Compile, Step, Workload

__all__ = ["WORKLOADS"]

Sizes: TypeAlias = dict[str, Any]

SEED = 1
"""What random numbers are drawn from once the steps begin."""


def watched(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    """The loss, and the first and the last matrix: wrong gradients show there, steps later in the loss too.

    No vectors: biases that begin at zero are, under AdamW, little but the signs of gradients for some steps.
    """
    first, *_, last = (parameter for parameter in model.parameters() if parameter.dim() > 1)
    return [loss.detach(), first.detach(), last.detach()]


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Step:
    """The usual step: gradients dropped, loss, backward, update."""
    torch.manual_seed(SEED)

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return watched(loss, model)

    return step


# -- small models of ours and of torchvision ---------------------------------------------------------------------------


def perceptron(compile: Compile, device: str, *, inputs: int, hidden: int, classes: int, batch: int) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, inputs, device=device), torch.randint(0, classes, (batch,), device=device)
    forward = compile(model)
    return stepping(model, optimizer, lambda: nn.functional.cross_entropy(forward(x), y))


def resnet(compile: Compile, device: str, *, batch: int, size: int) -> Step:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet18().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    x, y = torch.randn(batch, 3, size, size, device=device), torch.randint(0, 1000, (batch,), device=device)
    forward = compile(model)
    return stepping(model, optimizer, lambda: nn.functional.cross_entropy(forward(x), y))


class Classifier(nn.Module):
    """Blocks over tokens [batch, length] and a class for each sequence; blocks may be checkpointed."""

    def __init__(self, words: int, longest: int, width: int, heads: int, layers: int, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        made: torch.Tensor = self.head(self.norm(x).mean(1))
        return made


def classifier(
    compile: Compile,
    device: str,
    *,
    words: int,
    length: int,
    width: int,
    heads: int,
    layers: int,
    batch: int,
    micro_batches: int = 1,
    checkpointed: bool = False,
) -> Step:
    """With several micro-batches, their gradients are accumulated before the optimizer's step."""
    torch.manual_seed(0)
    model = Classifier(words, length, width, heads, layers, checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, words, (micro_batches, batch, length), device=device).unbind()
    labels = torch.randint(0, 16, (micro_batches, batch), device=device).unbind()
    forward = compile(model)

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for x, y in zip(tokens, labels, strict=True):
            loss = nn.functional.cross_entropy(forward(x), y) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return watched(total, model)

    return step


# -- models of transformers --------------------------------------------------------------------------------------------


def bert(compile: Compile, device: str, *, batch: int, length: int, words: int, **sizes: Any) -> Step:
    """Masked language modelling; dropout of 0.1 in attention too, as BERT has it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=words, **sizes)
    model: Any = transformers.BertForMaskedLM(config)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = torch.randint(0, words, (2, batch, length), device=device).unbind()
    forward = compile(model)
    return stepping(model, optimizer, lambda: forward(input_ids=tokens, labels=labels).loss)


def gpt2(compile: Compile, device: str, *, batch: int, length: int, words: int, **sizes: Any) -> Step:
    """Weights in float32, the forward under bfloat16 autocast, no dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=words, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **sizes,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, words, (batch, length), device=device)
    forward = compile(model)

    def loss() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            made: torch.Tensor = forward(input_ids=tokens, labels=tokens).loss
        return made

    return stepping(model, optimizer, loss)


def llama(compile: Compile, device: str, *, batch: int, length: int, words: int, **sizes: Any) -> Step:
    """All in bfloat16 on a GPU, with SGD: what the model's own memory leaves matters here."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=words, use_cache=False, **sizes)
    dtype = torch.float if floating(device) == torch.float else torch.bfloat16
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(config)
        model = model.to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, words, (batch, length), device=device)
    forward = compile(model)
    return stepping(model, optimizer, lambda: forward(input_ids=tokens, labels=tokens).loss)


DRIFT = "float32 gradients summed in another order, carried by a few optimizer steps"
ADAM_DRIFT = f"{DRIFT}; AdamW moves weights whose gradient is nearly zero by its sign"
ADAM_SMALL_WEIGHTS = (
    "AdamW moves a weight whose gradient is rounding noise by the whole rate, either way: apart by up to 2 · 1e-4 in "
    "each of 7 steps, where the largest weights are 0.09, drawn with a deviation of 0.02"
)

ENCODER: Sizes = {"words": 32000, "length": 128, "width": 512, "heads": 8, "layers": 6, "batch": 16}
TINY_ENCODER: Sizes = {"words": 64, "length": 8, "width": 32, "heads": 2, "layers": 2, "batch": 4}
TINY_LLAMA: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY_BERT: Sizes = {**TINY_LLAMA, "max_position_embeddings": 16}
LLAMA: Sizes = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
}
BERT: Sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "mlp-training",
        "training",
        "perceptrons",
        "A perceptron 512-1024-1024-1024-10, batch 64, with dropout, SGD and cross entropy: host-bound.",
        partial(perceptron, inputs=512, hidden=1024, classes=10, batch=64),
        partial(perceptron, inputs=32, hidden=48, classes=10, batch=8),
        calls=50,
        tolerance=1e-3,
        why_tolerance=DRIFT,
        random=True,
        whole_step=True,
    ),
    Workload(
        "bert-small-training",
        "training",
        "language",
        "A BERT of 4 layers, width 512, batch 16, with dropout, also in attention, and AdamW.",
        partial(bert, batch=16, length=128, words=30522, **BERT),
        partial(bert, batch=2, length=8, words=64, **TINY_BERT),
        tolerance=2e-2,
        why_tolerance=ADAM_SMALL_WEIGHTS,
        random=True,
        packages=("transformers",),
        imports=("transformers.models.bert.modeling_bert",),
    ),
    Workload(
        "resnet18-training",
        "training",
        "vision",
        "ResNet-18, batch 32, in float32 with SGD and momentum; batch statistics change in place.",
        partial(resnet, batch=32, size=224),
        partial(resnet, batch=4, size=32),
        calls=15,
        tolerance=3e-2,
        why_tolerance="convolutions in TF32, cuDNN's default, by other algorithms, and batch norms on top of them",
        whole_step=True,
        packages=("torchvision",),
        imports=("torchvision",),
    ),
    Workload(
        "llama-1b-training",
        "training",
        "language",
        "A Llama of a billion parameters in bfloat16, four sequences of 1,024, SGD: peak memory is what matters.",
        partial(llama, batch=4, length=1024, words=32000, **LLAMA),
        partial(llama, batch=2, length=8, words=64, **TINY_LLAMA),
        calls=3,
        tolerance=2e-2,
        why_tolerance="bfloat16 sums in another order; one step of its 8 bits is 0.8 %",
        packages=("transformers",),
        imports=("transformers.models.llama.modeling_llama",),
    ),
    Workload(
        "gpt2-small-training",
        "training",
        "language",
        "A GPT-2 of 6 layers, width 768, eight sequences of 512, under bfloat16 autocast, AdamW.",
        partial(gpt2, batch=8, length=512, words=50257, n_embd=768, n_layer=6, n_head=12),
        partial(gpt2, batch=2, length=8, words=64, n_embd=32, n_layer=2, n_head=2),
        calls=10,
        tolerance=2e-2,
        why_tolerance="bfloat16 sums in another order; one step of its 8 bits is 0.8 %",
        packages=("transformers",),
        imports=("transformers.models.gpt2.modeling_gpt2",),
    ),
    Workload(
        "accumulation-training",
        "training",
        "language",
        "A transformer classifier of 6 layers, width 512: two micro-batches of 16 whose gradients are accumulated.",
        partial(classifier, micro_batches=2, **ENCODER),
        partial(classifier, micro_batches=2, **TINY_ENCODER),
        why_tolerance=ADAM_DRIFT,
    ),
    Workload(
        "checkpoint-training",
        "training",
        "language",
        "The same classifier at batch 16 with every block checkpointed: activations are computed a second time.",
        partial(classifier, checkpointed=True, **ENCODER),
        partial(classifier, checkpointed=True, **TINY_ENCODER),
        why_tolerance=ADAM_DRIFT,
    ),
)
