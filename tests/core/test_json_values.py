"""JSON of strangers: within bounds, or one error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from json_damage import as_bytes, nested, texts_of_no_object

from geartrain.core.json_values import DEEPEST, parse_json, read_object


def test_lists_within_lists_are_read_up_to_a_depth() -> None:
    assert parse_json(as_bytes(nested(DEEPEST))) == nested(DEEPEST)
    for depth in (DEEPEST + 1, 500, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(b"[" * depth + b"]" * depth)


@pytest.mark.parametrize("text", texts_of_no_object(), ids=lambda text: repr(text[:6]))
def test_what_is_no_object_is_one_error(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"JSON|nested"):
        read_object(tmp_path / "file.json")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="not a regular file"):
        read_object(tmp_path / "pipe.json")
