"""Arguments and effects of callables: the tensors and the key of a call; and a description of a call's effects, from
which a replay makes new values."""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from pygraph import compat
from pygraph.errors import CaptureError
from pygraph.graphs.held import MAPPING, PLAIN, PLAIN_NODE, SEQUENCE, TENSOR, TENSORS, WRITTEN, bits_of


class OddError(Exception):
    """An argument or result that contains an object other than tensors, plain values and pytree nodes."""


def read(value: Any, tensors: list[torch.Tensor], key: list[Hashable]) -> None:
    """Add the tensors of an argument to ``tensors``, and all its other facts to ``key``. Raises OddError."""
    kind: Any = type(value)
    if kind in TENSORS:
        tensors.append(value)
        key.append(kind)
    elif kind in PLAIN:
        key.append(bits_of(value) if kind in (float, complex) else (kind, value))
    elif kind is tuple or kind is list:
        key.append((kind, len(value)))
        for item in value:
            read(item, tensors, key)
    elif kind is dict:
        key.append((kind, len(value)))
        for name, item in value.items():
            read(name, tensors, key)
            read(item, tensors, key)
    elif isinstance(value, enum.Enum):
        key.append(bits_of(value))
    elif (children := children_of(value)) is not None:
        key.append((kind, len(children[0]), exact(children[1])))
        for item in children[0]:
            read(item, tensors, key)
    else:
        raise OddError(kind.__name__)


def described(value: Any, nodes: list[tuple[int, Any, int]]) -> bool:
    """Add the nodes of an argument, by which the native half recognises similar ones. False if it cannot read them."""
    kind = type(value)
    if kind in TENSORS:
        nodes.append((TENSOR, kind, 0))
    elif kind in PLAIN or isinstance(value, enum.Enum):
        nodes.append((PLAIN_NODE, value, 0))
    elif kind is tuple or kind is list:
        nodes.append((SEQUENCE, kind, len(value)))
        return all(described(item, nodes) for item in value)
    elif kind is dict:
        nodes.append((MAPPING, kind, len(value)))
        return all(described(each, nodes) for entry in value.items() for each in entry)
    else:
        return False
    return True


def children_of(value: Any) -> tuple[list[Any], Any] | None:
    """Children and context of a registered pytree node or a named tuple; None for other values."""
    node = compat.pytree_nodes.get(type(value))
    if node is None and isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return list(value), None
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), context


_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType)


def exact(context: Any) -> Hashable:
    """A key that is equal for pytree contexts of the same types and bits. Raises OddError."""
    kind = type(context)
    if kind in PLAIN or isinstance(context, enum.Enum):
        return bits_of(context)
    if kind in (tuple, list):
        return (kind, *map(exact, context))
    if kind in (dict, OrderedDict):
        return (kind, *map(exact, context.items()))
    if isinstance(context, _BY_IDENTITY):
        return cast("Hashable", context)
    raise OddError(f"node of a pytree with a {kind.__name__} in its context")


def containers_in(value: Any) -> Iterator[Any]:
    """Lists, dictionaries and other pytree nodes of an argument that may be written to."""
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (list, tuple, dict)):
        node = children_of(value)
        if node is None:
            return
        children = node[0]
    if not isinstance(value, tuple):
        yield value
    for child in children:
        yield from containers_in(child)


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor of the call, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the callable made: an output of the region, by its index."""

    index: int


@dataclass(frozen=True, slots=True)
class Known:
    """A held container, by its number in the walk."""

    number: int


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value or a function. Two are equal if types and bits are equal, or if they are one function."""

    value: Any = field(compare=False)
    bits: Hashable


@dataclass(frozen=True, slots=True)
class Built:
    """A new pytree node. The ``items`` of a dictionary are its keys and values in turn."""

    kind: type
    items: tuple[Any, ...]
    context: Any = field(default=None, compare=False)
    exact: Hashable = None


@dataclass(frozen=True, slots=True)
class Place:
    """An effect of a callable: a new gradient of a tensor, a new or removed entry of a dictionary, or new items of a
    container. ``where`` is the number of the tensor or of the container."""

    kind: str
    where: int
    key: Any = None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Left:
    """All effects of a call: its ``result``, ``places``, and the numbers of tensors ``written``, as far as autograd has
    noticed: under a dispatch mode, it misses the writes of some operators."""

    result: Any
    places: tuple[Place, ...]
    written: frozenset[int] = field(compare=False)

    @property
    def in_containers(self) -> bool:
        return any(place.kind != "grad" for place in self.places) or _is_known(self.result)


