"""Private torch symbols in use, each looked up once, here. Missing ones are listed with the cost of their absence.

Any release of torch may rename or drop a symbol. A missing symbol is replaced by a stand-in, which has no instances and
raises MissingSymbolError when used. ``announce`` warns of missing symbols. Newer releases than those tested may work.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

_log = logging.getLogger("pygraph")

UNUSABLE = "nothing is captured: every graph is left to plain Inductor"
"""Cost of a missing symbol without which PyGraph cannot work."""

_RAISES = "nothing is compiled: backend='pygraph' raises"
"""Cost of a missing symbol through which PyGraph calls plain Inductor."""

MISSING: dict[str, str] = {}
"""Symbols that this torch lacks: path ▸ cost of the absence."""


class MissingSymbolError(ImportError):
    """A private symbol of torch was used that the installed release does not have."""


class _Absent(type):
    """The type of the stand-ins."""

    path: str

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise _missing(cls.path)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _missing(cls.path)


def _missing(path: str) -> MissingSymbolError:
    return MissingSymbolError(f"torch {torch.__version__} has no {path}")


def _find(*paths: str, cost: str = UNUSABLE) -> Any:
    """The symbol at the first of ``paths`` that exists. Several paths are names of one symbol in different releases.

    If none exists, a stand-in, which can also be subclassed and caught, and an entry in ``MISSING``.
    """
    for path in paths:
        with contextlib.suppress(ImportError, AttributeError):
            return _resolve(path)
    named = " or ".join(paths)
    MISSING[named] = cost
    return _Absent(paths[0].rpartition(".")[2], (Exception,), {"path": named})


def _resolve(path: str) -> Any:
    """The object at a dotted ``path``: a module, or an attribute of one. Raises ImportError or AttributeError."""
    outer, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        if not outer:
            raise
        return getattr(_resolve(outer), name)


def absent(symbol: Any) -> bool:
    """True if ``symbol`` is a stand-in."""
    return isinstance(symbol, _Absent)


def missing_text(cost: str | None = None) -> str:
    """A list of missing symbols (with ``cost``: those of that cost), for a log or a report; empty if there are none."""
    rows = [f"{path}: {price}" for path, price in MISSING.items() if cost in (None, price)]
    return f"torch {torch.__version__} lacks what PyGraph uses: {'; '.join(rows)}" if rows else ""


@functools.cache
def announce() -> None:
    """Warn of missing symbols, once per process."""
    if MISSING:
        _log.warning("%s", missing_text())


# -- Inductor: compilation -----------------------------------------------------------------------------------------
compile_fx = _find("torch._inductor.compile_fx.compile_fx", cost=_RAISES)
compile_fx_inner = _find("torch._inductor.compile_fx.compile_fx_inner", cost=_RAISES)
compiler_config = _find("torch.compiler.config", cost=_RAISES)
inductor_config = _find("torch._inductor.config", cost=_RAISES)
list_mode_options = _find("torch._inductor.list_mode_options", cost=_RAISES)
_find("torch.compiler.config.cache_key_tag")
_find("torch._inductor.config.graph_partition")

# -- Inductor: its passes on FX graphs -----------------------------------------------------------------------------
compile_fx_module = _find("torch._inductor.compile_fx")
_find("torch._inductor.compile_fx.post_grad_passes")
pattern_entries = tuple(
    _find(f"torch._inductor.pattern_matcher.{_name}")
    for _name in ("GraphPatternEntry", "LoweringPatternEntry", "ReplacementPatternEntry")
)
PatternEntry = _find("torch._inductor.pattern_matcher.PatternEntry")
_TargetPattern = _find(
    "torch._inductor.pattern_matcher._TargetArgsExpr", cost="a product that is added times a factor may lose the factor"
)
_FailedMatch = _find("torch._inductor.pattern_matcher.FailedMatch")
for _name in ("create_node", "replace_node", "erase_node"):
    _find(f"torch.fx.GraphModule._register_{_name}_hook")
    _find(f"torch.fx.GraphModule._unregister_{_name}_hook")

# -- Inductor: its IR ----------------------------------------------------------------------------------------------
_BY_FX_NODE = (
    "Inductor's {} are told by their FX nodes alone: what its own passes make of others may fail to be captured"
)
_JOINED = "operators beside one that cannot be captured stay outside of regions with it"
ComputedBuffer = _find("torch._inductor.ir.ComputedBuffer", cost=_JOINED)
# From 2.14 on, one class, Switch, represents both torch.cond and torch.switch.
Conditional = _find(
    "torch._inductor.ir.Conditional", "torch._inductor.ir.Switch", cost=_BY_FX_NODE.format("conditionals")
)
DeviceCopy = _find("torch._inductor.ir.DeviceCopy", cost=_BY_FX_NODE.format("copies between devices"))
DynamicScalar = _find("torch._inductor.ir.DynamicScalar", cost=_BY_FX_NODE.format("reads of numbers on the host"))
ExternKernel = _find("torch._inductor.ir.ExternKernel", cost=_JOINED)
MultiOutput = _find("torch._inductor.ir.MultiOutput", cost="reports count results as launches")
InductorBuffer = _find("torch._inductor.ir.Buffer")
NonOwningLayout = _find("torch._inductor.ir.NonOwningLayout")
TensorBox = _find("torch._inductor.ir.TensorBox")
WhileLoop = _find("torch._inductor.ir.WhileLoop", cost=_BY_FX_NODE.format("loops"))
PythonWrapperCodegen = _find("torch._inductor.codegen.wrapper.PythonWrapperCodegen")
_ON_HOST = "the host decides on branches and loops, which are cut out of regions"
_WRAPPER = "torch._inductor.codegen.wrapper.PythonWrapperCodegen"
_branch_codegen = _find(f"{_WRAPPER}.codegen_conditional", f"{_WRAPPER}.codegen_switch", cost=_ON_HOST)
BRANCH_CODEGEN = str(getattr(_branch_codegen, "__name__", ""))
"""Name of the method that writes the code of a branch."""
CONTROL_FLOW = not any(
    absent(each)
    for each in (
        _branch_codegen,
        _find(f"{_WRAPPER}.codegen_while_loop", cost=_ON_HOST),
        _find(f"{_WRAPPER}.codegen_subgraph_common", cost=_ON_HOST),
    )
)
"""True if the methods that write the code of branches and loops can be replaced."""

# -- Inductor: lowering and scheduling -----------------------------------------------------------------------------
make_fallback = _find(
    "torch._inductor.lowering.make_fallback",
    cost="graphs with uploads are left to plain Inductor under its option implicit_fallbacks=False",
)
NopKernelSchedulerNode = _find(
    "torch._inductor.scheduler.NopKernelSchedulerNode", cost="reports count what runs nothing as launches"
)
Scheduler = _find("torch._inductor.scheduler.Scheduler")
SubgraphLowering = _find("torch._inductor.graph.SubgraphLowering")
_LATE_READS = "what is read of a tensor may be its new value where an operator writes it in place behind that"
GraphLowering = _find("torch._inductor.graph.GraphLowering")
_MutationOutput = _find("torch._inductor.ir.MutationOutput", cost=_LATE_READS)
_inplaceable_foreach = _find("torch._inductor.fx_passes.reinplace.inplaceable_foreach_ops", cost=_LATE_READS)
decide_layout_opt = _find(
    "torch._inductor.graph.GraphLowering.decide_layout_opt",
    cost="training steps with convolutions are left to plain Inductor",
)
inductor_virtualized = _find("torch._inductor.virtualized.V")
_REORDER = "operators are not reordered for fewer regions"
estimate_peak_memory = _find("torch._inductor.memory.estimate_peak_memory", cost=_REORDER)
prepare_planning_info = _find("torch._inductor.memory.prepare_planning_info", cost=_REORDER)
memory_timeline = _find(
    "torch._inductor.memory.compute_memory_timeline", cost="what is checkpointed may be computed again early, and kept"
)
for _name in (
    "_codegen",
    "_codegen_partition_wrapper",
    "can_fuse",
    "compute_dependencies",
    "compute_graph_partition_maps",
    "get_graph_partition_signature",
    "graph_partition",
    "process_grouped_nodes",
    "should_partition",
):
    _find(f"torch._inductor.scheduler.Scheduler.{_name}")

_partition_wrapper = _find(
    "torch._inductor.utils._unstable_customized_partition_wrapper",
    cost="a wrapper that another library has set for partitions takes the place of PyGraph's",
)


def others_partitions() -> bool:
    """True if another library has set a wrapper for the partitions of Inductor's programs."""
    return not absent(_partition_wrapper) and _partition_wrapper.wrapper is not None


