"""The workloads of the CUDA benchmark: small faithful models of what users run, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.cuda.capture_cost import capture_cost
from benchmarks.cuda.measure import Step, Workload

__all__ = ["WORKLOADS"]

Compile = Callable[[Any], Any]
DEVICE = "cuda"


# -- caches written in place, as a decoder with static caches does -----------------------------------------------------


class DecodeLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        batch, _, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        mask = torch.arange(keys.shape[2], device=x.device) <= at
        mixed = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None, None])
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, 1, width))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecodeLayer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, caches: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[2 * i], caches[2 * i + 1], at)
        return x


def decode(compile: Compile) -> Step:
    layers, width, heads, batch, length = 16, 1024, 16, 8, 512
    torch.manual_seed(0)
    model = Decoder(layers, width, heads).half().to(DEVICE).eval()
    caches = [
        torch.zeros(batch, heads, length, width // heads, device=DEVICE, dtype=torch.half) for _ in range(2 * layers)
    ]
    x = torch.randn(batch, 1, width, device=DEVICE, dtype=torch.half)
    at = torch.tensor([7], device=DEVICE)
    step = compile(model)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return step(x, caches, at)

    return run


def pointwise_chain(compile: Compile) -> Step:
    """Fresh 256 MB inputs for each call, as a simulation's time step produces them."""
    count = 64 * 2**20

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = a
        for i in range(6):
            x = torch.sin(x * 0.5 + b) - x.cumsum(0)[:1] * 1e-9 if i == 3 else torch.tanh(x + b * 0.1)
        return x

    step = compile(chain)
    torch.manual_seed(0)
    pool = [torch.randn(count, device=DEVICE) for _ in range(6)]
    turn = iter(_forever(len(pool)))

    def run() -> torch.Tensor:
        i = next(turn)
        with torch.no_grad():
            return step(pool[i], pool[i - 1])

    return run


def _forever(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def mlp(compile: Compile) -> Step:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    model = nn.Sequential(*layers).to(DEVICE).eval()
    step, x = compile(model), torch.randn(8, 256, device=DEVICE)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return step(x)

    return run


def many_addresses(fresh: bool) -> Callable[[Compile], Step]:
    """300 tensors, new ones for each call or the same."""

    def build(compile: Compile) -> Step:
        def many(xs: list[torch.Tensor]) -> torch.Tensor:
            total = xs[0]
            for i in range(0, len(xs), 3):
                total = (
                    torch.sort(total + xs[i] * xs[i + 1] - xs[i + 2]).values
                    if i % 30 == 0
                    else total @ xs[i] + xs[i + 1]
                )
            return total

        step = compile(many)
        torch.manual_seed(0)
        sets = [[torch.randn(32, 32, device=DEVICE) * 0.1 for _ in range(300)] for _ in range(2 if fresh else 1)]
        turn = iter(_forever(len(sets)))

        def run() -> torch.Tensor:
            with torch.no_grad():
                return step(sets[next(turn)])

        return run

    return build


# -- models of transformers and torchvision ----------------------------------------------------------------------------


def language(kind: str, batch: int, length: int = 128) -> Callable[[Compile], Step]:
    def build(compile: Compile) -> Step:
        import transformers as hf

        made = {
            "bert": lambda: hf.BertForMaskedLM(hf.BertConfig()),
            "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)),
            "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(use_cache=False)),
            "xlnet": lambda: hf.XLNetLMHeadModel(hf.XLNetConfig(d_model=768, n_layer=12, n_head=12, d_inner=3072)),
        }
        torch.manual_seed(0)
        model = made[kind]().half().to(DEVICE).eval()
        tokens = torch.randint(0, 30000, (batch, length), device=DEVICE)
        inputs = {"input_ids": tokens}
        if kind == "t5":
            inputs["decoder_input_ids"] = tokens[:, : length // 4].contiguous()
        if kind == "xlnet":
            inputs["use_mems"] = False
        step = compile(model)

        def run() -> torch.Tensor:
            with torch.no_grad():
                return step(**inputs).logits

        return run

    return build


def resnet(batch: int) -> Callable[[Compile], Step]:
    def build(compile: Compile) -> Step:
        import torchvision

        torch.manual_seed(0)
        model = torchvision.models.resnet50().half().to(DEVICE).eval()
        step, x = compile(model), torch.randn(batch, 3, 224, 224, device=DEVICE, dtype=torch.half)

        def run() -> torch.Tensor:
            with torch.no_grad():
                return step(x)

        return run

    return build


def llama_training(compile: Compile) -> Step:
    """One billion parameters, bf16, one step with SGD; peak memory is what matters here."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=16,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 32000, (4, 1024), device=DEVICE)
    step = compile(model)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


def mlp_training(compile: Compile) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 512, device=DEVICE), torch.randint(0, 10, (64,), device=DEVICE)
    step = compile(model)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(step(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


BERT, GPT2, T5, XLNET = ((f"transformers.models.{kind}.modeling_{kind}",) for kind in ("bert", "gpt2", "t5", "xlnet"))
LLAMA, VISION = ("transformers.models.llama.modeling_llama",), ("torchvision",)

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("decode-kv", decode),
        Workload("pointwise-256mb", pointwise_chain),
        Workload("mlp-host", mlp, calls=200),
        Workload("addresses-stable-300", many_addresses(False)),
        Workload("addresses-fresh-300", many_addresses(True)),
        Workload("mlp-training", mlp_training, calls=50),
        Workload("capture-cost", modes=("pygraph",), own=capture_cost),
        Workload("bert-1", language("bert", 1), imports=BERT),
        Workload("gpt2-1", language("gpt2", 1), imports=GPT2),
        Workload("t5-1", language("t5", 1), imports=T5),
        Workload("xlnet-1", language("xlnet", 1), imports=XLNET),
        Workload("resnet50-1", resnet(1), imports=VISION),
        Workload("bert-64", language("bert", 64), calls=10, imports=BERT),
        Workload("gpt2-64", language("gpt2", 64), calls=10, imports=GPT2),
        Workload("t5-64", language("t5", 64), calls=10, imports=T5),
        Workload("xlnet-32", language("xlnet", 32), calls=10, imports=XLNET),
        Workload("resnet50-128", resnet(128), calls=10, imports=VISION),
        Workload("llama-1b-training", llama_training, calls=3, blocks=3, imports=LLAMA),
    )
}
