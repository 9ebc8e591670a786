"""Reads JSON from untrusted files: limits its nesting, and checks the types and ranges of entries.

A checksum detects damage, but does not show that the file's writer knew the format. A wrong entry raises `ValueError`
here, and each reader converts it into the error of its files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from geartrain.core.arguments import shown

#: Deepest nesting of lists and objects. geartrain's own files have at most ten levels.
DEEPEST = 64


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` if it is not JSON, or is nested deeper than `DEEPEST`."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not the JSON that was written: {error}") from None
    level = [found]
    for _ in range(DEEPEST):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return found
    raise ValueError("its lists and objects are nested too deeply")


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        ValueError: it is no JSON, or no file: a pipe of that name would be waited for.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")
        with os.fdopen(fd, "rb", closefd=False) as file:
            return parse_json(file.read())
    finally:
        os.close(fd)


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file of JSON is. Raises as `read_json`."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def entry(content: Mapping[str, Any], key: str, kind: type | UnionType) -> Any:
    """An entry of a type. Raises `ValueError`."""
    found = content.get(key)
    if not isinstance(found, kind):
        raise ValueError(f"{key} is {shown(found)}")
    return found


def whole_entry(content: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """An entry that is a whole number of a range, both ends included. Raises `ValueError`."""
    found = content.get(key)
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"{key} is {shown(found)}, it must be a whole number from {least} to {most}")
    return found


def object_entries(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """An entry that is a list of objects. Raises `ValueError`."""
    found: list[dict[str, Any]] = entry(content, key, list)
    if not all(isinstance(each, dict) for each in found):
        raise ValueError(f"{key} has an entry that is not an object")
    return found


__all__ = ["DEEPEST", "entry", "object_entries", "parse_json", "read_json", "read_object", "whole_entry"]
