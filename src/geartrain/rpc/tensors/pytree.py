"""Pytrees: takes leaves out of nested containers before encoding, and puts them back by their key paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from geartrain.errors import MessageError
from geartrain.transport.codec import MAX_DEPTH

#: Path to a leaf: at each level the position in the tuple or list, or of the item in the dict.
KeyPath = tuple[int, ...]


def take_out(value: Any, wanted: Callable[[Any], bool]) -> tuple[Any, list[tuple[KeyPath, Any]]]:
    """Takes the wanted leaves out of a value. Returns a copy with None in their places, and the leaves by key path.

    It looks into tuples, lists and the values of dicts, as the codec does. Other values stay as they are.

    Example:
        >>> take_out({"a": [1, "x"], "b": "y"}, lambda leaf: isinstance(leaf, str))
        ({'a': [1, None], 'b': None}, [((0, 1), 'x'), ((1,), 'y')])
    """
    found: list[tuple[KeyPath, Any]] = []

    def walk(node: Any, key_path: KeyPath) -> Any:
        kind = type(node)
        if kind is tuple or kind is list:
            children: Any = node
        elif kind is dict:
            children = list(node.values())
        elif wanted(node):
            found.append((key_path, node))
            return None
        else:
            return node
        if len(key_path) > MAX_DEPTH:
            raise MessageError(f"containers are nested deeper than {MAX_DEPTH}, or contain themselves")
        before = len(found)
        walked = [walk(child, (*key_path, i)) for i, child in enumerate(children)]
        if len(found) == before:
            return node
        return dict(zip(node, walked, strict=True)) if kind is dict else kind(walked)

    return walk(value, ()), found


def put_back(value: Any, leaves: Sequence[tuple[KeyPath, Any]]) -> Any:
    """The value with leaves at their key paths. Raises `MessageError` where there is no such place.

    Example:
        >>> put_back({"a": [1, None], "b": None}, [((0, 1), "x"), ((1,), "y")])
        {'a': [1, 'x'], 'b': 'y'}
    """
    if not leaves:
        return value
    if len(leaves[0][0]) == 0:
        if len(leaves) > 1:
            raise MessageError("two leaves for one place")
        return leaves[0][1]
    kind = type(value)
    if kind is not tuple and kind is not list and kind is not dict:
        raise MessageError("a leaf for a place that is not there")
    children = list(value.values()) if kind is dict else list(value)
    below: dict[int, list[tuple[KeyPath, Any]]] = {}
    for key_path, leaf in leaves:
        if not key_path or not 0 <= key_path[0] < len(children):
            raise MessageError("a leaf for a place that is not there")
        below.setdefault(key_path[0], []).append((key_path[1:], leaf))
    for i, inner in below.items():
        children[i] = put_back(children[i], inner)
    return dict(zip(value, children, strict=True)) if kind is dict else kind(children)
