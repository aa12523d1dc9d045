"""Statements of ``docs/clients.md`` beside its blocks: ways that compile, names in saved files, and errors that
packages raise."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("fresh")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, pad_token_id=0, eos_token_id=None)).eval()


def replays(call: Callable[[], object]) -> bool:
    """Run four calls. Return True if any of them replays."""
    before = pygraph.counters().get("replays", 0)
    with torch.no_grad():
        for _ in range(4):
            call()
    return pygraph.counters().get("replays", 0) > before


def in_place(model: Any) -> Any:
    model.compile(backend="pygraph")
    return model


def by_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="pygraph")
    return model


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="pygraph")


@pytest.mark.parametrize(("way", "compiles"), [(in_place, False), (by_forward, True), (wrapped, True)])
def test_a_class_of_torch_is_not_compiled_in_place(way: Any, compiles: bool) -> None:
    model = way(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    assert replays(lambda: model(torch.randn(4, 16))) is compiles


def test_a_copy_is_not_compiled() -> None:
    model = copy.deepcopy(in_place(Model()))
    assert not replays(lambda: model(torch.randn(4, 16)))


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [{"max_cache_len": 32}, {}, None], ids=["largest", "static", "dynamic"])
def test_programs_of_generate(cache: dict[str, int] | None) -> None:
    transformers = pytest.importorskip("transformers")
    model, config = llama(), transformers.CompileConfig(backend="pygraph", mode=None, options={"order": "program"})
    config._compile_all_devices = True
    settings = {} if cache is None else {"cache_implementation": "static", "compile_config": config, **cache}
    for length in (5, 7, 9):
        prompt = torch.randint(1, 64, (1, length))
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, **settings)
    captures = {"{'max_cache_len': 32}": (1, 1), "{}": (2, 3), "None": (0, 0)}[str(cache)]
    assert (len(pygraph.reports()), pygraph.counters().get("captures", 0)) == captures


def test_a_mode_excludes_options() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CompileConfig(backend="pygraph", options={"order": "program"})
    with pytest.raises(RuntimeError, match="Either mode or options"):
        llama().get_compiled_call(config)


# -- diffusers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capture_after", "passes", "captures", "replays"), [(2, 1, 1, 1), (4, 1, 0, 0), (4, 4, 1, 8)])
def test_blocks_are_captured_at_their_size(capture_after: int, passes: int, captures: int, replays: int) -> None:
    """Within one pass over the 3 blocks, which share a program, or not before the size comes back."""
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
    model = diffusers.LTXVideoTransformer3DModel(in_channels=4, out_channels=4, num_layers=3, **sizes).eval()
    model.compile_repeated_blocks(backend="pygraph", options={"capture_after": capture_after})
    mask = torch.ones(1, 6)
    with torch.no_grad():
        for _ in range(passes):
            inputs = {"hidden_states": torch.randn(1, 32, 4), "encoder_hidden_states": torch.randn(1, 6, 16)}
            model(**inputs, timestep=torch.ones(1), encoder_attention_mask=mask, num_frames=2, height=4, width=4)
    counters = pygraph.counters()
    assert (counters.get("captures", 0), counters.get("replays", 0)) == (captures, replays)


# -- Lightning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [in_place, wrapped])
def test_ways_to_compile_under_lightning(way: Any, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=4, default_root_dir=tmp_path, **quiet)
    module, data = way(Module()), torch.utils.data.DataLoader(torch.randn(16, 16), batch_size=4)
    if way is wrapped:  # the training step is compiled
        with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=r"self\.log"):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    assert pygraph.counters() == {"captures": 2, "replays": 4, "uncaptured": 4}  # forward and backward pass


# -- accelerate, Trainer -----------------------------------------------------------------------------------------------


def test_backends_of_accelerate_are_a_closed_list(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="'PYGRAPH' is not a valid DynamoBackend"):
        accelerate.Accelerator(dynamo_backend="pygraph")
    arguments = transformers.TrainingArguments(tmp_path, torch_compile_backend="pygraph", report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="'PYGRAPH' is not a valid DynamoBackend"):
        transformers.Trainer(llama(), arguments)


@pytest.mark.parametrize("later", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("way", [in_place, by_forward, wrapped])
def test_ways_to_compile_under_accelerate(way: Any, later: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(Model() if later else way(Model()))
    model = way(model) if later else model
    assert replays(lambda: model(torch.randn(4, 16)))

    accelerator.save_model(model, tmp_path)
    prefix = "_orig_mod." if way is wrapped else ""
    assert set(load_file(tmp_path / "model.safetensors")) == {f"{prefix}{name}" for name in Model().state_dict()}
    assert f"{prefix}first.weight" in accelerator.get_state_dict(model)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")

    unwrapped = accelerator.unwrap_model(model)
    assert (type(unwrapped) is Model) == (way is not wrapped)
    assert replays(lambda: unwrapped(torch.randn(4, 16)))
    assert type(accelerator.unwrap_model(model, keep_torch_compile=False)) is Model
    if way is by_forward:
        with pytest.raises(Exception, match="pickle"):
            torch.save(model, io.BytesIO())
    else:
        torch.save(model, io.BytesIO())


def test_a_whole_step_under_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Model()
    model, optimizer = accelerate.Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))

    @pygraph.train_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()
        return loss.detach()

    for _ in range(4):
        step(torch.randn(4, 16))
    assert pygraph.counters() == {"captures": 1, "replays": 2, "uncaptured": 2}


def test_repeated_blocks_under_accelerate() -> None:
    utils = pytest.importorskip("accelerate.utils")

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(Model() for _ in range(3)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(sum(block(x) for block in self.blocks))

    model = utils.compile_regions(Blocks(), backend="pygraph")
    assert replays(lambda: model(torch.randn(4, 16)))
    assert len(pygraph.reports()) == 2


@pytest.mark.parametrize("way", [in_place, by_forward, wrapped])
def test_ways_to_compile_under_trainer(way: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 64, (16, 12))]
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[], save_strategy="epoch"
    )
    trainer = transformers.Trainer(way(llama()), arguments, train_dataset=rows)
    if way is wrapped:
        with pytest.raises(ValueError, match="empty"):
            trainer.train()
        return
    trainer.train()
    assert pygraph.counters() == {"captures": 2, "replays": 4, "uncaptured": 4}
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(saved.state_dict(), trainer.model.state_dict())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


# -- peft --------------------------------------------------------------------------------------------------------------


def adapted(rank: int = 4, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(), config, **settings).eval()


def test_adapters_beyond_dynamos_limit_run_as_they_are() -> None:
    assert torch._dynamo.config.recompile_limit == 8
    model, tokens = adapted(), torch.randint(1, 64, (1, 8))
    for name in ("second", "third"):
        model.add_adapter(name, model.peft_config["default"])
    in_place(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        ran = {}
        for name in ("default", "second", "third", "second"):
            model.set_adapter(name)
            ran[name] = replays(lambda: model(input_ids=tokens, use_cache=False))
    assert ran == {"default": True, "second": True, "third": False}


def test_adapters_that_are_swapped_are_one_program(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    for rank in (4, 8):
        adapted(rank).save_pretrained(tmp_path / str(rank))
    model, tokens = peft.PeftModel.from_pretrained(llama(), tmp_path / "4").eval(), torch.randint(1, 64, (1, 8))
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    in_place(model)
    for rank in (4, 8, 4):
        hotswap_adapter(model, tmp_path / str(rank), adapter_name="default", torch_device="cpu")
        assert replays(lambda: model(input_ids=tokens, use_cache=False))
        right = peft.PeftModel.from_pretrained(llama(), tmp_path / str(rank)).eval()
        with torch.no_grad():
            found, expected = (each(input_ids=tokens, use_cache=False).logits for each in (model, right))
        torch.testing.assert_close(found, expected)
    assert (len(pygraph.reports()), pygraph.counters()["captures"]) == (1, 1)


def test_adapters_are_switched_off_saved_merged_and_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokens = in_place(adapted()), torch.randint(1, 64, (1, 8))
    assert replays(lambda: model(input_ids=tokens, use_cache=False))
    with model.disable_adapter():
        assert replays(lambda: model(input_ids=tokens, use_cache=False))
    assert len(pygraph.reports()) == 2
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)

    @pygraph.train_step(fullgraph=True)
    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    assert replays_with_gradients(step)
    model.save_pretrained(tmp_path)
    saved = peft.PeftModel.from_pretrained(llama(), tmp_path).eval()
    with torch.no_grad():
        expected = saved(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected)
        torch.testing.assert_close(model.merge_and_unload()(input_ids=tokens, use_cache=False).logits, expected)


def replays_with_gradients(step: Callable[[], object]) -> bool:
    before = pygraph.counters().get("replays", 0)
    for _ in range(4):
        step()
    return pygraph.counters()["replays"] > before


# -- torchao -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"],
)
def test_what_is_quantized_is_captured_whole(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    compiled = wrapped(model)
    assert replays(lambda: compiled(torch.randn(4, 64)))
    quantization.quantize_(model, getattr(quantization, config)())
    x = torch.randn(4, 64)
    assert replays(lambda: compiled(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert [report.coverage for report in pygraph.reports()] == [1.0, 1.0]  # it was compiled again
