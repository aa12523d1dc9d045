"""Stand-ins that Dynamo sees, while it traces a training step, for optimizers, loss scalers and schedulers.

A stand-in shares the ``__dict__`` of its object and has another class. Code that Dynamo refuses, or cannot keep in one
graph, is replaced here; the rest is the object's own. So the arithmetic of an update is that of ``torch.optim``.
Dynamo runs functions whose name begins with ``_traced``; elsewhere they hand over to the object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pygraph import compat
from pygraph.runtime.tensors import extent

__all__ = ["Used", "collected", "install"]

_OPTIMIZERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Optimizers whose ``step`` Dynamo traces. Others, and subclasses, run as they are."""

_TENSOR_BETAS = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose ``step`` takes its betas as tensors."""

_FORMS = {"capturable": True, "foreach": True, "fused": False}
"""Options of every group's update in a graph: step counters on the device, in the form that Inductor fuses."""


_CONFIG = {"skip_nnmodule_hook_guards": False, "suppress_errors": True, "trace_autograd_ops": True}
"""Configuration of Dynamo for a training step: autograd is traced, and a module that gets hooks causes another trace.
Code at which Dynamo or a compiler fails runs uncompiled; with ``fullgraph``, the failure raises."""

_NUMBERS = ("step", "mu_product", "mu", "eta")
"""Entries of an optimizer's state that are single numbers: float32, unless the default dtype is another one."""

_SCHEDULED = ("lr", "momentum", "betas")
"""Entries of a group that schedulers change."""

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes with the hooks of a leaf; None before the first hook."""


class Used:
    """An object that a program was traced with, and the work of a TrainStep for it around each call.

    ``path``: attributes that lead from the object to its stand-in. Guards follow them.
    """

    def __init__(self, value: Any, path: tuple[str, ...] = ("_pygraph",)) -> None:
        self.value: weakref.ref[Any] = weakref.ref(value)
        self.path = path

    def before(self) -> None:
        """Update the values that the program reads, or withdraw the stand-in: then the step is traced again."""

    def after(self) -> None:
        """Do the work that the program has postponed to the end of the call."""


# -- substitution of stand-ins -----------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of a step. ``trace``: Dynamo's latest trace in the call. ``codes``: the code objects in which its traces
    began. ``config``: the patched configuration, from the first trace on. ``earlier``: compilations before the first
    trace. ``given_up``: code objects that have been compiled too often."""

    used: list[Used]
    left: set[str]
    trace: object = None
    codes: set[types.CodeType] = dataclasses.field(default_factory=set)
    given_up: list[types.CodeType] = dataclasses.field(default_factory=list)
    config: Any = None
    earlier: Sequence[Any] = ()
    fullgraph: bool = False

    @property
    def traced(self) -> bool:
        """True if Dynamo has traced in this call."""
        return self.trace is not None

    @property
    def whole(self) -> bool:
        """True if one trace covered the whole step."""
        return not self.left and len(self.codes) == 1


_calls = threading.local()


@contextlib.contextmanager
def collected(used: list[Used], left: set[str], *, fullgraph: bool) -> Iterator[_Call]:
    """Context in which objects that Dynamo traces on this thread are added to ``used``, and the reasons for code that
    it cannot trace to ``left``. ``fullgraph``: Dynamo traces the whole step, or raises."""
    outer = getattr(_calls, "latest", None)
    _calls.latest = call = _Call(used, left, fullgraph=fullgraph)
    try:
        yield call
    finally:
        _calls.latest = outer
        if call.config is not None:
            call.config.__exit__(None, None, None)
            left.update(_failures(call.earlier))


def _failures(earlier: Sequence[Any]) -> Iterator[str]:
    """Notes on Dynamo's failures since the compilations ``earlier``, with the user's line."""
    known = {id(each) for each in earlier}
    for each in compat.compilations():
        if id(each) not in known and each.fail_type is not None:
            file, line = each.fail_user_frame_filename, each.fail_user_frame_lineno
            place = f"{file or each.co_filename}:{line or each.co_firstlineno}"
            reason = (each.fail_reason or "").strip().partition("\n")[0]
            yield f"{each.co_name} runs as it is: {each.fail_type} at {place}: {reason}"


