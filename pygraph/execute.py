"""Executes a graph compiled, in its regions, and compares it with its operators run one by one.

    graph ─┬─ evaluate ──────────────────────────────────────────────────────────► results ─┐
           └─ passes ─ module ─ Inductor, cut at its regions ─ calls, the last replayed ─────┴► what differs first

Compiled arithmetic rounds at other places. The effect of rounding on a result is measured: the operators run again,
with each of their floats moved by up to one unit in the last place. Results may differ by a few times as much as these
runs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pygraph import compat
from pygraph.backend import compile_module
from pygraph.errors import OptionError, PygraphError
from pygraph.frontend.interpret import Evaluation, draw_inputs, evaluate, returned, sizes_told
from pygraph.frontend.names import FrontendError
from pygraph.frontend.types import TypeReader
from pygraph.inductor.compile import pass_context
from pygraph.inductor.module import fit_names, module_of
from pygraph.inductor.write_back import fingerprint
from pygraph.ir import Graph, KernelNode, Stage, TensorType, Type, Value, base_name
from pygraph.ir.node import leaves
from pygraph.ir.text.print import type_text
from pygraph.passes import DEFAULT_PIPELINE, PassManager, parse_pipeline
from pygraph.passes.legality.rules import captured_device
from pygraph.passes.pipeline import nearest
from pygraph.report.model import GraphReport
from pygraph.runtime.judge import distance
from pygraph.runtime.native_build import waiting_for_builds
from pygraph.runtime.tensors import bits, blocks, same_bytes, take
from pygraph.settings import Settings

CALLS = 5
"""Number of calls of the compiled graph: one runs uncaptured, the next is captured, the others are replayed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A result that differs from the result of the operators run one by one.

    Args:
        where: the result: of a node, of the graph, or an input that was written
        node: the operator; None for an input
        text: size of the difference
        when: the passes, or the call
    """

    where: str
    node: KernelNode | None
    text: str
    when: str


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a run.

    Args:
        report: report of the compiled graph
        replayed: for each call, the number of regions that were replayed
        difference: the first difference, or None
        unsure: results that were not compared, since they depend on random numbers
    """

    report: GraphReport
    replayed: tuple[int, ...]
    difference: Difference | None
    unsure: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a graph.

    Args:
        saved: inputs by name; missing ones are drawn
        constants: tensors of ``pygraph.constant`` nodes, by their ``target``
        sizes: values of symbols, which override their hints
        seed: seed of drawn values
    """

    saved: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0


def execute(graph: Graph, given: Inputs, pipeline: str | None = None) -> Execution:
    """Run ``graph``, which the passes change in place.

    Without a ``pipeline``, a graph without regions gets the passes of the default one that it lacks.

    Raises FrontendError for a graph or inputs that torch cannot run, with the ``node``; PassError for a pass that
    fails.
    """
    _check_place(graph, given)
    ready = _Ready.of(graph, given)
    original = graph.clone()
    runs = [ready.run(original, shake) for shake in (None, 1, 2)]
    drawn = graph.stage.reached(Stage.PARTITIONED)
    passes = PassManager(_missing(graph) if pipeline is None else parse_pipeline(pipeline))
    ran = passes.run(graph, pass_context(graph))
    if not graph.stage.reached(Stage.PARTITIONED):
        raise PygraphError(f"there are no regions at stage {graph.stage.value}: the pipeline has no 'partitioning'")
    redrawn = any(one.ensures is Stage.PARTITIONED for one in passes.passes)
    exact = ran.user_regions or (drawn and not redrawn)
    compared = _Compared(ready, original, runs, _unsure(original))
    found = compared.between_runs()
    if found is None and fingerprint(graph) != fingerprint(original):
        found = compared.between_passes(graph)
    run, report = ready.compile(graph, passes, exact=exact)
    report.passes = ran.passes
    replayed: list[int] = []
    for call in range(1, CALLS + 1) if found is None else ():
        before = _replays(report)
        args, results = ready.call(run)
        replayed.append(_replays(report) - before)
        found = compared.outputs(args, results, _when(call, replayed[-1] > 0))
        if found is not None:
            found = compared.between_nodes(graph, passes, exact=exact) or found
            break
    return Execution(report, tuple(replayed), found, compared.unsure_names())


def _check_place(graph: Graph, given: Inputs) -> None:
    """Raise FrontendError if torch lacks the graph's device, OptionError for a size that is no symbol of ``graph``."""
    types = [value.type for value in graph.values()]
    if captured_device(graph) == "cuda" and not torch.cuda.is_available():
        raise FrontendError("the graph is of a GPU, and torch finds none: --device cpu runs it on the CPU")
    sizes = (size for type in types if isinstance(type, TensorType) for size in (*type.shape, *type.strides))
    known = {symbol.name for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}
    known.update(graph.hints)
    for name in given.sizes:
        if name not in known:
            raise OptionError(f"the graph has no symbol '{name}'{nearest(name, sorted(known))}")


