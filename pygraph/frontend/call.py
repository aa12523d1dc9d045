"""One call as effects and costs see it: operator, operands by argument name, results, subgraphs.

Positions count values flattened over positional and then keyword arguments, as ``Effects`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from torch import fx

from pygraph import compat
from pygraph.ir import Arg, Device, Graph, TensorType, Type, Value, base_name, values_in

__all__ = ["Call", "Path", "SchemaFacts", "schema_facts", "tags_of"]

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