@functools.cache
def install() -> None:
    """Have Dynamo see stand-ins while it traces a training step. Has an effect once."""
    compat.substitute_variables(_substitute)
    compat.mend_gradients()
    compat.mend_loop_order()
    compat.mend_number_writes()
    compat.keep_random_draws()
    compat.follow_backward(_average_gradients)
    compat.act_in_time()
    compat.go_on_in_parts(_gives_up)
    compat.log_once_in_traces(lambda: getattr(_calls, "latest", None) is not None)


def _gives_up(code: types.CodeType) -> bool:
    """True in a call of a step, which then records ``code``."""
    call: _Call | None = getattr(_calls, "latest", None)
    if call is not None:
        call.given_up.append(code)
    return call is not None


def _substitute(trace: object, value: Any) -> compat.Substitution | None:
    """The object that Dynamo sees in place of ``value``, or attributes of a parameter to guard on; else None."""
    call: _Call | None = getattr(_calls, "latest", None)
    if call is None:
        return None
    if trace is not call.trace:
        if call.config is None:
            call.earlier = compat.compilations()
            call.config = compat.dynamo_config.patch(_CONFIG)
            call.config.__enter__()
        call.trace = trace
        call.codes.add(compat.code_of(trace))
        compat.dynamo_config.trace_autograd_ops = True
    if isinstance(value, torch.Tensor):
        return _watched(value, call.left)
    kind: type[Any] | None = None
    if isinstance(value, Optimizer):
        why = _untraceable(value)
        if why:
            call.left.add(f"{type(value).__name__} runs outside of the graph: {why}")
            return None
        kind = _UsedOptimizer
    elif isinstance(value, torch.amp.GradScaler):
        if _replaced(value):
            call.left.add(f"{type(value).__name__} runs outside of the graph: a method of it was replaced")
            return None
        kind = _UsedScaler
    elif isinstance(value, DistributedDataParallel):
        why = _unaveraged(value)
        if (
            not why and not call.fullgraph
        ):  # a graph that ends early on one rank would send data for which the others do not wait
            why = "all ranks have to trace all of the step, which fullgraph=True makes sure of"
        if why:
            call.left.add(f"DistributedDataParallel runs outside of the graph: {why}")
            return None
        kind = _UsedParallel
    elif isinstance(value, LRScheduler) and not isinstance(value, ReduceLROnPlateau):
        kind = _UsedScheduler
    if kind is None:
        return None
    known = next((one for one in call.used if one.value() is value), None)
    if known is None:
        known = kind(value)
        call.used.append(known)
    known.before()
    return compat.Substitution(known.path)


def _watched(tensor: torch.Tensor, left: set[str]) -> compat.Substitution | None:
    """Attributes of ``tensor`` to guard on, if any. If it is a leaf with hooks, or was computed before the trace, the
    backward pass of this trace is left to the autograd engine: only it runs such hooks and knows the history."""
    if not tensor.requires_grad:
        return None
    if not tensor.is_leaf:
        why = f"a tensor {tuple(tensor.shape)} was computed before"
    elif any(getattr(tensor, name, None) for name in _HOOKS):
        why = f"a parameter {tuple(tensor.shape)} has a hook"
    else:
        return compat.Substitution((), _HOOKS)
    left.add(f"the backward pass runs outside of the graph: {why}")
    compat.dynamo_config.trace_autograd_ops = False  # until this trace is over
    return None


def _stand_in(value: Any, **own: Any) -> Any:
    """An object with the attributes and functions of ``value``; functions in ``own`` replace its own."""
    names: dict[str, Any] = {}
    for base in reversed(type(value).__mro__[:-1]):
        names.update({name: function for name, function in vars(base).items() if inspect.isroutine(function)})
    for name in ("__init__", "__getstate__", "__setstate__", "__repr__"):
        names.pop(name, None)
    names["__reduce__"] = lambda _self: (type(None), ())  # a copy of the object has no stand-in
    names["_pygraph_real"] = staticmethod(weakref.ref(value))
    names["_pygraph_class"] = type(value)
    made: Any = object.__new__(type(f"Traced{type(value).__name__}", (), {**names, **own}))
    made.__dict__ = vars(value)
    made._pygraph = made
    return made


def _method(function: Callable[..., Any]) -> property:
    """``function`` as a method that attributes of the object do not hide: schedulers set ``optimizer.step``."""
    return property(lambda self: functools.partial(function, self))