def _missing(graph: Graph) -> tuple[Any, ...]:
    """The passes of the default pipeline that a graph without regions lacks."""
    known = parse_pipeline(DEFAULT_PIPELINE)
    if graph.stage.reached(Stage.PARTITIONED):
        return ()
    return tuple(one for one in known if one.ensures is None or not graph.stage.reached(one.ensures))


def _replays(report: GraphReport) -> int:
    return sum(region.record.replays for region in report.regions if region.record is not None)


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ready:
    """The inputs of a graph, by position, and the settings with which its operators run one by one."""

    inputs: list[Any]
    how: Evaluation

    @classmethod
    def of(cls, graph: Graph, given: Inputs) -> _Ready:
        sizes = dict(graph.hints)
        for value in graph.inputs:
            sizes |= sizes_told(value, given.saved[value.name]) if value.name in given.saved else {}
        sizes |= given.sizes
        plain = Evaluation(sizes, seed=given.seed)

        def drawn(type: Type, name: str) -> Any:
            alone = Graph()
            alone.add_input(type, name)
            return draw_inputs(alone, plain)[0]

        def constant(node: KernelNode) -> torch.Tensor:
            target = str(node.attrs.get("target", node.name))
            if target not in constants:
                constants[target] = drawn(node.output.type, target)
            return constants[target]

        constants, names = dict(given.constants), [value.name for value in graph.inputs]
        strange = [name for name in given.saved if name not in names]
        if strange:
            raise FrontendError(f"the graph has no input %{strange[0]}, which is saved; it has %{', %'.join(names)}")
        inputs = [
            given.saved[value.name] if value.name in given.saved else drawn(value.type, value.name)
            for value in graph.inputs
        ]
        return cls(inputs, replace(plain, constant=constant))

    def copies(self) -> list[Any]:
        """Copies of the inputs."""
        return list(take(self.inputs, blocks(self.inputs)).args)

    def run(self, graph: Graph, shake: int | None = None) -> _Reference:
        """Run the operators one by one; with ``shake``, a seed, floats are moved by up to one unit in the last place.

        Raises FrontendError, with the ``node``, for an operator that fails or returns another type than in the graph.
        """
        seen: dict[str, list[Any]] = {}
        args = self.copies()
        generator = None if shake is None else torch.Generator().manual_seed(shake)

        def note(node: KernelNode, results: Sequence[Any]) -> None:
            for value, result in zip(node.outputs, results, strict=True):
                _check_type(value, result)
                if generator is not None and not node.effects.aliases:
                    _shake(result, generator)
            seen[node.name] = [one.clone() if isinstance(one, torch.Tensor) else one for one in results]

        try:
            values = evaluate(graph, args, replace(self.how, seen=note))
        except Exception as error:
            if len(seen) == len(graph.nodes) or (isinstance(error, FrontendError) and "input" in str(error)[:8]):
                raise
            node = graph.nodes[len(seen)]
            reason = str(error) if isinstance(error, PygraphError) else f"{type(error).__name__}: {error}"
            failure = FrontendError(f"{node.op} cannot run at node {node.name}: {reason}")
            failure.node = node.name  # type: ignore[attr-defined]
            raise failure from error
        return _Reference(args, returned(graph, values), values, seen)

    def compile(
        self, graph: Graph, passes: PassManager, *, exact: bool
    ) -> tuple[Callable[[list[Any]], Any], GraphReport]:
        constant = self.how.constant
        assert constant is not None
        graph = graph.clone()
        fit_names(graph)
        gm, fakes = module_of(graph, self.inputs, self.how.sizes, constant)
        settings = Settings(ledger=False, order="program", cache_dir=None)
        mode = compat.detect_fake_mode(fakes) or compat.fake_mode()
        try:
            with compat.tracing_under(mode):
                return compile_module(gm, fakes, graph, passes, settings, exact=exact)
        except Exception as error:
            raise FrontendError(f"Inductor cannot compile the graph: {type(error).__name__}: {error}") from error

    def call(self, run: Callable[[list[Any]], Any]) -> tuple[list[Any], Sequence[Any]]:
        """Call ``run``. Returns the arguments after the call, and its results."""
        args = self.copies()
        with torch.random.fork_rng(enabled=True), torch.no_grad(), waiting_for_builds():
            torch.manual_seed(self.how.seed or 0)
            return args, run(list(args))


