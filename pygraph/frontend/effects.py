"""Effects of operators: from their schemas and tags, and from what torch's kernels do that no schema says.

A call is described by ``Call``. Where nothing is known of an operator the answer is the careful one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from torch import fx

from pygraph import compat
from pygraph.frontend.names import HOP, is_symbolic
from pygraph.ir import PURE, Arg, Device, DType, Effects, Graph, TensorType, Type, Value, base_name, values_in

__all__ = ["VIEWS", "Call", "Path", "effects_of", "schema_facts", "tags_of", "tags_text"]

_ATEN_VIEWS = (
    "_conj _neg_view _reshape_alias _unsafe_view alias as_strided chunk detach diagonal expand expand_as lift_fresh "
    "movedim narrow permute real imag select slice split split_with_sizes squeeze swapaxes swapdims t tensor_split "
    "transpose mT mH adjoint unbind unfold unflatten unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze "
    "view view_as view_as_complex view_as_real hsplit vsplit dsplit"
)
_PRIMS_VIEWS = "broadcast_in_dim collapse_view split_dim squeeze transpose view_of view_of_dtype"

VIEWS: frozenset[str] = frozenset(
    [f"aten.{name}" for name in _ATEN_VIEWS.split()] + [f"prims.{name}" for name in _PRIMS_VIEWS.split()]
)
"""Operators that always return a view and never read memory."""

HIDDEN_VIEWS: frozenset[str] = frozenset(
    {
        "aten._unsafe_view",
        "aten.dequantize",
        "aten.lift",
        "aten.set",
        "aten.unsafe_chunk",
        "aten.unsafe_split",
        "aten.unsafe_split_with_sizes",
        "inductor._reinterpret_tensor",
        "prims.inductor_force_stride_order",
    }
)
"""Operators that share memory with an operand, or may, although their schema says that they do not."""

_REPORTED_TAGS = frozenset(
    {
        "cudagraph_unsafe",
        "data_dependent_output",
        "dynamic_output_shape",
        "maybe_aliasing_or_mutating",
        "nondeterministic_bitwise",
        "nondeterministic_seeded",
    }
)

_PURE_RANDOM = frozenset(
    {"prims.inductor_lookup_seed", "prims.inductor_random", "prims.inductor_randint", "rngprims.philox_rand"}
)
"""Functions of a seed that they are given: nothing is drawn from a generator."""

_DRAWS = frozenset({"prims.inductor_seed", "prims.inductor_seeds"})
"""Operators that draw from the generator of the device that they are given, whatever their tags say."""

_MASKABLE = frozenset({"aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_"})
"""Indexing: boolean masks among the indices are turned into positions first, as ``nonzero`` does."""

_WAITING = frozenset(
    {
        "aten._linalg_check_errors",
        "aten._cudnn_ctc_loss",
        "aten.histogramdd",
        "aten.is_nonzero",
        "aten.linalg_eig",
    }
)
"""Operators whose accelerator kernels read a device value on the host, though their shapes do not depend on it."""

_COPIES = frozenset({"aten._to_copy", "aten.to", "aten.copy_", "aten.copy", "prims.device_put", "prims.copy_to"})
"""Copies that may go from an accelerator to the host."""

_CHECKS = frozenset(
    {
        "aten._assert_async",
        "aten._assert_scalar",
        "aten._assert_tensor_metadata",
        "aten._functional_assert_async",
        "aten._functional_assert_scalar",
        "aten._linalg_check_errors",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
        "aten._functional_sym_constrain_range",
        "aten._functional_sym_constrain_range_for_size",
    }
)
"""Checks: they may raise, so they are never removed, but they order nothing."""

_STORAGE = frozenset({"aten.resize_", "aten.resize_as_", "aten.set_", "inductor.resize_storage_bytes_", "prims.resize"})
"""Operators that change which memory a tensor has, which neither writes nor aliases can say."""

_LOWERINGS = "py.torch._inductor."
"""Functions that Inductor's patterns put in place of operators: they build what Inductor makes of them, no more."""

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "_dtensor.", "symm_mem.", "c10d.")


