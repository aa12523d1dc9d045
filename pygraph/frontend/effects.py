"""Effects of operators: from their schemas and tags, and from tables of effects that schemas do not state.

``Call`` describes a call. For an unknown operator, the most restrictive effects are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, product
from typing import Any

from torch import fx

from pygraph import compat
from pygraph.frontend.names import is_symbolic, words
from pygraph.ir import PURE, Arg, Device, DType, Effects, Graph, TensorType, Type, Value, base_name, values_in
from pygraph.passes.legality.known import is_custom

VIEWS = words("""
    aten._conj aten._neg_view aten._reshape_alias aten._unsafe_view aten.alias aten.as_strided aten.detach
    aten.diagonal aten.expand aten.lift_fresh aten.permute aten.select aten.slice aten.split aten.split_with_sizes
    aten.squeeze aten.t aten.transpose aten.unbind aten.unfold aten.unsafe_split aten.unsafe_split_with_sizes
    aten.unsqueeze aten.view aten.view_as_complex aten.view_as_real prims.broadcast_in_dim prims.collapse_view
    prims.split_dim prims.squeeze prims.transpose prims.view_of prims.view_of_dtype
""")
"""Operators that always return a view and never read memory, except those that AOTAutograd decomposes."""

HIDDEN_VIEWS = words("""
    aten._unsafe_view aten.dequantize aten.lift aten.set aten.unsafe_split aten.unsafe_split_with_sizes
    inductor._reinterpret_tensor prims.inductor_force_stride_order
""")
"""Operators whose results share memory with an operand, or may, although their schema says that they do not."""

_REPORTED_TAGS = words("""
    cudagraph_unsafe data_dependent_output dynamic_output_shape maybe_aliasing_or_mutating nondeterministic_bitwise
    nondeterministic_seeded
""")

_PURE_RANDOM = frozenset(
    {"prims.inductor_lookup_seed", "prims.inductor_random", "prims.inductor_randint", "rngprims.philox_rand"}
)
"""Functions of a seed argument: they do not draw from a generator."""

DRAWS = frozenset({"prims.inductor_seed", "prims.inductor_seeds"})
"""Operators that draw from the generator of the device in their arguments, whatever their tags say."""

_MASKABLE = frozenset({"aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_"})
"""Indexing: boolean masks among the indices are turned into positions first, as ``nonzero`` does."""

_READS_BACK = frozenset({"aten._linalg_check_errors", "aten._cudnn_ctc_loss", "aten.linalg_eig"})
"""Operators whose accelerator kernels read a device value on the host, though their shapes do not depend on it."""

_COPIES = frozenset({"aten._to_copy", "aten.to", "aten.copy_", "aten.copy", "prims.device_put", "prims.copy_to"})
"""Copies that may go from an accelerator to the host."""

_CHECKS = words("""
    aten._assert_async aten._assert_scalar aten._assert_tensor_metadata aten._functional_assert_async
    aten._functional_assert_scalar aten._linalg_check_errors aten.sym_constrain_range
    aten.sym_constrain_range_for_size aten._functional_sym_constrain_range
    aten._functional_sym_constrain_range_for_size
""")
"""Checks: they may raise, so they are never removed, but they order nothing."""

_STORAGE = frozenset({"aten.resize_", "aten.resize_as_", "aten.set_", "inductor.resize_storage_bytes_", "prims.resize"})
"""Operators that change which memory a tensor has, which neither writes nor aliases can express."""

_LOWERINGS = "py.torch._inductor."
"""Functions that Inductor's patterns substitute for operators: they only build Inductor's own IR."""

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "_dtensor.", "symm_mem.", "c10d.")


# -- calls and schemas -----------------------------------------------------------------------------------------------

Path = tuple[int | str, ...]
"""Position of a result in an operator's return value: indices and keys, outermost first; empty for a single result."""


@dataclass(frozen=True, slots=True)
class SchemaFacts:
    """A schema's facts: argument names, those written, and which results alias which arguments.

    ``aliases`` pairs a result's index with an argument's name; ``single``: there is one result (or one list);
    ``composite``: the operator is made of other operators, which may return views that the schema does not state.
    """

    names: tuple[str, ...]
    written: frozenset[str]
    aliases: tuple[tuple[int, str], ...]
    single: bool
    composite: bool