@contextlib.contextmanager
def own_partitions() -> Iterator[None]:
    """Context in which Inductor does not use another library's wrapper for partitions."""
    if not others_partitions():
        yield
        return
    wrapper, _partition_wrapper.wrapper = _partition_wrapper.wrapper, None
    try:
        yield
    finally:
        _partition_wrapper.wrapper = wrapper


# -- AOTAutograd and Dynamo ----------------------------------------------------------------------------------------
TracingContext = _find("torch._guards.TracingContext")
detect_fake_mode = _find("torch._guards.detect_fake_mode")
functorch_config = _find("torch._functorch.config", cost=_RAISES)
set_grad_enabled = _find("torch._C._set_grad_enabled")

# -- Dynamo: training steps --------------------------------------------------------------------------------------------
_STEPS = "`pygraph.train_step` ends graphs at the backward pass and at the optimizer"
_FOREACH = "with torch 2.11, `pygraph.train_step` leaves some steps to Dynamo in parts"
_FusedNode = _find("torch._inductor.scheduler.FusedSchedulerNode", cost=_FOREACH)
_SchedulerNode = _find("torch._inductor.scheduler.SchedulerNode", cost=_FOREACH)
disable_dynamo = _find("torch._dynamo.disable", cost="`pygraph.train_step` raises")
innermost_fn = _find("torch._dynamo.eval_frame.innermost_fn", cost=_STEPS)
global_step_hooks = tuple(_find(f"torch.optim.optimizer._global_optimizer_{_name}_hooks") for _name in ("pre", "post"))
_AttrSource = _find("torch._dynamo.source.AttrSource", cost=_STEPS)
_VariableBuilder = _find("torch._dynamo.variables.builder.VariableBuilder", cost=_STEPS)
_install_guard = _find("torch._dynamo.guards.install_guard", cost=_STEPS)
_GuardBuilder = _find("torch._dynamo.guards.GuardBuilder", cost=_STEPS)
_TensorVariable = _find("torch._dynamo.variables.TensorVariable", cost=_STEPS)
_compilations = _find(
    "torch._dynamo.utils.get_compilation_metrics", cost="reports list no function that Dynamo failed at"
)
_UNCOMPILED = "a step that raises while Dynamo traces it, or is compiled too often, runs uncompiled from then on"
_set_strategy = _find("torch._dynamo.eval_frame.set_code_exec_strategy", cost=_UNCOMPILED)
_ConvertFrame = _find("torch._dynamo.convert_frame.ConvertFrame", cost=_UNCOMPILED)
_FrameAction = _find("torch._dynamo.types.FrameAction", cost=_UNCOMPILED)
_FrameExecStrategy = _find("torch._dynamo.types.FrameExecStrategy", cost=_UNCOMPILED)
_ConstantVariable = _find("torch._dynamo.variables.ConstantVariable", cost=_STEPS)
_LazyVariableTracker = _find("torch._dynamo.variables.lazy.LazyVariableTracker", cost=_STEPS)
_Logger = _find(
    "torch._dynamo.variables.misc.LoggingLoggerVariable", cost="a message that is logged once ends a step's graph"
)
_OutputGraph = _find("torch._dynamo.output_graph.OutputGraph", cost=_STEPS)
_RestartAnalysis = _find("torch._dynamo.exc.RestartAnalysis", cost=_STEPS)
_Unsupported = _find("torch._dynamo.exc.Unsupported", cost=_STEPS)
_VariableTracker = _find("torch._dynamo.variables.base.VariableTracker", cost=_STEPS)
_UserObject = _find("torch._dynamo.variables.UserDefinedObjectVariable", cost=_STEPS)
_Builtin = _find("torch._dynamo.variables.BuiltinVariable", cost=_STEPS)
_READ_ATTRIBUTE = "tp_getattro_impl" if "tp_getattro_impl" in vars(_TensorVariable) else "var_getattr"
for _name in (
    "config.trace_autograd_ops",
    *(f"variables.TensorVariable.{n}" for n in ("method_backward", "method_register_hook", _READ_ATTRIBUTE)),
    "variables.UserDefinedObjectVariable.python_type",
    "variables.BuiltinVariable.call_isinstance",
    "output_graph.OutputGraph.compile_subgraph",
    "output_graph.OutputGraph.remove_tensorify_specialized_graphargs",
):
    _find(f"torch._dynamo.{_name}", cost=_STEPS)


