"""vLLM's wrapper and compiler, over stand-ins for the modules of vLLM that they import."""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.passes.split_module import split_module

import pygraph
from pygraph.runtime.host.driver import HostDriver

pytestmark = pytest.mark.usefixtures("fresh")


class Mode(enum.Enum):
    """``vllm.config.CUDAGraphMode``."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Batch(NamedTuple):
    """``vllm.forward_context.BatchDescriptor``."""

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False


@dataclass
class Context:
    """``vllm.forward_context.ForwardContext``."""

    batch_descriptor: Batch | None = None
    cudagraph_runtime_mode: Mode = Mode.NONE
    attn_metadata: Any = None
    slot_mapping: Any = field(default_factory=dict)


class CompilerInterface:
    """``vllm.compilation.compiler_interface.CompilerInterface``."""

    name: str

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False, prefix: str = "") -> None: ...

    def compute_hash(self, vllm_config: Any) -> str:
        return ""

    def compile(
        self, graph: Any, example_inputs: Any, compiler_config: Any, compile_range: Any, key: Any = None
    ) -> Any:
        return None, None

    def load(self, *args: Any) -> Any:
        raise NotImplementedError("caching is not supported")


class Engine:
    """Surroundings of the wrapper in vLLM: the context of a step, and whether captures are allowed."""

    def __init__(self) -> None:
        self.context: Context | None = None
        self.monitor = module("vllm.compilation.monitor", cudagraph_capturing_enabled=True)

    def modules(self) -> dict[str, ModuleType]:
        return {
            "vllm": module("vllm"),
            "vllm.compilation": module("vllm.compilation", monitor=self.monitor),
            "vllm.compilation.monitor": self.monitor,
            "vllm.compilation.compiler_interface": module("", CompilerInterface=CompilerInterface),
            "vllm.forward_context": module("", get_forward_context=lambda: self.context),
        }

    @contextlib.contextmanager
    def step(self, tokens: int, mode: Mode = Mode.PIECEWISE, **metadata: Any) -> Iterator[None]:
        self.context = Context(Batch(tokens), mode, **metadata)
        with torch.no_grad():
            yield

    def serve(self) -> None:
        """Start-up is over."""
        self.monitor.cudagraph_capturing_enabled = False


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    for name, standin in made.modules().items():
        monkeypatch.setitem(sys.modules, name, standin)
    return made


@pytest.fixture
def adapter(engine: Engine) -> Iterator[Any]:
    names = ("pygraph.integrations.vllm", "pygraph.integrations.vllm_compiler")
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module(names[0])
    for name in names:
        sys.modules.pop(name, None)


def config(world_size: int = 1) -> Any:
    parallel = SimpleNamespace(world_size=world_size, data_parallel_size=1)
    return SimpleNamespace(compilation_config=SimpleNamespace(), parallel_config=parallel)


def counted(function: Callable[..., Any]) -> Any:
    """``function``, and how often its Python code ran."""

    def run(*args: Any, **kwargs: Any) -> Any:
        run.runs += 1  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    run.runs = 0  # type: ignore[attr-defined]
    return run


def piece(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    residual.add_(x)
    return (residual @ weight).relu(), residual


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 8), torch.randn(tokens, 8)


# -- the wrapper -------------------------------------------------------------------------------------------------------


def test_pieces_are_captured_at_start_up_and_replayed_with_todays_tensors(engine: Engine, adapter: Any) -> None:
    run = counted(piece)
    wrapper = adapter.StaticGraphWrapper(
        runnable=run, vllm_config=config(), runtime_mode=Mode.PIECEWISE, cudagraph_options=SimpleNamespace()
    )
    weight = torch.randn(8, 8)
    for tokens in (8, 4, 2):
        with engine.step(tokens):
            wrapper(*inputs(tokens)[:1], weight, torch.randn(tokens, 8), tokens)
    engine.serve()
    runs = run.runs

    for tokens in (4, 8, 2, 4, 4, 8):
        x, residual = inputs(tokens)
        other, weight = residual.clone(), torch.randn(8, 8)  # weights are reloaded
        with engine.step(tokens):
            found = wrapper(x, weight, residual, tokens)
        expected = piece(x, weight, other, tokens)
        assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True, True]
        assert found[1] is residual
    assert run.runs == runs
    assert pygraph.counters()["captures"] == 3
    assert sum(region.captures for region in adapter.session.memory().regions.values()) == 3


def test_no_order_of_launches_is_timed_while_it_serves(
    engine: Engine, adapter: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device that would run two branches of a piece side by side."""
    monkeypatch.setattr(HostDriver, "parallel", True)
    monkeypatch.delenv("PYGRAPH_ORDER")

    def branches(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x @ weight).relu() * (x @ weight.mT).sigmoid(),)

    wrapper = adapter.StaticGraphWrapper(branches, config(), Mode.PIECEWISE)
    with engine.step(8):
        wrapper(torch.randn(8, 8), torch.randn(8, 8))
    assert "is not captured" not in caplog.text
    (graph,) = wrapper._graphs.values()
    assert (graph.record.captures, graph.record.replays) == (1, 1)
    assert not any(record.contests for record in graph.record.regions)