def _check_type(value: Value, result: Any) -> None:
    """Raise FrontendError if an operator returned another type than in the graph."""
    wanted = value.type
    if not isinstance(wanted, TensorType) or not isinstance(result, torch.Tensor):
        return
    made = TypeReader().type_of(result)
    sizes = zip(wanted.shape, result.shape, strict=False)
    fits = isinstance(made, TensorType) and (made.dtype, len(made.shape)) == (wanted.dtype, len(wanted.shape))
    if not fits or any(isinstance(size, int) and size != real for size, real in sizes):
        raise FrontendError(f"{value!r} is {type_text(made)}, where the graph says {type_text(wanted)}")


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Reference:
    """Results of operators run one by one: inputs and results of the graph, each value at the end, and the results of
    each node right after it ran."""

    args: list[Any]
    results: list[Any]
    values: dict[Value, Any]
    seen: dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class _Compared:
    """Compares with ``runs`` of ``original``, the first unchanged and the others shaken; skips values in ``unsure``."""

    ready: _Ready
    original: Graph
    runs: Sequence[_Reference]
    unsure: frozenset[Value]

    def unsure_names(self) -> tuple[str, ...]:
        """Names of results and inputs that are not compared."""
        found = [repr(one) for arg in self.original.outputs for one in leaves(arg, Value) if one in self.unsure]
        return tuple(dict.fromkeys(found + [repr(one) for one in self.original.inputs if one in self.unsure]))

    def outputs(self, args: Sequence[Any], results: Sequence[Any], when: str) -> Difference | None:
        """The first result, or input after the call, that differs."""
        for i, (arg, actual) in enumerate(zip(self.original.outputs, results, strict=True)):
            value = next(leaves(arg, Value), None)
            text = "" if value is None or value in self.unsure else apart([run.results[i] for run in self.runs], actual)
            if value is not None and text:
                return Difference(f"the result {value!r}", value.producer, text, when)
        for i, (value, actual) in enumerate(zip(self.original.inputs, args, strict=True)):
            text = "" if value in self.unsure else apart([run.args[i] for run in self.runs], actual)
            if text:
                return Difference(f"the input {value!r}, as it is left", None, text, when)
        return None

    def between_runs(self) -> Difference | None:
        """The first node with other results when the operators run again on equal inputs."""
        again = self.ready.run(self.original).seen
        for node, value in self._compared_values():
            expected, actual = (seen[node.name][value.index] for seen in (self.runs[0].seen, again))
            if isinstance(expected, torch.Tensor) and not same_bytes([(expected, actual)]):
                text = apart([expected, expected], actual)
                return Difference(repr(value), node, text, "the operators one by one, run twice") if text else None
        return None

    def between_passes(self, changed: Graph) -> Difference | None:
        """The first node with other results after the passes, also with operators run one by one."""
        seen = self.ready.run(changed).seen
        for node, value in self._compared_values():
            if len(seen.get(node.name, ())) > value.index:
                text = apart([run.seen[node.name][value.index] for run in self.runs], seen[node.name][value.index])
                if text:
                    return Difference(repr(value), node, text, "the passes, before anything is compiled")
        return None

    def between_nodes(self, graph: Graph, passes: PassManager, *, exact: bool) -> Difference | None:
        """The first node with other results in a compiled graph that returns the results of all nodes."""
        watched = graph.clone()
        chosen = [(node, value) for node, value in self._compared_values() if watched.owner(node.name) is not None]
        watched.set_outputs([watched.value(node.name, value.index) for node, value in chosen])
        run, report = self.ready.compile(watched, passes, exact=exact)
        for call in range(1, CALLS + 1):
            before = _replays(report)
            _, results = self.ready.call(run)
            for (node, value), actual in zip(chosen, results, strict=True):
                text = apart([run.values[value] for run in self.runs], actual)
                if text:
                    return Difference(repr(value), node, text, _when(call, _replays(report) > before))
        return None

    def _compared_values(self) -> Iterator[tuple[KernelNode, Value]]:
        for node in self.original.nodes:
            for value in node.outputs if not _is_empty(node) else ():
                if isinstance(value.type, TensorType) and value not in self.unsure:
                    yield node, value