_recomputation = _find(
    "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass", cost=_STEPS
)
_find(
    "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass"
    ".remat_using_tags_for_fwd_loss_bwd_graph",
    cost=_STEPS,
)


@dataclass(frozen=True, slots=True)
class Substitution:
    """Dynamo's view of an object: the one to which the attributes in ``path`` lead. It also guards on ``watched``."""

    path: tuple[str, ...]
    watched: tuple[str, ...] = ()


def untouched(_mapping: Mapping[str, Any], _name: str) -> bool:
    """True if the traced program has neither read nor written the item ``_name`` of ``_mapping``."""
    return True


class _Untouched(_VariableTracker):  # type: ignore[misc, valid-type]
    """``untouched`` in Dynamo's traces."""

    def call_function(self, _tx: Any, args: Any, _kwargs: Any) -> Any:
        mapping, name = args[0].realize(), args[1].as_python_constant()
        items = {key.vt.as_python_constant(): item for key, item in mapping.items.items()}
        return _ConstantVariable.create(_unread(items.get(name), mapping.source))


def put_off(_object: Any, _mappings: Any, _names: tuple[str, ...]) -> None:
    """Declare that ``_object`` acts after the traced program, and then changes the items ``_names`` of ``_mappings``.
    See ``act_in_time``."""


class _PutOff(_VariableTracker):  # type: ignore[misc, valid-type]
    """``put_off`` in Dynamo's traces."""

    def call_function(self, tx: Any, args: Any, _kwargs: Any) -> Any:
        vars(tx.output).setdefault("_pygraph_put_off", []).append(args[0].realize().value)
        for mapping in args[1].realize().unpack_var_sequence(tx):
            items, names = mapping.realize().items, args[2].as_python_constant()
            items.update({key: _Late() for key in items if key.vt.as_python_constant() in names})
        return _ConstantVariable.create(None)


class _Late(_VariableTracker):  # type: ignore[misc, valid-type]
    """An item that will change later. A program can neither use nor return it."""