def schema_facts(target: Any) -> SchemaFacts | None:
    """The facts of an operator's schema, or None if it has none."""
    return _facts_of(target) if isinstance(target, compat.OpOverload) else None


@cache
def _facts_of(target: Any) -> SchemaFacts:
    arguments, returns = target._schema.arguments, target._schema.returns
    try:
        composite = target.has_kernel_for_dispatch_key(compat.DispatchKey.CompositeImplicitAutograd)
    except RuntimeError:  # an operator of TorchScript only, which the dispatcher does not know
        composite = True
    return SchemaFacts(
        names=tuple(argument.name for argument in arguments),
        written=frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        aliases=tuple(
            (i, a.name) for i, r in enumerate(returns) for a in arguments if _share(r.alias_info, a.alias_info)
        ),
        single=len(returns) == 1,
        composite=composite,
    )


def _share(one: Any, other: Any) -> bool:
    """True if two alias annotations may name the same memory. An annotation of a list has no names: it may be any."""
    if one is None or other is None:
        return False
    return not one.before_set or not other.before_set or bool(one.before_set & other.before_set)


def tags_of(target: Any) -> frozenset[str]:
    """The names of an operator's tags; empty for other targets."""
    return _tags_of(target) if isinstance(target, compat.OpOverload) else frozenset()


@cache
def _tags_of(target: Any) -> frozenset[str]:
    return frozenset(str(tag.name) for tag in target.tags)


def tags_text(target: object) -> str:
    """The tags of an operator that matter to capture, sorted and separated by commas."""
    return ",".join(sorted(tags_of(target) & _REPORTED_TAGS))


@dataclass(frozen=True)
class Call:
    """A call of an operator that becomes a node. ``paths`` has the position of each of ``results`` in its return value.

    ``binds`` is true if the call creates unbacked symbols. ``node`` is the FX node that makes the call.
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
    def arguments(self) -> dict[str, tuple[Arg, range]]:
        """Each argument of the schema, by name, with the positions of its values in ``operands``."""
        facts = schema_facts(self.target)
        found: dict[str, tuple[Arg, range]] = {}
        end = 0
        for name, arg in (*zip(facts.names if facts else (), self.args, strict=False), *self.attrs.items()):
            start, end = end, end + sum(1 for _ in values_in(arg))
            found[name] = arg, range(start, end)
        return found

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The values among the arguments, flattened."""
        return tuple(values_in((*self.args, *self.attrs.values())))

    def argument(self, name: str) -> Arg:
        """The argument called ``name`` in the schema; None if it was left out."""
        return self.arguments.get(name, (None, range(0)))[0]

    def tensors(self, name: str | None = None) -> list[int]:
        """Positions of the tensors among the operands, or among those of one argument."""
        positions = range(len(self.operands)) if name is None else self.arguments.get(name, (None, range(0)))[1]
        return [position for position in positions if isinstance(self.operands[position].type, TensorType)]

    @cached_property
    def operand_devices(self) -> tuple[Device, ...]:
        """The devices of the tensor operands, in order."""
        return tuple(v.type.device for v in self.operands if isinstance(v.type, TensorType))

    @cached_property
    def device(self) -> Device | None:
        """Device of the operator: that of its first tensor result, else of its first tensor operand."""
        results = (type.device for type in self.results if isinstance(type, TensorType))
        return next(chain(results, self.operand_devices), None)


# -- effects ---------------------------------------------------------------------------------------------------------


def effects_of(call: Call) -> Effects:
    """The effects of ``call``, which must not be a higher-order operator."""
    if is_symbolic(call.op):
        return PURE
    facts = schema_facts(call.target)
    if facts is None:
        return replace(PURE, barrier=not call.op.startswith(_LOWERINGS))
    effects = Effects(
        writes=tuple(sorted({p for name in facts.written for p in call.tensors(name)})),
        aliases=_aliases(call, facts),
        reads=_reads(call),
        rng=_rng(call),
        sync=_sync(call),
        dynamic=_dynamic(call),
    )
    if call.op.startswith(_COLLECTIVES):
        effects = _collective(call, effects)
    if call.base in _CHECKS:
        return effects
    hidden = call.base in _STORAGE or "maybe_aliasing_or_mutating" in tags_of(call.target)
    # An operator that returns nothing and writes nothing has a side effect that the schema does not state.
    hidden |= not call.results and not effects.writes and not effects.sync
    return replace(effects, barrier=effects.barrier or hidden)