def _when(call: int, replayed: bool) -> str:
    return f"call {call}, {'replayed' if replayed else 'uncaptured'}"


def apart(runs: Sequence[Any], actual: Any) -> str:
    """Text on the distance of a result from that of the first of ``runs``; empty if rounding may explain it, as
    measured by the other runs."""
    tensors = [torch.tensor(one, dtype=torch.float64) if isinstance(one, float) else one for one in (*runs, actual)]
    expected, *others, found = tensors
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        same = type(expected) is type(found) and (expected is None or bits(expected) == bits(found))
        return "" if same else f"{actual!r} instead of {runs[0]!r}"
    spreads = [distance(expected, other) for other in others]
    known = [spread for spread in spreads if not isinstance(spread, str)]
    if len(known) < len(spreads):  # rounding decides where it is no number, or which integer it is
        return ""
    distant = distance(expected, found)
    if isinstance(distant, str):
        return distant
    if not distant.apart.numel():
        return ""
    spread = torch.stack([one.apart for one in known]).amax(0)
    if bool((distant.apart <= distant.allowed(spread, expected.dtype)).all()):
        return ""
    off, size = float(distant.apart.max()), float(distant.magnitude.max())
    return f"is off by {off:.3g}, where the largest number is {size:.3g}; rounding explains {float(spread.max()):.3g}"


def _shake(result: Any, generator: torch.Generator) -> None:
    """Move the floats of ``result``, except whole numbers, by up to one unit in the last place."""
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.dtype.itemsize < 2:
        return
    noise = torch.rand(result.shape, generator=generator, dtype=torch.float64).to(result.device) * 2 - 1
    moved = (result.double() * (1 + noise * torch.finfo(result.dtype).eps)).to(result.dtype)
    result.copy_(torch.where(result == result.round(), result, moved))


def _is_empty(node: KernelNode) -> bool:
    """True if a node's results are uninitialized."""
    return "empty" in base_name(node.op).replace("_", ".").split(".")


def _unsure(graph: Graph) -> frozenset[Value]:
    """Values that depend on random numbers, which compiled operators draw differently."""
    home: dict[Value, Value] = {}
    found: set[Value] = set()
    for node in graph.nodes:
        for output, operand in node.effects.aliases:
            base = node.inputs[operand]
            home[node.outputs[output]] = home.get(base, base)
        if node.effects.rng is None and not any(one in found or home.get(one) in found for one in node.inputs):
            continue
        found.update(node.outputs)
        written = [node.inputs[place] for place in node.effects.writes]
        found.update(one for value in written for one in (value, home.get(value, value)))
    return frozenset(found | {value for value, base in home.items() if base in found})