def test_what_was_not_captured_at_start_up_runs_and_never_raises(engine: Engine, adapter: Any) -> None:
    run = counted(piece)
    wrapper = adapter.StaticGraphWrapper(run, config(), Mode.PIECEWISE)
    weight = torch.randn(8, 8)
    with engine.step(8):
        wrapper(torch.randn(8, 8), weight, torch.randn(8, 8), 8)
    engine.serve()
    for tokens in (4, 4, 4, 4):
        with engine.step(tokens):
            wrapper(torch.randn(4, 8), weight, torch.randn(4, 8), 4)
    with engine.step(8):  # other sizes than the descriptor's capture has
        for _ in range(4):
            wrapper(torch.randn(6, 8), weight, torch.randn(6, 8), 8)
    assert pygraph.counters()["captures"] == 1
    assert run.runs >= 8


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.FULL])
def test_steps_of_another_mode_run(engine: Engine, adapter: Any, mode: Mode) -> None:
    run = counted(piece)
    wrapper = adapter.StaticGraphWrapper(run, config(), Mode.PIECEWISE)
    for _ in range(4):
        with engine.step(8, mode):
            wrapper(torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), 8)
    assert (run.runs, pygraph.counters().get("captures", 0)) == (4, 0)


def test_nothing_is_captured_for_several_ranks(engine: Engine, adapter: Any) -> None:
    wrapper = adapter.StaticGraphWrapper(piece, config(world_size=2), Mode.PIECEWISE)
    for _ in range(4):
        with engine.step(8):
            wrapper(torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), 8)
    assert "captures" not in pygraph.counters()


def test_a_piece_that_is_refused_runs(engine: Engine, adapter: Any, caplog: pytest.LogCaptureFixture) -> None:
    hidden = torch.randn(8)
    run = counted(lambda x: (x * hidden,))
    wrapper = adapter.StaticGraphWrapper(run, config(), Mode.PIECEWISE)
    for step in range(5):
        hidden = torch.full((8,), float(step))
        with engine.step(8):
            assert wrapper(torch.ones(8, 8))[0][0, 0] == step
    assert "unknown-memory" in caplog.text
    assert "hidden" in caplog.text


def test_it_is_a_wrapper_as_vllms(engine: Engine, adapter: Any) -> None:
    class Model(torch.nn.Module):
        vocabulary = 7

    model = Model()
    wrapper = adapter.StaticGraphWrapper(model, config(), Mode.FULL)
    assert wrapper.unwrap() is model
    assert wrapper.cudagraph_wrapper is wrapper
    assert wrapper.vocabulary == 7
    assert not hasattr(wrapper, "other")
    known = weakref.ref(wrapper)
    del wrapper
    assert known() is None