# -- memory --------------------------------------------------------------------------------------------------------


def _aliases(call: Call, facts: SchemaFacts) -> tuple[tuple[int, int], ...]:
    tensors = [i for i, type in enumerate(call.results) if isinstance(type, TensorType)]
    pairs: set[tuple[int, int]] = set()
    for result, name in facts.aliases:
        outputs = [i for i in tensors if facts.single or call.paths[i][:1] == (result,)]
        operands = call.tensors(name)
        if len(outputs) == len(operands):
            pairs.update(zip(outputs, operands, strict=True))
        else:
            pairs.update(product(outputs, operands))
    if not pairs and (facts.composite or call.base in HIDDEN_VIEWS):
        possible = product(tensors, call.tensors())
        pairs.update((i, p) for i, p in possible if _place(call.results[i]) == _place(call.operands[p].type))
    return tuple(sorted(pairs))


def _place(type: Type) -> tuple[Device, DType] | None:
    """Device and dtype, which agree for two values in the same memory; None without memory."""
    return (type.device, type.dtype) if isinstance(type, TensorType) else None


def _reads(call: Call) -> tuple[int, ...] | None:
    if call.base in VIEWS:
        return ()
    if call.base == "aten.copy_":
        return tuple(call.tensors("src"))
    return tuple(call.tensors()) if call.base in _CHECKS else None


# -- generators, the host, shapes ----------------------------------------------------------------------------------


def _rng(call: Call) -> str | None:
    drawing = call.base in DRAWS or "nondeterministic_seeded" in tags_of(call.target) or _hides_state(call)
    if not drawing or call.base in _PURE_RANDOM or call.argument("dropout_p") in (0, 0.0):
        return None
    return "cpu" if call.device is None else str(call.device)


def _hides_state(call: Call) -> bool:
    """True if an operator may draw, or keep a count, though no tag says so: it stays in order with draws."""
    return is_custom(call.op) and not call.op.startswith(_COLLECTIVES) and {*call.operand_devices} <= {call.device}


def _sync(call: Call) -> bool:
    if "data_dependent_output" in tags_of(call.target) or call.base in ("aten.item", "prims.item"):
        return True
    if all(device.is_host for device in call.operand_devices):
        return False
    if call.base in _COPIES:
        to_host = call.device is not None and call.device.is_host
        return to_host and call.argument("non_blocking") is not True
    if call.base in _MASKABLE:
        # A fill with one value uses the mask directly.
        values = call.argument("values")
        fills = isinstance(values, Value) and isinstance(values.type, TensorType) and values.type.numel == 1
        return _has_mask(call) and not (fills and len(_indices(call)) == 1)
    # The size of a result that depends on data is read back from the device.
    return call.base in _READS_BACK or _is_sized_by_data(call)


def _is_sized_by_data(call: Call) -> bool:
    told = call.base == "aten.repeat_interleave" and call.argument("output_size") is not None
    return "dynamic_output_shape" in tags_of(call.target) and not told


def _dynamic(call: Call) -> bool:
    if call.binds and any(isinstance(type, TensorType) for type in call.results):
        return True
    return _is_sized_by_data(call) and (call.base not in _MASKABLE or _has_mask(call))


def _indices(call: Call) -> list[Value]:
    return list(values_in(call.argument("indices")))


def _has_mask(call: Call) -> bool:
    """True if an index operator has to find the positions of a mask."""
    types = [value.type for value in _indices(call)]
    return any(isinstance(type, TensorType) and type.dtype in (DType.B8, DType.U8) for type in types)


# -- order -----------------------------------------------------------------------------------------------------------


def _collective(call: Call, effects: Effects) -> Effects:
    group = _group(call)
    if call.base == "_c10d_functional.wait_tensor":
        tensors = call.tensors()
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