# -- calls and schemas -----------------------------------------------------------------------------------------------

Path = tuple[int | str, ...]
"""Where a result sits in what an operator returns: indices and keys from the outside in; empty for a single result."""


@dataclass(frozen=True, slots=True)
class SchemaFacts:
    """What a schema says: argument names, those written, and which results alias which arguments.

    ``aliases`` pairs a result's index with an argument's name; ``single`` says that there is one result (or one list);
    ``composite`` that other operators do the work, which may return views that the schema does not tell of.
    """

    names: tuple[str, ...]
    written: frozenset[str]
    aliases: tuple[tuple[int, str], ...]
    single: bool
    composite: bool


def schema_facts(target: Any) -> SchemaFacts | None:
    """The facts of an operator's schema, or None when it has none."""
    return _facts_of(target) if isinstance(target, compat.OpOverload) else None


@cache
def _facts_of(target: Any) -> SchemaFacts:
    schema = target._schema
    arguments = schema.arguments
    aliases = tuple(
        (index, argument.name)
        for index, result in enumerate(schema.returns)
        for argument in arguments
        if _share(result.alias_info, argument.alias_info)
    )
    return SchemaFacts(
        names=tuple(argument.name for argument in arguments),
        written=frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        aliases=aliases,
        single=len(schema.returns) == 1,
        composite=_is_composite(target),
    )


def _is_composite(target: Any) -> bool:
    try:
        return bool(target.has_kernel_for_dispatch_key(compat.DispatchKey.CompositeImplicitAutograd))
    except RuntimeError:
        # An operator of TorchScript alone, which the dispatcher does not know: nothing is known of its kernel.
        return True


def _share(one: Any, other: Any) -> bool:
    """Whether two alias annotations may name one memory. That of a list shows no names of its own: it may be any."""
    if one is None or other is None:
        return False
    return not one.before_set or not other.before_set or bool(one.before_set & other.before_set)


def tags_of(target: Any) -> frozenset[str]:
    """The names of an operator's tags; none for what is no operator."""
    return _tags_of(target) if isinstance(target, compat.OpOverload) else frozenset()


@cache
def _tags_of(target: Any) -> frozenset[str]:
    return frozenset(str(tag.name) for tag in target.tags)