def test_graphs_are_cleared_and_captured_anew(engine: Engine, adapter: Any) -> None:
    wrapper = adapter.StaticGraphWrapper(piece, config(), Mode.PIECEWISE)

    def call() -> None:
        with engine.step(8):
            wrapper(torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8), 8)

    call()
    adapter.StaticGraphWrapper.clear_all_graphs()
    assert not any(region.captures for region in adapter.session.memory().regions.values())
    call()
    call()
    assert pygraph.counters()["captures"] == 2
    engine.serve()
    wrapper.clear_graphs()
    call()
    assert pygraph.counters()["captures"] == 2


# -- a whole model -----------------------------------------------------------------------------------------------------


@dataclass
class Metadata:
    """Of an attention operator: a number that differs from step to step, and tensors."""

    max_seq_len: int
    slots: torch.Tensor
    seq_lens_cpu: Any = None


class Attention(torch.nn.Module):
    """Writes a cache that it finds in itself, at slots that it finds in the context."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.kv_cache = [torch.zeros(32, 8)]
        self.engine = [engine]
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.engine[0].context
        assert context is not None
        self.kv_cache[0].index_copy_(0, context.attn_metadata["layer"].slots, x @ self.weight)
        return self.kv_cache[0].sum(0) + x


def test_a_whole_model_is_replayed_with_todays_metadata_and_caches(engine: Engine, adapter: Any) -> None:
    model, twin = Attention(engine), Attention(engine)
    twin.load_state_dict(model.state_dict())
    wrapper = adapter.StaticGraphWrapper(model, config(), Mode.FULL)
    for tokens in (4, 2):
        dummy = {"layer": Metadata(32, torch.arange(tokens))}
        with engine.step(tokens, Mode.FULL, attn_metadata=dummy):
            wrapper(torch.zeros(tokens, 8))
    engine.serve()
    model.kv_cache = [torch.zeros(32, 8)]  # made anew
    assert pygraph.counters()["captures"] == 2
    before = pygraph.counters()["replays"]
    for number, tokens in enumerate((2, 4, 4, 2, 2)):
        x, slots = torch.randn(tokens, 8), torch.randperm(32)[:tokens]
        with engine.step(tokens, Mode.FULL, attn_metadata={"layer": Metadata(number, slots)}):
            assert torch.equal(wrapper(x), twin(x))
        assert torch.equal(model.kv_cache[0], twin.kv_cache[0])
    assert pygraph.counters()["replays"] == before + 5


def test_caches_of_another_size_are_captured_at_start_up(
    engine: Engine, adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM captures once to measure memory, with small caches, and then with those that it serves with."""
    model = Attention(engine)
    wrapper, dummy = adapter.StaticGraphWrapper(model, config(), Mode.FULL), {"layer": Metadata(32, torch.arange(4))}
    for slots in (8, 32):
        model.kv_cache = [torch.zeros(slots, 8)]
        with engine.step(4, Mode.FULL, attn_metadata=dummy):
            wrapper(torch.zeros(4, 8))
            wrapper(torch.zeros(4, 8))
    assert pygraph.counters()["captures"] == 2
    engine.serve()
    before = pygraph.counters()["replays"]
    with engine.step(4, Mode.FULL, attn_metadata=dummy):
        wrapper(torch.ones(4, 8))
    assert pygraph.counters()["replays"] == before + 1
    assert torch.equal(model.kv_cache[0][:4], torch.ones(4, 8) @ model.weight)
    assert "is not captured" not in caplog.text