def act_in_time() -> None:
    """If a program ends before the traced function returns, or uses an item that will change, set ``puts_off`` of the
    objects that postponed their action to False, and trace it again."""
    compile_subgraph = _OutputGraph.compile_subgraph

    def compile_settled(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
        late = vars(self).get("_pygraph_put_off", ())
        try:
            if not late or not reason.graph_break:
                return compile_subgraph(self, tx, reason, *args, **kwargs)
        except _Unsupported:
            if not late:
                raise
        for each in late:
            each.puts_off = False
        tx.speculation_log.clear()  # the next trace differs
        raise _RestartAnalysis(restart_reason="what is put off is needed")

    _OutputGraph.compile_subgraph = compile_settled


def go_on_in_parts(gives_up: Callable[[CodeType], bool]) -> None:
    """When Dynamo stops compiling a function that it has compiled too often, let it still compile the functions that
    this one calls, if ``gives_up`` returns true for its code. Otherwise these would run uncompiled, too."""
    if any(map(absent, (_ConvertFrame, _FrameAction, _FrameExecStrategy))):
        return
    convert, only = _ConvertFrame.__call__, _FrameAction.RUN_ONLY

    def convert_or_give_up(self: Any, frame: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
        result = convert(self, frame, *args, skip=skip + 1, **kwargs)
        then = result.frame_exec_strategy
        if then.cur_action == then.recursive_action == only and gives_up(frame.f_code):
            result.frame_exec_strategy = _FrameExecStrategy(only, _FrameAction.DEFAULT)
        return result

    _ConvertFrame.__call__ = convert_or_give_up


def log_once_in_traces(applies: Callable[[], bool]) -> None:
    """If ``applies`` returns true, call a logger's cached methods, such as ``warning_once`` of transformers, during the
    trace, instead of ending the graph: later calls would do nothing. Arguments must be constants. A method that returns
    an object still ends the graph."""
    if absent(_Logger):
        return
    call_method: Any = _Logger.call_method
    remembers = type(announce)

    def call(self: Any, tx: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        method: Any = getattr(self.value, name, None) if applies() else None
        is_cached = isinstance(getattr(method, "__func__", None), remembers)
        if is_cached and all(each.is_python_constant() for each in (*args, *kwargs.values())):  # this guards on them
            said = {key: each.as_python_constant() for key, each in kwargs.items()}
            result = method(*(each.as_python_constant() for each in args), **said)
            if _ConstantVariable.is_base_literal(result):
                return _ConstantVariable.create(result)
        return call_method(self, tx, name, args, kwargs)

    _Logger.call_method = call


def owe(_object: Any, _parameters: Any) -> None:
    """Declare that ``_object`` has to act after the traced program's backward passes, for each of ``_parameters`` after
    the first pass that reaches it (see ``follow_backward``)."""


class _Owe(_VariableTracker):  # type: ignore[misc, valid-type]
    """``owe`` in Dynamo's traces."""

    def call_function(self, tx: Any, args: Any, _kwargs: Any) -> Any:
        debtor, parameters = args[0].realize(), args[1].realize().unpack_var_sequence(tx)
        values = [_example(each.realize()) for each in parameters]
        debts = _debts(tx.output)
        debts[:] = [each for each in debts if each.object.value is not debtor.value]
        debts.append(_Debt(debtor, values, [value.requires_grad for value in values]))
        return _ConstantVariable.create(None)


@dataclass(slots=True)
class _Debt:
    """Dynamo's variable of an ``object`` that has to act after backward passes; its ``parameters``, and which of them
    are still to be reached (``due``). ``reached``: a backward pass has reached at least one."""

    object: Any
    parameters: list[torch.Tensor]
    due: list[bool]
    reached: bool = False


def _debts(trace: Any) -> list[_Debt]:
    """The debts of this trace."""
    found: list[_Debt] = vars(trace).setdefault("_pygraph_debts", [])
    return found


def _example(variable: Any) -> torch.Tensor:
    """The fake tensor of a traced one."""
    value: torch.Tensor = variable.as_proxy().node.meta["example_value"]
    return value


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that autograd reaches from ``tensor``."""
    seen: set[Any] = {None}
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def follow_backward(follow: Callable[[Any, Any], None]) -> None:
    """After each traced backward pass, also trace ``follow`` for each object declared by ``owe`` of which it is the
    first to reach a parameter, with a flag for each parameter: true if it is. A graph that ends before any pass has
    reached such an object does not compile."""
    compile_subgraph = _OutputGraph.compile_subgraph
    traced_backward = _TensorVariable.method_backward

    def compile_paid(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(any(each.due) and not each.reached for each in _debts(self)):
            raise _Unsupported("the backward pass of a model is not in the graph of its forward pass")
        return compile_subgraph(self, *args, **kwargs)

    def method_backward(
        self: Any, tx: Any, gradient: Any = None, retain_graph: Any = None, create_graph: Any = None, inputs: Any = None
    ) -> Any:
        debts = _debts(tx.output)
        leaves = {id(leaf) for leaf in _leaves(_example(self))} if debts else set()
        if debts and inputs is not None:
            given = [inputs] if isinstance(inputs, _TensorVariable) else inputs.unpack_var_sequence(tx)
            leaves &= {id(_example(each.realize())) for each in given}
        result = traced_backward(self, tx, gradient, retain_graph, create_graph, inputs)
        for each in debts:
            now = [due and id(value) in leaves for due, value in zip(each.due, each.parameters, strict=True)]
            if any(now):
                each.reached = True
                each.due = [due and not new for due, new in zip(each.due, now, strict=True)]
                which = _VariableTracker.build(tx, tuple(now))
                _VariableTracker.build(tx, follow).call_function(tx, [each.object, which], {})
        return result

    _OutputGraph.compile_subgraph = compile_paid
    _set_method("backward", method_backward)


def _set_method(name: str, method: Callable[..., Any]) -> None:
    """Have Dynamo trace the method ``name`` of tensors with ``method``."""
    if name in getattr(_TensorVariable, "tp_methods", ()):  # from 2.14 on
        handler = _TensorVariable.tp_methods[name]
        _TensorVariable.tp_methods[name] = replace(handler, handler=method)
    setattr(_TensorVariable, f"method_{name}", method)


def _unread(item: Any, holder: Any) -> bool:
    """True if ``item`` is still that of ``holder``, the source of a container, and no number in it was read."""
    if not isinstance(item, _LazyVariableTracker):
        return False
    known = item.realize() if item.is_realized() else None
    source = item.original_source() if known is None else known.source
    parts = [] if known is None else vars(known).get("items")
    own = source is not None and getattr(source, "base", None) == holder
    return own and isinstance(parts, list) and all(_unread(part, source) for part in parts)


def compilations() -> list[Any]:
    """Dynamo's latest compilations; one that failed has ``fail_type``, ``fail_reason`` and a user's line."""
    return [] if absent(_compilations) else list(_compilations())


def code_of(trace: Any) -> CodeType:
    """The code object in which a trace of Dynamo began."""
    code: CodeType = trace.root_tx.f_code
    return code


def run_compiled(code: CodeType) -> None:
    """Let Dynamo use its programs of ``code`` in later calls, and trace it for other values. A failed trace ends
    both."""
    if not any(map(absent, (_set_strategy, _FrameAction, _FrameExecStrategy))):
        _set_strategy(code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))


def declaration(target: Any) -> str:
    """The name of a call target; for an operator from outside of torch, its schema and tags, which another process may
    declare differently. For an operator without overload, those of all overloads."""
    if isinstance(target, OpOverloadPacket):
        return " ".join(declaration(getattr(target, name)) for name in target.overloads())
    if not isinstance(target, OpOverload) or target.namespace in ("aten", "prims"):
        return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
    return f"{target._schema} {sorted(map(str, target.tags))}"


def substitute_variables(substitute: Callable[[Any, Any], Substitution | None]) -> None:
    """Call ``substitute`` for each object before Dynamo traces it. Dynamo guards on the identity of replaced objects.

    Its first argument is a different object in each trace (see ``code_of``). ``type`` and ``isinstance`` treat an
    object whose class has a ``_pygraph_class`` as an instance of that class."""
    build, kind_of, is_of = _VariableBuilder.__call__, _UserObject.python_type, _Builtin.call_isinstance

    def call(self: Any, value: Any) -> Any:
        if value is untouched:
            return _Untouched()
        if value is owe:
            return _Owe()
        if value is put_off:
            return _PutOff()
        found = substitute(self.tx.output, value)
        if found is None:
            return build(self, value)
        for name in found.watched:
            build(_VariableBuilder(self.tx, _AttrSource(self.source, name)), getattr(value, name))
        if not found.path:
            return build(self, value)
        source = self.source
        _install_guard(source.make_guard(_GuardBuilder.ID_MATCH))
        for name in found.path:
            source, value = _AttrSource(source, name), getattr(value, name)
        return build(_VariableBuilder(self.tx, source), value)

    def python_type(self: Any) -> Any:
        kind = kind_of(self)
        return vars(kind).get("_pygraph_class", kind)

    def call_isinstance(self: Any, tx: Any, arg: Any, kinds: Any) -> Any:
        if isinstance(arg, _UserObject) and "_pygraph_class" in vars(kind_of(arg)):
            return _ConstantVariable.create(issubclass(arg.python_type(), kinds.as_python_constant()))
        return is_of(self, tx, arg, kinds)

    _VariableBuilder.__call__, _UserObject.python_type = call, python_type
    _Builtin.call_isinstance = call_isinstance
    vars(_Builtin).get("call_function_handler_cache", {}).clear()  # traces before this one bound the old methods


@functools.cache
def mend_late_reads() -> None:
    """Before an operator writes a tensor in place, have Inductor compute its postponed readers. Inductor does so after
    it has listed the write, so that a late reader would find the new value (2.11 to 2.13): for custom operators, for
    operators with subgraphs, and for foreach operators.

    Foreach operators are kept out of place, with copies, which Inductor fuses. Of readers computed before the write, it
    would fuse one only; in AdamW's update each parameter has one. Has an effect once."""
    if not absent(_inplaceable_foreach):
        _inplaceable_foreach.clear()
    if absent(_MutationOutput):
        return
    init = _MutationOutput.__init__

    def read_before(self: Any, layout: Any, written: Any, operation: Any) -> None:
        graph = inductor_virtualized.graph
        listed = len(graph.operations)
        init(self, layout, written, operation)
        for name in _views(graph, written.get_name()):
            for reader in graph.name_to_users.get(name, ()):
                reader.realize()
        late = graph.operations[listed:]
        place = next((place for place, each in enumerate(graph.operations[:listed]) if each is operation), listed)
        del graph.operations[listed:]
        graph.operations[place:place] = late

    _MutationOutput.__init__ = read_before


@functools.cache
def mend_patterns() -> None:
    """Keep Inductor's patterns from matching an operator with numbers, other than defaults, in keywords that they do
    not name, and so ignore: ``torch.add(x, a @ b, alpha=2)`` would become ``addmm(x, a, b)`` (2.11 to 2.13). Has an
    effect once."""
    if absent(_TargetPattern):
        return
    match = _TargetPattern._match

    def match_all(self: Any, node: Any, context: Any) -> Any:
        found = match(self, node, context)
        overlooked = [name for name in node.kwargs if name not in self.kwargs and _counts(node, name)] if found else []
        return _FailedMatch("overlooks {}", overlooked) if overlooked else found

    _TargetPattern._match = match_all


def _counts(node: torch.fx.Node, name: str) -> bool:
    """True if a keyword of an operator is a number other than its default."""
    value, schema = node.kwargs[name], getattr(node.target, "_schema", None)
    if schema is None or isinstance(value, bool) or not isinstance(value, (int, float, complex, torch.fx.Node)):
        return False
    return any(each.name == name and each.default_value != value for each in schema.arguments)


def _views(graph: Any, name: str) -> list[str]:
    """The buffers of Inductor's ``graph`` that operators made as views of the buffer ``name``, or of such views."""
    found = [name]
    for operation in graph.operations:
        for output in operation.get_outputs():
            if not frozenset(output.get_inputs_that_alias_output()).isdisjoint(found):
                found.append(output.get_name())
    return found[1:]


@functools.cache
def mend_number_writes() -> None:
    """Have Dynamo keep the last write into a 0-dimensional float64 tensor on the CPU. It takes such an input for an
    unused number, and removes nodes with the same fake tensor and no user, also writes in place (2.11 to 2.13). Has an
    effect once."""
    if absent(_OutputGraph):
        return
    remove = _OutputGraph.remove_tensorify_specialized_graphargs

    def remove_inputs(self: Any) -> None:
        others = [node for node in self.graph.nodes if node.op != "placeholder" and "example_value" in node.meta]
        kept = [node.meta.pop("example_value") for node in others]
        remove(self)
        for node, value in zip(others, kept, strict=True):
            node.meta["example_value"] = value

    _OutputGraph.remove_tensorify_specialized_graphargs = remove_inputs


def mend_loop_order() -> None:
    """Allow foreach operators and reductions in one graph: there, an assertion fails in Inductor of torch 2.11 (PyTorch
    issue 176591); later releases do not reorder such loops."""
    if torch.__version__.split(".")[:2] != ["2", "11"]:
        return
    reorder = _FusedNode.reorder_loops_by_dep_pair

    def reorder_loops_by_dep_pair(self: Any, *dependencies: Any) -> bool:
        simple = all(isinstance(node, _SchedulerNode) for node in self.snodes)
        return simple and reorder(self, *dependencies)

    _FusedNode.reorder_loops_by_dep_pair = reorder_loops_by_dep_pair


def mend_gradients() -> None:
    """Where Dynamo would trace a backward pass differently from autograd, have it do as autograd, or end the graph.

    Gradients with ``create_graph`` would be constants; those of custom functions also if ``torch.autograd.grad``
    returns them. A ``p.grad`` that a program sets and reads would be loaded from ``p`` wherever the value goes; if it
    is None, so would every None of all later programs. After a hook of a tensor that the program has made, it would no
    longer write attributes of objects of which it has already written one.
    """
    backward, read = _TensorVariable.method_backward, getattr(_TensorVariable, _READ_ATTRIBUTE)
    compile_subgraph = _OutputGraph.compile_subgraph

    def method_backward(
        self: Any, tx: Any, gradient: Any = None, retain_graph: Any = None, create_graph: Any = None, inputs: Any = None
    ) -> Any:
        constant = create_graph is None or (create_graph.is_python_constant() and not create_graph.as_python_constant())
        with contextlib.nullcontext() if constant else dynamo_config.patch(trace_autograd_ops=False):
            return backward(self, tx, gradient, retain_graph, create_graph, inputs)

    def read_attribute(self: Any, tx: Any, name: str) -> Any:
        effects = tx.output.side_effects
        if name == "grad" and effects.has_pending_mutation_of_attr(self, name):
            return effects.load_attr(self, name)
        found = read(self, tx, name)
        if isinstance(found, _ConstantVariable) and found is _ConstantVariable.create(found.value):
            found.source = None  # it is shared by all programs
        return found

    def compile_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _loses_second_order(self.graph):
            raise _Unsupported("create_graph with a custom autograd function")
        return compile_subgraph(self, *args, **kwargs)

    def hooked(register: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.source and any(tx.output.side_effects.store_attr_mutations.values()):
                raise _Unsupported("a hook of a tensor that is no parameter, behind the write of an attribute")
            return register(self, tx, *args, **kwargs)

        return method

    _OutputGraph.compile_subgraph = compile_whole
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        _set_method(name, hooked(getattr(_TensorVariable, f"method_{name}")))
    _set_method("backward", method_backward)
    setattr(_TensorVariable, _READ_ATTRIBUTE, read_attribute)


def _loses_second_order(graph: torch.fx.Graph) -> bool:
    """True if a traced graph has gradients with ``create_graph`` and a custom autograd function, whose backward pass
    would have no graph."""
    asks = any(
        node.target is torch.autograd.grad and (node.kwargs.get("create_graph") or any(node.args[4:5]))
        for node in graph.nodes
    )
    return asks and any(str(node.target) == "autograd_function_apply" for node in graph.nodes)


_AGAIN = "_recomputed"
"""Suffix of the names of nodes that a backward pass recomputes."""
_COMPUTED = "pygraph_computed_again"


def computed_again(node: Any) -> bool | None:
    """True for an FX node that its graph's backward pass recomputes, False for a node before the first of these, None
    for all others."""
    found: bool | None = node.meta.get("custom", {}).get(_COMPUTED)
    return found


def keep_random_draws() -> None:
    """In a graph with its own backward pass, have checkpointed parts keep their random draws and recompute the rest;
    mark nodes for ``computed_again``. Otherwise AOTAutograd refuses such a graph, or, in torch 2.11, does not find its
    backward pass. Attention counts as a draw, too."""
    recompute = _recomputation.remat_using_tags_for_fwd_loss_bwd_graph
    backward = str(torch.autograd.grad)

    def recompute_all_else(graph: Any) -> Any:
        for node in graph.graph.nodes:
            sources = node.meta.get("from_node")
            if sources and sources[0].target == backward:
                node.meta["custom"] = {**node.meta.get("custom", {}), "remat_pass_tag": "is_backward"}
            if node.meta.get("recompute") is not None and torch.Tag.nondeterministic_seeded in getattr(
                node.target, "tags", ()
            ):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        made = recompute(graph)
        nodes = list(made.graph.nodes)
        again = [node for node in nodes if node.name.endswith(_AGAIN)]
        # getitem nodes follow their tuples directly, even if they are used much later
        first = next((node for node in again if node.target is not operator.getitem), None)
        for node in {*itertools.takewhile(lambda node: node is not first, nodes), *again} if again else ():
            node.meta["custom"] = {**node.meta.get("custom", {}), _COMPUTED: node.name.endswith(_AGAIN)}
        return made

    _recomputation.remat_using_tags_for_fwd_loss_bwd_graph = recompute_all_else


# -- caches ----------------------------------------------------------------------------------------------------------
_COLD = "AOTAutograd's cache is off: warm starts take longer"
FXGraphCacheMiss = _find("torch._functorch._aot_autograd.autograd_cache.FXGraphCacheMiss", cost=_COLD)
FxGraphCacheLoadable = _find("torch._functorch._aot_autograd.aot_autograd_result.FxGraphCacheLoadable", cost=_COLD)
dynamo_config = _find("torch._dynamo.config", cost=_COLD)
inductor_cache_dir = _find("torch._inductor.runtime.cache_dir_utils.cache_dir", cost=_COLD)
for _name in ("load", "post_compile"):
    _find(f"torch._functorch._aot_autograd.aot_autograd_result.FxGraphCacheLoadable.{_name}", cost=_COLD)
WARM_STARTS = _COLD not in MISSING.values()

# -- operators in FX graphs ----------------------------------------------------------------------------------------
get_mutated_tensors = _find(
    "torch._higher_order_ops.triton_kernel_wrap.get_mutated_tensors",
    cost="a Triton kernel of the user's counts as writing all of its arguments",
)
higher_order_operators = _find("torch._ops._higher_order_ops")

# -- sizes prepared ahead of real calls -------------------------------------------------------------------------------
tree_leaves = _find("torch.utils._pytree.tree_leaves", cost="`pygraph.prepare` and `pygraph.loop` raise")
tree_map = _find("torch.utils._pytree.tree_map", cost="`pygraph.prepare` and `pygraph.loop` raise")
tree_flatten = _find("torch.utils._pytree.tree_flatten", cost="`pygraph.loop` raises")
tree_unflatten = _find("torch.utils._pytree.tree_unflatten", cost="`pygraph.loop` raises")

# -- callables that are captured as they run --------------------------------------------------------------------------
pytree_nodes = _find("torch.utils._pytree.SUPPORTED_NODES")
function_depth = _find("torch._C._len_torch_function_stack")
function_modes = _find("torch.overrides._get_current_function_mode_stack")
DeviceContext = _find("torch.utils._device.DeviceContext")
saved_tensor_hooks = _find("torch._C._autograd._top_saved_tensors_default_hooks")
_hooks_of_modules = _find("torch.nn.modules.module._has_any_global_hook")
global_hooks: list[dict[Any, Any]] = [
    table
    for module in map(_find, ("torch.nn.modules.module", "torch.optim.optimizer"))
    for name, table in vars(module).items()
    if name.startswith("_global_") and isinstance(table, dict)
]
"""Tables of the hooks of all modules and of all optimizers."""
_forward_ad = _find("torch.autograd.forward_ad")


def has_global_hooks() -> bool:
    """True if there are hooks of all modules, or of all optimizers."""
    return bool(_hooks_of_modules() or any(global_step_hooks))


def forward_level() -> int:
    """The level of forward-mode differentiation; -1 if there is none."""
    return int(_forward_ad._current_level)


# -- calls: dispatch modes, function transforms, kernels of operators ----------------------------------------------
dispatch_mode_depth = _find("torch._C._len_torch_dispatch_stack")
dynamo_guards = _find("torch._C._dynamo.guards")
functorch_level = _find("torch._C._functorch.peek_interpreter_stack")
has_kernel = _find("torch._C._dispatch_has_kernel_for_dispatch_key")
python_kernels = _find("torch.library._impls")
is_tracing = _find("torch._C._is_tracing")
pop_dispatch_mode = _find("torch._C._pop_torch_dispatch_stack")
without_dispatch_modes = _find("torch.utils._python_dispatch._disable_current_modes")
for _name in ("_empty_strided_cpu", "_empty_strided_cpu_pinned", "_reinterpret_tensor"):
    _find(f"torch._C._dynamo.guards.{_name}")

_TensorGuards = _find("torch._C._dynamo.guards.TensorGuards", cost="uncaptured calls take longer")


def check_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A native check of the same number of tensors: true if they have the types, dispatch keys, dtypes, devices, sizes
    and strides of ``tensors``. False if a tensor occurs twice, or the thread has another set of dispatch keys."""
    if absent(_TensorGuards):
        return lambda *_: False
    sizes, strides = ([list(facts(tensor)) for tensor in tensors] for facts in (torch.Tensor.size, torch.Tensor.stride))
    check: Callable[..., bool] = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


if TYPE_CHECKING:
    from torch._C import DispatchKey as DispatchKey
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    DispatchKey = _find("torch._C.DispatchKey")
    FakeTensor = _find("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = _find("torch._subclasses.fake_tensor.FakeTensorMode")
    HigherOrderOperator = _find("torch._ops.HigherOrderOperator")
    OpOverload = _find("torch._ops.OpOverload")
    OpOverloadPacket = _find("torch._ops.OpOverloadPacket")
    TorchDispatchMode = _find("torch.utils._python_dispatch.TorchDispatchMode")

_LEFT_BEHIND = "a capture that is interrupted may leave its dispatch mode behind"
_python_dispatch = _find("torch.utils._python_dispatch")
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",  # Dynamo has a copy of this one
)
for _name in _MODE_FLAGS:
    _find(f"torch.utils._python_dispatch.{_name}", cost=_LEFT_BEHIND)
_set_dynamo_flag = _find("torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals", cost=_LEFT_BEHIND)


def dispatch_mode_flags() -> Mapping[str, bool]:
    """Flags that a dispatch mode sets when it is entered."""
    return {name: getattr(_python_dispatch, name) for name in _MODE_FLAGS if hasattr(_python_dispatch, name)}


def set_dispatch_mode_flags(flags: Mapping[str, bool]) -> None:
    """Restore flags that ``dispatch_mode_flags`` returned."""
    for name, flag in flags.items():
        setattr(_python_dispatch, name, flag)
    if _MODE_FLAGS[-1] in flags and not absent(_set_dynamo_flag):
        _set_dynamo_flag(flags[_MODE_FLAGS[-1]])


_ForceDispatchKeyGuard = _find("torch._C._ForceDispatchKeyGuard")
_included_keys = _find("torch._C._dispatch_tls_local_include_set")
_excluded_keys = _find("torch._C._dispatch_tls_local_exclude_set")


def dispatch_keys_kept() -> contextlib.AbstractContextManager[object]:
    """Context at whose end the dispatch keys of this thread are restored. torch changes them by objects that change
    them back when freed, as in ``Tensor.__repr__``, which is late if an exception is raised."""
    guard: contextlib.AbstractContextManager[object] = _ForceDispatchKeyGuard(_included_keys(), _excluded_keys())
    return guard


@contextlib.contextmanager
def compiled_code_runs() -> Iterator[None]:
    """While open, functions that Dynamo has compiled run compiled, whatever modes are active."""
    flags = dispatch_mode_flags()
    set_dispatch_mode_flags({**flags, **{name: False for name in flags if name == _MODE_FLAGS[-1]}})
    try:
        yield
    finally:
        set_dispatch_mode_flags(flags)


_OTHER_REASON = "what is refused for sizes or values that depend on data has another reason in the report"
DataDependentOutputException = _find("torch._subclasses.fake_tensor.DataDependentOutputException", cost=_OTHER_REASON)
DynamicOutputShapeException = _find("torch._subclasses.fake_tensor.DynamicOutputShapeException", cost=_OTHER_REASON)

# -- CUDA driver: capture. A torch built without CUDA has neither; the driver is not made there. -------------------
clear_cublas_workspaces: Any = None
storage_from_address: Any = None
if torch.backends.cuda.is_built():
    _CUDA = "nothing is captured on a GPU"
    clear_cublas_workspaces = _find("torch._C._cuda_clearCublasWorkspaces", cost=_CUDA)
    storage_from_address = _find("torch._C._construct_storage_from_data_pointer", cost=_CUDA)
cuda_sleep = _find("torch.cuda._sleep", cost="matrix products keep the form that Inductor gives them")

# -- several processes. A torch built without torch.distributed has none of these, and nothing uses them there. -----
resolve_process_group: Any = None
_ProcessGroup: Any = None
if torch.distributed.is_available():
    _ProcessGroup = torch.distributed.ProcessGroup
    resolve_process_group = _find(
        "torch._C._distributed_c10d._resolve_process_group",
        cost="collectives are called by each replay, never captured",
    )


def before_shutdown(act: Callable[[Any], None]) -> None:
    """Call ``act`` with each process group right before it is shut down, as by ``destroy_process_group``."""
    shutdown = _ProcessGroup.shutdown

    def act_and_shut_down(self: Any) -> None:
        act(self)
        shutdown(self)

    _ProcessGroup.shutdown = act_and_shut_down


# -- benchmarks ----------------------------------------------------------------------------------------------------
def inductor_timing() -> SimpleNamespace:
    """The places where Inductor times kernels: ``autotuner.benchmark_all_configs`` times all configurations of one,
    ``padding`` decides which matrix products to pad, and ``kernel.inductor_meta_common`` enters a kernel's source.

    Imported on demand, since the imports are slow and only benchmarks need them.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return SimpleNamespace(kernel=TritonKernel, autotuner=CachingAutotuner, padding=pad_mm)


# -- traces: structured artifacts for tlparse ----------------------------------------------------------------------
trace_structured = _find("torch._logging.trace_structured", cost="TORCH_TRACE shows nothing of PyGraph")

# -- graphs from files: fake results, some of whose sizes and numbers are unknown before the graph runs -------------
_FILES = "'pygraph run' fails"
_ShapeEnv = _find("torch.fx.experimental.symbolic_shapes.ShapeEnv", cost=_FILES)
_compute_unbacked_bindings = _find("torch.fx.experimental.symbolic_shapes.compute_unbacked_bindings", cost=_FILES)
_tracing = _find("torch._guards.tracing", cost=_FILES)


def fake_mode() -> FakeTensorMode:
    """A mode for fake calls of operators, also of operators with data-dependent result sizes."""
    env = _ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=env)


def bound_symbols(mode: FakeTensorMode, fake: Any) -> Any:
    """The symbols that a fake result has introduced, for ``meta["unbacked_bindings"]``; nothing if there are none."""
    return _compute_unbacked_bindings(mode.shape_env, fake)


def tracing_under(mode: FakeTensorMode) -> contextlib.AbstractContextManager[Any]:
    """Context in which compilations find ``mode``."""
    found: contextlib.AbstractContextManager[Any] = _tracing(TracingContext(mode))
    return found


# -- torch.compile: options of a backend, which is looked up by name and then wrapped with its options ---------------
_wrap_backend = _find(
    "torch._dynamo.repro.after_dynamo.wrap_backend_debug", cost="options are checked at the first call of a program"
)


def check_options(backend: Callable[..., Any], check: Callable[..., Any]) -> None:
    """Have ``torch.compile`` call ``check`` with the mode and options of ``backend`` that are set."""
    if absent(_wrap_backend):
        return

    def wrap(given: Any, *args: Any) -> Any:
        if getattr(given, "compiler_fn", None) is backend:
            check(**given.kwargs)
        return _wrap_backend(given, *args)

    importlib.import_module(_wrap_backend.__module__).wrap_backend_debug = wrap  # type: ignore[attr-defined]


# -- graphs of Dynamo: the reason why each ends --------------------------------------------------------------------
graph_break_reasons = _find(
    "torch._dynamo.utils.graph_break_reasons", cost="reports list no graph break that ends no graph of its own"
)


def compile_reason(gm: torch.fx.GraphModule) -> Any:
    """Dynamo's ``GraphCompileReason`` of a module that it passes to a backend; None for any other module."""
    return getattr(gm, "compile_subgraph_reason", None)


# -- inputs: their descriptions by Dynamo and AOTAutograd ---------------------------------------------------------
_INPUTS = "reports call inputs by AOTAutograd's names"
_AOT = "torch._functorch._aot_autograd.descriptors"
_PlainInput = _find(f"{_AOT}.PlainAOTInput", cost=_INPUTS)
_OwnInputs = tuple(_find(f"{_AOT}.{_name}AOTInput", cost=_INPUTS) for _name in ("Param", "Buffer"))
_PartOfInput = _find(f"{_AOT}.SubclassGetAttrAOTInput", cost=_INPUTS)
_BaseOfInput = tuple(_find(f"{_AOT}.{_name}BaseAOTInput", cost=_INPUTS) for _name in ("View", "Synthetic"))


def input_sources(gm: torch.fx.GraphModule) -> dict[int | str, str]:
    """Dynamo's sources for a module that it passes to a backend: by position, of inputs; by name, of parameters and
    buffers that the module itself holds. Those without a nameable source are left out."""
    sources: dict[int | str, Any] = dict(getattr(gm, "_param_name_to_source", None) or {})
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        sources[position] = getattr(node, "_dynamo_source", None)
    found: dict[int | str, str] = {}
    for key, source in sources.items():
        with contextlib.suppress(AttributeError, NotImplementedError):  # None, and sources without a name
            found[key] = str(source.name)
    return found


def described_input(description: Any) -> tuple[int | str, tuple[str, ...]] | None:
    """The source of an AOTAutograd placeholder with this ``meta["desc"]``: a key of ``input_sources``, and attributes
    that lead on from there. None if it is unknown, or not an input of Dynamo's graph."""
    if isinstance(description, _PlainInput):
        return description.idx, ()
    if isinstance(description, _OwnInputs):
        return description.target, ()
    part = isinstance(description, _PartOfInput)
    if not part and not isinstance(description, _BaseOfInput):
        return None
    whole = described_input(description.base if part else description.base_of)
    return whole and (whole[0], (*whole[1], description.attr if part else "_base"))