@dataclass(frozen=True)
class Call:
    """An operator about to become a node. ``paths`` says where each of ``results`` sits in what it returns.

    ``binds`` is whether it brings new unbacked symbols into being. ``node`` is the FX node that makes the call.
    """

    op: str
    target: Any
    args: tuple[Arg, ...]
    attrs: Mapping[str, Arg]
    results: tuple[Type, ...]
    paths: tuple[Path, ...]
    subgraphs: Mapping[str, Graph] = field(default_factory=dict)
    binds: bool = False
    node: fx.Node | None = None

    @cached_property
    def base(self) -> str:
        """The operator without its overload: ``aten.add`` for ``aten.add.Tensor``."""
        return base_name(self.op)

    @cached_property
    def facts(self) -> SchemaFacts | None:
        """What the operator's schema says."""
        return schema_facts(self.target)

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The values among the arguments, flattened."""
        return tuple(values_in((*self.args, *self.attrs.values())))

    @cached_property
    def spans(self) -> dict[str, range]:
        """Positions of each argument's values, by the schema's name (by position, written out, without a schema)."""
        names = self.facts.names if self.facts is not None else ()
        spans: dict[str, range] = {}
        start = 0
        for index, arg in enumerate(self.args):
            end = start + sum(1 for _ in values_in(arg))
            spans[names[index] if index < len(names) else str(index)] = range(start, end)
            start = end
        for name, arg in self.attrs.items():
            end = start + sum(1 for _ in values_in(arg))
            spans[name] = range(start, end)
            start = end
        return spans

    def argument(self, name: str) -> Arg:
        """The argument called ``name`` in the schema; None when it was left out."""
        if name in self.attrs:
            return self.attrs[name]
        names = self.facts.names if self.facts is not None else ()
        index = names.index(name) if name in names else len(self.args)
        return self.args[index] if index < len(self.args) else None

    def tensors(self, name: str | None = None) -> Iterator[int]:
        """Positions of the tensors among the operands, or among those of one argument."""
        positions = range(len(self.operands)) if name is None else self.spans.get(name, range(0))
        for position in positions:
            if isinstance(self.operands[position].type, TensorType):
                yield position

    @cached_property
    def result_device(self) -> Device | None:
        """The device of the first tensor result, or None."""
        return next((type.device for type in self.results if isinstance(type, TensorType)), None)

    @cached_property
    def operand_devices(self) -> tuple[Device, ...]:
        """The devices of the tensor operands, in order."""
        return tuple(v.type.device for v in self.operands if isinstance(v.type, TensorType))

    @property
    def device(self) -> Device | None:
        """Where the operator runs: the device of its first tensor result, else of its first tensor operand."""
        return self.result_device or next(iter(self.operand_devices), None)


# -- effects ---------------------------------------------------------------------------------------------------------


def effects_of(call: Call) -> Effects:
    """The effects of ``call``, which is no higher-order operator."""
    if is_symbolic(call.op):
        return PURE
    if call.facts is None:
        return replace(PURE, barrier=not call.op.startswith(_LOWERINGS))
    effects = Effects(
        writes=_writes(call),
        aliases=_aliases(call),
        reads=_reads(call),
        rng=_rng(call),
        sync=_sync(call),
        dynamic=_dynamic(call),
    )
    if call.op.startswith(_COLLECTIVES):
        effects = _collective(call, effects)
    return replace(effects, barrier=effects.barrier or _is_barrier(call, effects))


def tags_text(target: object) -> str:
    """The tags of an operator that bear on capture, sorted and separated by commas."""
    return ",".join(sorted(tags_of(target) & _REPORTED_TAGS))


# -- memory --------------------------------------------------------------------------------------------------------


def _writes(call: Call) -> tuple[int, ...]:
    assert call.facts is not None
    written = [p for name in call.facts.names if name in call.facts.written for p in call.tensors(name)]
    return tuple(sorted(dict.fromkeys(written)))


def _aliases(call: Call) -> tuple[tuple[int, int], ...]:
    assert call.facts is not None
    pairs: list[tuple[int, int]] = []
    for result, name in call.facts.aliases:
        pairs += _pairs(_outputs_of(call, result), list(call.tensors(name)))
    if not pairs and (call.facts.composite or call.base in HIDDEN_VIEWS):
        pairs += _possible_views(call)
    return tuple(sorted(dict.fromkeys(pairs)))


def _possible_views(call: Call) -> list[tuple[int, int]]:
    """Pairs of a result and an operand that could share memory, as far as device and dtype allow."""
    return [
        (output, position)
        for output, result in enumerate(call.results)
        for position in call.tensors()
        if isinstance(result, TensorType) and _alike(result, call.operands[position].type)
    ]


def _alike(result: TensorType, operand: Type) -> bool:
    return isinstance(operand, TensorType) and (result.device, result.dtype) == (operand.device, operand.dtype)


def _outputs_of(call: Call, result: int) -> list[int]:
    """Tensor outputs that belong to result number ``result`` of the schema."""
    assert call.facts is not None
    tensors = [i for i, type in enumerate(call.results) if isinstance(type, TensorType)]
    if call.facts.single:
        return tensors
    return [i for i in tensors if call.paths[i][:1] == (result,)]


def _pairs(outputs: list[int], operands: list[int]) -> list[tuple[int, int]]:
    if len(outputs) == len(operands):
        return list(zip(outputs, operands, strict=True))
    return [(output, operand) for output in outputs for operand in operands]


def _reads(call: Call) -> tuple[int, ...] | None:
    if call.base in VIEWS:
        return ()
    if call.base == "aten.copy_":
        return tuple(call.spans.get("src", range(0)))
    if call.base in _CHECKS:
        return tuple(call.tensors())
    return None


# -- generators, the host, shapes ----------------------------------------------------------------------------------


def _rng(call: Call) -> str | None:
    if call.base in _PURE_RANDOM or (call.base not in _DRAWS and "nondeterministic_seeded" not in tags_of(call.target)):
        return None
    if call.argument("dropout_p") in (0, 0.0) and "dropout_p" in _names(call):
        return None
    return "cpu" if call.device is None else str(call.device)


def _names(call: Call) -> tuple[str, ...]:
    return () if call.facts is None else call.facts.names


def _sync(call: Call) -> bool:
    if "data_dependent_output" in tags_of(call.target) or call.base in ("aten.item", "prims.item"):
        return True
    if all(device.is_host for device in call.operand_devices):
        return False
    if call.base in _COPIES:
        return _copies_to_host(call)
    if call.base in _MASKABLE:
        return _reads_mask_positions(call)
    if call.base == "aten.repeat_interleave" and call.argument("output_size") is not None:
        return False
    # The size of a result that the data decides is read back from the device.
    return call.base in _WAITING or "dynamic_output_shape" in tags_of(call.target)


def _copies_to_host(call: Call) -> bool:
    to_host = call.result_device is not None and call.result_device.is_host
    return to_host and call.argument("non_blocking") is not True


def _reads_mask_positions(call: Call) -> bool:
    """Whether an index operator has to find the positions of a mask (a masked fill with one value does not)."""
    masks = [value for value in _indices(call) if _is_mask(value)]
    if not masks:
        return False
    values = call.argument("values")
    fills = isinstance(values, Value) and isinstance(values.type, TensorType) and values.type.numel == 1
    return not (fills and len(_indices(call)) == 1)


def _indices(call: Call) -> list[Value]:
    indices: Arg = call.argument("indices")
    return [item for item in indices if isinstance(item, Value)] if isinstance(indices, tuple) else []


def _is_mask(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype in (DType.B8, DType.U8)


def _dynamic(call: Call) -> bool:
    shaped = any(isinstance(type, TensorType) for type in call.results)
    if call.binds and shaped:
        return True
    if "dynamic_output_shape" not in tags_of(call.target):
        return False
    if call.base in _MASKABLE:
        return any(_is_mask(value) for value in _indices(call))
    return not (call.base == "aten.repeat_interleave" and call.argument("output_size") is not None)


# -- order -----------------------------------------------------------------------------------------------------------


def _collective(call: Call, effects: Effects) -> Effects:
    group = _group(call)
    if call.base == "_c10d_functional.wait_tensor":
        tensors = list(call.tensors())
        aliases = tuple((output, tensors[0]) for output in range(len(call.results)) if tensors)
        effects = replace(effects, writes=tuple(tensors), aliases=aliases)
    return replace(effects, collective=group or "unknown", barrier=group is None)


def _group(call: Call) -> str | None:
    for name in ("group_name", "group"):
        group = call.argument(name)
        if isinstance(group, str):
            return group
    for value in call.operands:
        if value.producer is not None and value.producer.effects.collective is not None:
            return value.producer.effects.collective
    return None


def _is_barrier(call: Call, effects: Effects) -> bool:
    """An operator that returns nothing and writes nothing exists for a side effect that the schema does not tell."""
    if call.base in _CHECKS or call.op.startswith(HOP):
        return False
    if call.base in _STORAGE or "maybe_aliasing_or_mutating" in tags_of(call.target):
        return True
    return not call.results and not effects.writes and not effects.sync