# -- the compiler ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("standin::attention", mutates_args=("out",))
def attention(query: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(query.cumsum(0))


@attention.register_fake
def _(query: torch.Tensor, out: torch.Tensor) -> None:
    return None


class Backend:
    """As ``VllmBackend``: pieces between attention operators are compiled with fake tensors, while Dynamo traces."""

    def __init__(self, compiler: Any) -> None:
        self.compiler = compiler

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        part, parts = 0, {}
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            splits = "attention" in str(node.target)
            part += splits
            parts[node] = part
            part += splits
        split = split_module(graph, None, lambda node: parts[node], keep_original_order=True)
        compiler = self.compiler

        class Pieces(torch.fx.Interpreter):
            def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
                output = super().call_module(target, args, kwargs)
                submodule = self.fetch_attr(target)
                if not any("attention" in str(node.target) for node in submodule.graph.nodes):
                    run, handle = compiler.compile(submodule, list(args), {"combo_kernels": False}, None, target)
                    assert handle is None
                    self.module.__dict__[target] = run
                return output

        fake = torch._guards.detect_fake_mode(example_inputs)
        assert fake is not None
        with fake:
            given = [fake.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in example_inputs]
            Pieces(split).run(*given)
        return split


def traced(function: Callable[..., Any]) -> torch.fx.GraphModule:
    """The graph of Dynamo's of a function of a tensor."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(function, backend=collect, dynamic=True)(torch.randn(3, 8))
    return graphs[0]


def test_outputs_that_hold_nothing_are_known(engine: Engine, adapter: Any) -> None:
    from pygraph.integrations.vllm_compiler import unset_outputs

    def one(x: Any) -> Any:
        return x * 2, torch.empty(x.shape[0], 8).view(-1, 2, 4)

    def several(x: Any) -> Any:
        made, shown, written = torch.empty_like(x), torch.empty(4, 8), x.new_empty(4)
        written.fill_(1)
        return made, shown, x, shown.view(-1), written

    assert unset_outputs(traced(one)) == (1,)
    assert unset_outputs(traced(several)) == (0,)


def test_pieces_make_memory_for_attention(engine: Engine, adapter: Any) -> None:
    """Results that hold nothing are no results of the graph, which would never be the same twice. Here, they would be
    refused: they are parameters."""

    class Piece:
        """``PiecewiseBackend``."""

        def __init__(self) -> None:
            self.graph = torch.fx.symbolic_trace(lambda x, w: ((x @ w).relu(), torch.empty_like(x).view(-1, 2, 4)))

        def __call__(self, *args: Any) -> Any:
            return self.graph(*args)[0], torch.nn.Parameter(torch.empty_like(args[0]).view(-1, 2, 4))

    wrapper, weight = adapter.StaticGraphWrapper(Piece(), config(), Mode.PIECEWISE), torch.randn(8, 8)
    for tokens in (4, 2):
        with engine.step(tokens):
            wrapper(torch.randn(tokens, 8), weight)
    engine.serve()
    before = pygraph.counters()["replays"]
    for tokens in (2, 4, 2):
        x = torch.randn(tokens, 8)
        with engine.step(tokens):
            found, memory = wrapper(x, weight)
        assert torch.equal(found, (x @ weight).relu())
        assert memory.shape == (tokens, 2, 4)
    assert pygraph.counters()["replays"] == before + 3
    with engine.step(4):  # other sizes than the descriptor's capture has: it runs
        assert wrapper(torch.randn(3, 8), weight)[1].shape == (3, 2, 4)
    assert pygraph.counters()["captures"] == 2


def test_pieces_compiled_for_any_size_capture_by_themselves(engine: Engine, adapter: Any) -> None:
    compiler = importlib.import_module("pygraph.integrations.vllm_compiler").Compiler()
    assert isinstance(compiler, CompilerInterface)
    compiler.initialize_cache("folder", disable_cache=True, prefix="backbone")
    assert len(compiler.compute_hash(config())) == 10
    weight = torch.randn(8, 8)

    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ weight).relu() * 2
        out = torch.empty_like(hidden)
        torch.ops.standin.attention(hidden, out)
        return (out @ weight).sin()

    compiled = torch.compile(model, backend=Backend(compiler), dynamic=True)
    with torch.no_grad():
        for tokens in (6, 6, 6, 4, 4, 4):
            x = torch.randn(tokens, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(pygraph.reports()) == 2
    assert pygraph.counters()["captures"] == 4
    assert pygraph.counters()["replays"] >= 4
    with pytest.raises(NotImplementedError):
        compiler.load(None, None, [], 0, None)