@compat.disable_dynamo  # type: ignore[untyped-decorator]
def _hand_over(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Outside of any graph, do all postponed work, then call or read ``name`` of the object itself."""
    call: _Call | None = getattr(_calls, "latest", None)
    for one in call.used if call else ():
        one.after()
        one.before()
    found = getattr(self._pygraph_real(), name)
    return found(*args, **kwargs) if callable(found) else found


# -- optimizers --------------------------------------------------------------------------------------------------------


def _untraceable(optimizer: Optimizer) -> str:
    """Why the ``step`` of ``optimizer`` cannot be part of a graph; empty if it can."""
    if type(optimizer) not in _OPTIMIZERS:
        return "it is not one of torch.optim that can be traced"
    if _hooked(optimizer):
        return "its step has hooks, or a method of it was replaced"
    for group in optimizer.param_groups:
        params = group["params"]
        if group.get("differentiable"):
            return "it is differentiable"
        if len({p.device for p in params}) > 1:
            return "a group of its parameters is on several devices"
        if any(type(p) not in (torch.Tensor, torch.nn.Parameter) or p.is_complex() for p in params):
            return "a parameter is complex, or of a class of its own"
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + extent(p)) for group in optimizer.param_groups for p in group["params"]
    )
    if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
        return "parameters share memory"  # updates see earlier ones only outside of a graph
    return ""


def _hooked(optimizer: Optimizer) -> bool:
    own = vars(optimizer)
    if "zero_grad" in own:
        return True
    if "step" in own and getattr(own["step"], "__wrapped__", None) is not type(optimizer).step:
        return True  # other than by a scheduler, which counts calls
    return bool(own["_optimizer_step_pre_hooks"] or own["_optimizer_step_post_hooks"] or any(compat.global_step_hooks))


class _UsedOptimizer(Used):
    """An optimizer whose ``step`` is part of a program.

    ``_pygraph_rates`` of the stand-in holds, for each group, the numbers that schedulers change: one float64 tensor of
    the learning rate, followed by the betas if these can be tensors; None if the learning rate is the user's own
    tensor. The tensors are written when the numbers differ from ``_pygraph_numbers``. All of this belongs to the
    optimizer: several steps may use it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._stand_in = _stand_in(
            optimizer,
            step=_method(_traced_step),
            zero_grad=_method(_traced_zero_grad),
            _pygraph_init_group=staticmethod(compat.innermost_fn(type(optimizer)._init_group)),  # type: ignore[attr-defined]
            _pygraph_names=("params", *sorted(optimizer.defaults.keys() - {"lr", "betas"})),  # in a fixed order
            _pygraph_update=staticmethod(inspect.unwrap(type(optimizer).step)),
        )
        self._stand_in._pygraph_rates = []
        self._stand_in._pygraph_numbers = []
        self._stand_in._pygraph_states = []
        self._stand_in._pygraph_entries = []
        self._stand_in._pygraph_scheduled = False
        self._stand_in._pygraph_prepare = torch.compiler.assume_constant_result(_preparing(optimizer))
        _list_states(optimizer)
        optimizer.register_load_state_dict_post_hook(_counters_to_device)

    def before(self) -> None:
        optimizer = self.value()
        if optimizer is None:
            return
        if _hooked(optimizer):
            for name in ("_pygraph", "_pygraph_key"):
                vars(optimizer).pop(name, None)
            return
        optimizer._pygraph, optimizer._pygraph_key = self._stand_in, id(optimizer)
        _list_states(optimizer)
        numbers = [_numbers(optimizer, group) for group in optimizer.param_groups]
        written: list[tuple[float, ...] | None] = self._stand_in._pygraph_numbers
        if numbers == written:
            return
        rates: list[torch.Tensor | None] = self._stand_in._pygraph_rates
        for index, (group, latest) in enumerate(zip(optimizer.param_groups, numbers, strict=True)):
            known = written[index] if index < len(rates) else None
            if known is None or latest is None or len(known) != len(latest):
                rates[index : index + 1] = [None if latest is None else _rates(group, latest)]
                continue
            for place, (old, new) in enumerate(zip(known, latest, strict=True)):
                if old != new:
                    rates[index][place].fill_(new)  # type: ignore[index]
        del rates[len(numbers) :]
        self._stand_in._pygraph_numbers = numbers

    def after(self) -> None:
        self._stand_in._pygraph_scheduled = False


def _list_states(optimizer: Optimizer) -> None:
    """List each group's entries of ``optimizer.state`` again if they have changed. Dynamo reads these lists: guards on
    a dictionary with tensors as keys, and look-ups in it, are slow."""
    groups, own = optimizer.param_groups, vars(optimizer)
    entries = [list(map(id, each)) for each in (optimizer.state.values(), *(group["params"] for group in groups))]
    if entries != own["_pygraph_entries"]:
        own["_pygraph_entries"] = entries
        own["_pygraph_states"] = [[optimizer.state.get(p, {}) for p in group["params"]] for group in groups]


def _preparing(of: Optimizer) -> Callable[[Sequence[Sequence[bool]]], bool]:
    ref = weakref.ref(of)

    def prepare(updated: Sequence[Sequence[bool]]) -> bool:
        optimizer = ref()
        if optimizer is None:
            return False
        _prepare(optimizer, updated)
        _list_states(optimizer)
        return True

    return prepare


def _numbers(optimizer: Optimizer, group: dict[str, Any]) -> tuple[float, ...] | None:
    """The numbers of ``group`` that a scheduler may change; None if the learning rate is a tensor."""
    if isinstance(group["lr"], torch.Tensor):
        return None
    if type(optimizer) in _TENSOR_BETAS and not any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return (group["lr"], *group["betas"])
    return (group["lr"],)


def _rates(group: dict[str, Any], numbers: tuple[float, ...]) -> torch.Tensor:
    # one-dimensional: Dynamo would take a 0-dimensional float64 tensor for a number, and read it
    device = group["params"][0].device if group["params"] else None
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _prepare(optimizer: Optimizer, updated: Sequence[Sequence[bool]]) -> None:
    """During a trace, create the optimizer state that a first update would create, so that the second step does not
    differ from the first. ``updated``: for each group, a flag per parameter: true if it is updated."""
    _counters_to_device(optimizer)
    for group, flags in zip(optimizer.param_groups, updated, strict=True):
        new = [p for p, flag in zip(group["params"], flags, strict=True) if flag and not optimizer.state.get(p)]
        with _gradients(group["params"], new):
            arguments = list(inspect.signature(optimizer._init_group).parameters)[1:]  # type: ignore[attr-defined]
            forms = {name: form for name, form in _FORMS.items() if name in group}
            optimizer._init_group({**group, **forms}, *([] for _ in arguments))  # type: ignore[attr-defined]
        if group.get("momentum") and isinstance(optimizer, torch.optim.SGD) and not group["dampening"]:
            for p, flag in zip(group["params"], flags, strict=True):
                entry = optimizer.state[p]
                if flag and entry.get("momentum_buffer") is None:  # the first is the gradient, as from zeros
                    entry["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


@contextlib.contextmanager
def _gradients(params: Sequence[torch.Tensor], some: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which ``some`` of ``params`` have a gradient, of any value, and the others have none."""
    kept = [p.grad for p in params]
    try:
        for p in params:
            p.grad = None
        for p in some:
            p.grad = p.detach()
        yield
    finally:
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad


def _counters_to_device(optimizer: Optimizer) -> None:
    """Move step counters to their parameters' devices: a program on the GPU cannot contain counters on the CPU."""
    for p, state in optimizer.state.items():
        step = state.get("step") if isinstance(p, torch.Tensor) else None
        if isinstance(step, torch.Tensor) and step.device != p.device:
            state["step"] = step.to(p.device)


class _View:
    """An optimizer as its own ``step`` sees it in a graph: with other groups, and without gradient scaling.

    ``widened`` pairs single numbers in the state of float64 parameters with the float64 tensors that the update uses
    instead. Outside of a graph, the update computes with Python floats.
    """

    def __init__(self, optimizer: Any, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer = optimizer
        self.param_groups = param_groups
        self.state = {}
        self.widened: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group, entries in zip(param_groups, optimizer._pygraph_states):  # noqa: B905 - Dynamo has no strict
            for p, entry in zip(group["params"], entries):  # noqa: B905
                self.state[p] = self._widened(entry) if p.dtype == torch.float64 else entry
        self.grad_scale = None
        self.found_inf = None

    def _widened(self, entry: dict[str, Any]) -> dict[str, Any]:
        wide = {}
        for name in _NUMBERS:
            if name in entry and isinstance(entry[name], torch.Tensor) and entry[name].dtype != torch.float64:
                wide[name] = entry[name].double()
                self.widened.append((entry[name], wide[name]))
        return {**entry, **wide} if wide else entry

    def _init_group(self, *args: Any) -> Any:
        return self.optimizer._pygraph_init_group(self, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def _updates_lists(group: Any) -> bool:
    """True if an update outside of a graph has the form ``foreach``."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    return not group.get("fused") and all(p.is_cuda for p in group["params"])


def _traced_step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
    if self._pygraph_scheduled or not torch.compiler.is_compiling():  # its learning rate is not known here
        return _hand_over(self, "step", closure)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    self._opt_called = True
    with torch.no_grad():
        self._pygraph_prepare([[p.grad is not None for p in group["params"]] for group in self.param_groups])
        groups = []
        for group, rates in zip(self.param_groups, self._pygraph_rates):  # noqa: B905 - Dynamo has no strict
            new = {}
            for name in self._pygraph_names:  # in a comprehension, Dynamo would read all numbers of the group
                new[name] = group[name]
            for name in _FORMS:
                if name in new:
                    new[name] = _FORMS[name]
            # a value that the step itself has set or read is a number throughout this program
            new["lr"] = rates[0] if rates is not None and compat.untouched(group, "lr") else group["lr"]
            if "betas" in group:
                on_device = rates is not None and len(rates) > 1 and compat.untouched(group, "betas")
                new["betas"] = (rates[1], rates[2]) if on_device else group["betas"]
            groups.append(new)
        kept = []
        for group in self.param_groups:
            if group.get("nesterov") and not _updates_lists(group):  # the foreach form writes into gradients
                kept.extend([(p.grad, p.grad.clone()) for p in group["params"] if p.grad is not None])
        view = _View(self, groups)
        found_inf: Any = getattr(self, "found_inf", None)
        changed = []
        for group in groups if found_inf is not None else ():
            for p in group["params"]:
                if p.grad is not None:
                    changed.append(p)
                    changed.extend([value for value in view.state[p].values() if isinstance(value, torch.Tensor)])
        before = [tensor.clone() for tensor in changed]
        self._pygraph_update(view, None)
        for tensor, old in zip(changed, before):  # noqa: B905
            tensor.copy_(torch.where(found_inf > 0, old, tensor))
        for number, wide in view.widened:
            number.copy_(wide)
        for gradient, old in kept:
            gradient.copy_(old)
    return loss


def _traced_zero_grad(self: Any, set_to_none: bool = True) -> None:
    if not torch.compiler.is_compiling():
        _hand_over(self, "zero_grad", set_to_none)
        return
    for group in self.param_groups:
        for p in group["params"]:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                with torch.no_grad():
                    p.grad.zero_()


# -- loss scalers ------------------------------------------------------------------------------------------------------

_SCALES = frozenset({"scale", "unscale_", "step", "update", "_maybe_opt_step", "_unscale_grads_"})


def _replaced(scaler: torch.amp.GradScaler) -> bool:
    """True if the object or its class replaces a method of GradScaler that is traced."""
    kind, usual = type(scaler), torch.amp.GradScaler
    changed = kind is not usual and any(getattr(kind, name) is not getattr(usual, name) for name in _SCALES)
    return changed or not _SCALES.isdisjoint(vars(scaler))


class _UsedScaler(Used):
    """A GradScaler whose scale, overflows and growth are part of a program; the host reads none of them."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__(scaler)
        if scaler.is_enabled() and scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(torch.empty((), device=scaler._device).device)
        self._stand_in = _stand_in(
            scaler,
            scale=_method(_traced_scale),
            unscale_=_method(_traced_unscale),
            step=_method(_traced_scaler_step),
            update=_method(_traced_update),
        )

    def before(self) -> None:
        scaler: Any = self.value()
        if scaler is None:
            return
        if _replaced(scaler):
            vars(scaler).pop("_pygraph", None)
        else:
            scaler._pygraph = self._stand_in


def _traced_scale(self: Any, outputs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _hand_over(self, "scale", outputs)
    if not self._enabled:
        return outputs
    if isinstance(outputs, torch.Tensor):
        return outputs * self._scale
    return type(outputs)([_traced_scale(self, output) for output in outputs])


def _state_of(scaler: Any, optimizer: Any) -> dict[str, Any]:
    """State of ``optimizer`` in the form that GradScaler keeps, so that GradScaler can continue where a graph ends."""
    states, key = scaler._per_optimizer_states, optimizer._pygraph_key
    if key not in states:
        states[key] = {"stage": OptState.READY, "found_inf_per_device": {}}
    state: dict[str, Any] = states[key]
    return state


def _traced_unscale(self: Any, optimizer: Any) -> None:
    if not torch.compiler.is_compiling() or not hasattr(optimizer, "_pygraph_key"):
        _hand_over(self, "unscale_", optimizer)
        return
    if not self._enabled:
        return
    state = _state_of(self, optimizer)
    if state["stage"] is not OptState.READY:
        raise RuntimeError("unscale_() was called twice, or after step(), since the last update()")
    inverse = self._scale.double().reciprocal().float()
    finite = []
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    finite.append(torch.isfinite(p.grad).all())
                    p.grad.mul_(inverse)
        found_inf = 1.0 - torch.stack(finite).all().float()
    state["found_inf_per_device"] = {self._scale.device: found_inf}
    state["stage"] = OptState.UNSCALED


def _traced_scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() or not hasattr(optimizer, "_pygraph_key"):
        return _hand_over(self, "step", optimizer, *args, **kwargs)
    if not self._enabled:
        return optimizer.step(*args, **kwargs)
    if _first_momentum(optimizer):
        return _hand_over(self, "step", optimizer, *args, **kwargs)
    state = _state_of(self, optimizer)
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError("step() has already been called since the last update()")
    if state["stage"] is OptState.READY:
        _traced_unscale(self, optimizer)
    optimizer.found_inf = state["found_inf_per_device"][self._scale.device]
    result = optimizer.step(*args, **kwargs)
    del optimizer.found_inf
    state["stage"] = OptState.STEPPED
    return result


def _first_momentum(optimizer: Any) -> bool:
    """True if the update creates a momentum that an overflow would have to remove: with dampening, no earlier value
    gives the first momentum."""
    damped = [bool(group.get("momentum") and group.get("dampening")) for group in optimizer.param_groups]
    if not any(damped):
        return False  # the states of a first update do not exist yet: Dynamo must not see them
    for here, group, entries in zip(damped, optimizer.param_groups, optimizer._pygraph_states):  # noqa: B905 - Dynamo has no strict
        for p, entry in zip(group["params"], entries):  # noqa: B905
            if here and p.grad is not None and entry.get("momentum_buffer") is None:
                return True
    return False


def _traced_update(self: Any, new_scale: Any = None) -> None:
    if not torch.compiler.is_compiling():
        _hand_over(self, "update", new_scale)
        return
    if not self._enabled:
        return
    if new_scale is not None:
        self._scale.fill_(new_scale)
    else:
        found = [inf for state in self._per_optimizer_states.values() for inf in state["found_inf_per_device"].values()]
        overflow = torch.stack(found).sum() > 0
        steps = self._growth_tracker + 1
        grows = steps == self._growth_interval
        grown = self._scale * self._growth_factor
        grown = torch.where(grows & torch.isfinite(grown), grown, self._scale)
        self._scale.copy_(torch.where(overflow, self._scale * self._backoff_factor, grown))
        self._growth_tracker.copy_(torch.where(overflow | grows, 0, steps))
    self._per_optimizer_states.clear()


# -- several processes -------------------------------------------------------------------------------------------------
#
# The C++ reducer of DDP sends from hooks of the autograd engine. A graph with its own backward pass has no such hooks:
# there, the collectives of the reducer follow each traced backward pass.

_FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of gradients (1 MiB), as in DDP: a small one keeps the network busy earlier."""


def _unaveraged(model: DistributedDataParallel) -> str:
    """Why ``model`` cannot be part of a graph; empty if it can."""
    if type(model) is not DistributedDataParallel:
        return "it is a subclass of DistributedDataParallel"
    options = {
        "find_unused_parameters": "which parameters are used is found in each step",
        "mixed_precision": "it casts parameters",
        "_use_python_reducer": "it is torch's own for compiled autograd",
        "_delay_all_reduce_params": "it delays some of its gradients",
        "_comm_hooks": "it has a communication hook",
        "buffer_hook": "it has a hook for buffers",
    }
    for name, why in options.items():
        if getattr(model, name, None):
            return why
    if model._join_config.enable:
        return "ranks may join it"
    if model._get_ddp_logging_data().get("comm_hook"):
        return "it has a communication hook"
    if any(
        isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse for module in model.modules()
    ):
        return "gradients are sparse"
    if any(buffer.device != model.device for buffer in model.modules_buffers):
        return "a buffer is on another device"
    if _known(model) is None:
        return "other parameters are trained than when it was made"
    return ""


def _known(model: DistributedDataParallel) -> list[torch.Tensor] | None:
    """The parameters that were trained when ``model`` was made: gradients of others are not averaged. None if that is
    unknown."""
    count = model._get_ddp_logging_data()["num_parameter_tensors"]
    parameters = list(model._module_parameters)
    trained = [each for each in parameters if each.requires_grad]
    return next((each for each in (parameters, trained) if len(each) == count), None)


def _state_of_parallel(model: DistributedDataParallel) -> list[Any]:
    """The state of ``model`` that may change between steps, and on which ``_unaveraged`` and ``_facts`` depend."""
    buffers = map(id, model.module.buffers()) if model.modules_buffers else ()
    return [
        model.process_group.group_name,
        model._join_config.enable,
        len(model._comm_hooks),
        hasattr(model, "buffer_hook"),
        *buffers,
    ]


def _facts(model: DistributedDataParallel) -> dict[str, Any]:
    """The facts of ``model`` that a program needs, as attributes on which it guards."""
    model._assign_modules_buffers()
    kinds: dict[torch.dtype, list[tuple[torch.nn.Module, str]]] = {}
    synchronizes = vars(model)["forward_sync_buffers" if "forward_sync_buffers" in vars(model) else "broadcast_buffers"]
    for name, buffer in model.module.named_buffers() if synchronizes else ():
        if name in model.parameters_to_ignore:
            continue
        owner, _, own = name.rpartition(".")
        kinds.setdefault(buffer.dtype, []).append((model.module.get_submodule(owner), own))
    return {
        "_pygraph_group": model.process_group.group_name,
        "_pygraph_scale": 1.0 / model.process_group.size(),
        "_pygraph_buckets": _buckets(model),
        "_pygraph_buffers": list(kinds.values()),
    }


def _buckets(model: DistributedDataParallel) -> list[list[torch.Tensor]]:
    """Groups of parameters whose gradients are sent together, roughly in the order in which they become ready."""
    made: list[list[torch.Tensor]] = [[]]
    free = min(_FIRST_BUCKET, model.bucket_bytes_cap)
    for parameter in reversed(_known(model) or ()):
        kinds = {(each.dtype, each.device) for each in made[-1]}
        if made[-1] and (free < parameter.nbytes or kinds != {(parameter.dtype, parameter.device)}):
            made.append([])
            free = model.bucket_bytes_cap
        made[-1].append(parameter)
        free -= parameter.nbytes
    return made if made[-1] else []


def _traced_parallel(self: Any, inputs: Any, kwargs: Any) -> Any:
    """DDP's ``forward``, traced: take buffers from rank 0, and have the next backward pass average gradients."""
    if self.require_forward_param_sync:
        with torch.no_grad():
            for places in self._pygraph_buffers:
                kind = [getattr(owner, name) for owner, name in places]  # a forward pass may have replaced them
                flat = torch.cat([buffer.reshape(-1) for buffer in kind])
                latest = _wait(_broadcast(flat, 0, self._pygraph_group))
                for buffer, value in zip(kind, _split(latest, kind)):  # noqa: B905 - Dynamo has no strict
                    buffer.data.copy_(value)  # autograd may have saved the buffer, and would check its version
    if self.device_ids:
        inputs, kwargs = _moved(inputs, self.device), _moved(kwargs, self.device)
    result = self.module(*inputs, **kwargs)
    synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
    self.require_forward_param_sync = synchronizes
    if synchronizes:
        compat.owe(self, [parameter for bucket in self._pygraph_buckets for parameter in bucket])
    return result


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(each, device) for each in value])
    if isinstance(value, dict):
        return {key: _moved(each, device) for key, each in value.items()}
    return value


def _average_gradients(self: Any, reached: Any) -> None:
    """At the end of a backward pass, average over ranks the gradients of the parameters that it was the first to reach.
    ``reached`` has a flag for each parameter of all buckets."""
    at = 0
    with torch.no_grad():
        for bucket in self._pygraph_buckets:
            flags = reached[at : at + len(bucket)]
            at += len(bucket)
            updated = [p for p, flag in zip(bucket, flags) if flag and p.grad is not None]  # noqa: B905
            if updated:
                for p, average in zip(updated, _averages(self, [p.grad for p in updated])):  # noqa: B905
                    p.grad.copy_(average)


def _averages(self: Any, gradients: Any) -> Any:
    flat = torch.cat([(each * self._pygraph_scale).reshape(-1) for each in gradients])
    total = _wait(_all_reduce(flat, "sum", self._pygraph_group))
    return _split(total, gradients)


def _split(flat: Any, like: Any) -> Any:
    """Views of ``flat`` side by side, with the sizes of the tensors in ``like``."""
    parts, at = [], 0
    for each in like:
        parts.append(flat[at : at + each.numel()].view(each.shape))
        at += each.numel()
    return parts


_all_reduce = torch.ops._c10d_functional.all_reduce
_broadcast = torch.ops._c10d_functional.broadcast
_wait = torch.ops._c10d_functional.wait_tensor


class _UsedParallel(Used):
    """A DistributedDataParallel whose forward pass, and averaging of gradients, are traced."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model)
        own = {
            "forward": _traced_forward,
            "__reduce__": lambda _self: (type(None), ()),
            "_pygraph_real": staticmethod(weakref.ref(model)),
        }
        self._stand_in: Any = object.__new__(type("TracedDistributedDataParallel", (DistributedDataParallel,), own))
        object.__setattr__(self._stand_in, "__dict__", vars(model))  # a module's own __setattr__ would register it
        self._state: list[Any] = []

    def before(self) -> None:
        model = self.value()
        state = self._state if model is None else _state_of_parallel(model)
        if model is None or state == self._state:
            return
        self._state = state
        if _unaveraged(model):
            vars(model).pop("_pygraph", None)
        else:
            vars(model).update(_pygraph=self._stand_in, **_facts(model))


def _traced_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return _hand_over(self, "forward", *inputs, **kwargs)
    return _traced_parallel(self, inputs, kwargs)


# -- schedulers --------------------------------------------------------------------------------------------------------


class _UsedScheduler(Used):
    """A scheduler whose steps within a training step run after it, since they compute on the host."""

    def __init__(self, scheduler: LRScheduler) -> None:
        name = f"_pygraph_scheduler_{id(scheduler)}"  # of the optimizer: a scheduler's attributes are its state_dict
        super().__init__(scheduler, ("optimizer", name))
        known = getattr(scheduler.optimizer, name, None)  # made for another training step
        kind = type("TracedScheduler", (_Scheduler,), {"_pygraph_class": type(scheduler)})
        self._stand_in = known if known is not None and known.stands_for(scheduler) else kind(scheduler)
        setattr(scheduler.optimizer, name, self._stand_in)

    def after(self) -> None:
        scheduler, due = self.value(), self._stand_in.due
        self._stand_in.due = 0
        if scheduler is not None:
            for _ in range(due):
                scheduler.step()


class _Scheduler:
    """Stand-in for a scheduler. ``due``: number of its postponed steps. ``puts_off``: true until a graph ends early
    after a step, or later code in it reads a value that a step changes. All other attributes are those of the
    scheduler."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.due = 0
        self.puts_off = True
        self.optimizer = scheduler.optimizer
        self._pygraph_real = weakref.ref(scheduler)

    def stands_for(self, scheduler: LRScheduler) -> bool:
        """True if this stand-in belongs to ``scheduler``: an earlier one may have had the same ``id``."""
        return self._pygraph_real() is scheduler

    def step(self, *args: Any) -> None:
        """Postpone one step if possible; otherwise run it at once, outside of the graph."""
        if (
            args
            or not self.puts_off
            or not torch.compiler.is_compiling()
            or not hasattr(self.optimizer, "_pygraph_key")
        ):
            _hand_over(self, "step", *args)
            return
        self.due = self.due + 1
        self.optimizer._pygraph_scheduled = True  # type: ignore[attr-defined]
        compat.put_off(self, self.optimizer.param_groups, _SCHEDULED)

    def get_last_lr(self) -> Any:
        """``get_last_lr`` of the scheduler, after its postponed steps."""
        return _hand_over(self, "get_last_lr")

    def __getattr__(self, name: str) -> Any:
        return _hand_over(self, name)