def _is_known(made: Any) -> bool:
    return type(made) is Known or (type(made) is Built and any(map(_is_known, made.items)))


class Describer:
    """Describes values that a callable returns, or leaves behind. ``made``: the tensors among them that it made.
    ``others``: lists, dictionaries and pytree nodes that existed before, and are not held."""

    def __init__(self, given: Sequence[torch.Tensor], containers: Sequence[Any], others: Iterable[Any]) -> None:
        self._others = {id(each) for each in others}
        self._given = {id(tensor): number for number, tensor in reversed(list(enumerate(given)))}
        self._known = {id(each): number for number, each in enumerate(containers) if isinstance(each, (dict, *WRITTEN))}
        self.made: list[torch.Tensor] = []

    def describe(self, value: Any) -> Any:
        """Describe ``value``. Raises CaptureError if a replay cannot make it."""
        try:
            return self._described(value)
        except RecursionError:
            said = "the callable makes containers that are nested too deeply, or contain themselves"
            raise CaptureError("unsupported-result", said) from None

    def _described(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN or isinstance(value, enum.Enum):
            return Value(value, bits_of(value))
        if isinstance(value, _BY_IDENTITY):
            return Value(value, (kind, id(value)))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._known:
            return Known(self._known[id(value)])
        if id(value) in self._others:
            said = f"the callable returns, or leaves, a {kind.__name__} that is not held, and that it does not make"
            raise CaptureError("unsupported-result", said)
        if kind in (list, tuple, torch.Size, set, frozenset):
            items = tuple(map(self._described, value))
            if kind in (tuple, torch.Size) and all(type(item) is Value for item in items):
                return Value(value, (kind, *(item.bits for item in items)))
            return Built(kind, items)
        if kind in (dict, OrderedDict):
            return Built(kind, tuple(self._described(each) for entry in value.items() for each in entry))
        children = children_of(value)
        if children is None:
            raise CaptureError("unsupported-result", f"the callable makes an object of type {kind.__name__}")
        try:
            told = exact(children[1])
        except OddError as odd:
            raise CaptureError("unsupported-result", f"the callable makes a {odd}") from None
        return Built(kind, tuple(map(self._described, children[0])), children[1], told)

    def _tensor(self, tensor: torch.Tensor) -> Given | Made:
        if id(tensor) in self._given:
            return Given(self._given[id(tensor)])
        if type(tensor) is not torch.Tensor or (tensor.is_leaf and tensor.requires_grad):
            raise CaptureError("unsupported-result", "the callable makes a parameter, or a tensor of another type")
        if vars(tensor):
            said = f"the callable makes a tensor, and sets its attribute {next(iter(vars(tensor)))}"
            raise CaptureError("unsupported-result", said)
        if tensor.requires_grad and not _is_spent(tensor):
            said = "a result has a history that autograd could go back through: detach it, or call it under no_grad"
            raise CaptureError("open-graph", said)
        index = next((i for i, each in enumerate(self.made) if each is tensor), len(self.made))
        if index == len(self.made):
            self.made.append(tensor)
        return Made(index)


def _is_spent(tensor: torch.Tensor) -> bool:
    """True if each path back from ``tensor`` meets a node whose saved tensors are freed, where autograd raises."""
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen or _is_freed(node):
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions if each is not None]
        if not following:
            return False
        waiting += following
    return True


def _is_freed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "freed" in str(error):
                    return True
    return False


def make(made: Any, given: Sequence[torch.Tensor], containers: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """Make a value from its description, with objects of this call. ``outputs[0]`` is the number of the ``Left``."""
    kind = type(made)
    if kind is Made:
        return outputs[made.index + 1]
    if kind is Value:
        return made.value
    if kind is Given:
        return given[made.number]
    if kind is Known:
        return containers[made.number]
    items = [
        outputs[each.index + 1] if type(each) is Made else make(each, given, containers, outputs) for each in made.items
    ]
    if made.kind in (dict, OrderedDict):
        return made.kind(zip(items[::2], items[1::2], strict=True))
    if made.kind in (list, tuple, set, frozenset):
        return made.kind(items)
    node = compat.pytree_nodes.get(made.kind)
    return made.kind(*items) if node is None else node.unflatten_fn(items, made.context)
