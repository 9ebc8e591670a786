"""`geartrain inspect NAME --rows` shows values and pictures of rows, and leaves the store as it was."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience

import geartrain as gt

pytest.importorskip("typer")

from rich.console import Console

from geartrain.tools.cli.rows import half_blocks, picture_of, png, print_rows, shades

FIELDS = {
    "frame": gt.Field((3, 10, 16), "uint8"),
    "goal": gt.Field((12, 9), "uint8", per_row=True),
    "reward": gt.Field((), "float32"),
}


@pytest.fixture
def store(name: str) -> Any:
    """Three rows of 2 to 4 steps; row i's reward is i, its frames are red at step 0 and then blue."""
    with gt.Store.create(name, FIELDS, max_length=4, capacity=9) as made:
        for i in range(3):
            with made.row(version=i, priority=i + 0.5) as row:
                row["frame"][:] = 0
                row["frame"][0, 0], row["frame"][1:, 2] = 255, 255
                row["goal"][:] = 7
                row["reward"][:] = i
                row.length = i + 2
        yield made


def inspect(*args: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run([sys.executable, "-m", "geartrain", "inspect", *args], timeout=patience(60))


def test_the_newest_rows_are_shown_with_pictures_and_written_as_files(store: gt.Store, tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
    before = store.stats()
    print_rows(gt.Store.open(store.name, mode="r", adopt=True), 2, out, tmp_path)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("priority") == 2 and "priority 2.5" in text.replace("\x1b[1;36m", "").replace("\x1b[0m", "")
    assert "[2. 2. 2. 2.]" in text and "(3, 10, 16) pixels, steps 0 and 3, 0 to 255" in text
    assert "\x1b[38;2;255;0;0;48;2;255;0;0m▀" in text, "red, two pixels a cell"
    assert "\x1b[38;2;0;0;255;48;2;0;0;255m▀" in text and "\x1b[38;2;7;7;7;48;2;7;7;7m▀" in text
    assert store.stats() == before
    image = pytest.importorskip("PIL.Image")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == (1 + 3) + (1 + 4)
    last = next(name for name in names if name.endswith("-frame-3.png"))
    found = image.open(tmp_path / last)
    assert found.size == (16, 10) and found.getpixel((15, 9)) == (0, 0, 255)


def test_pictures_without_colours_are_shades(store: gt.Store) -> None:
    """In a file or a pipe half blocks of two colours would all be the same."""
    out = Console(file=io.StringIO(), color_system=None, width=100)
    print_rows(gt.Store.open(store.name, mode="r", adopt=True), 1, out, None)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "▀" not in text
    assert "(3, 10, 16) pixels, steps 0 and 3, 0 to 255\n" + ("-" * 16 + "\n") * 5 in text, "red and blue are dark"
    assert shades(np.tile(np.uint8([[[0] * 3, [255] * 3]]), (8, 4, 1)), 64) == " @ @ @ @\n" * 4
    assert shades(np.full((8, 130, 3), 255, np.uint8), 64) == "@" * 44 + "\n" + "@" * 44 + "\n"


def test_json_has_every_value(store: gt.Store) -> None:
    (found,) = json.loads(inspect(store.name, "--rows", "1", "--json").stdout)
    assert (found["length"], found["version"], found["priority"]) == (4, 2, 2.5)
    assert found["values"]["reward"] == [2.0] * 4 and found["values"]["goal"] == [[7] * 9] * 12
    assert np.array(found["values"]["frame"]).shape == (4, 3, 10, 16)


def test_what_json_lacks_is_text(name: str) -> None:
    with gt.Store.create(name, {"x": gt.Field((3,), "float64")}, max_length=1, capacity=2) as odd:
        odd.insert({"x": np.array([[[np.nan, np.inf, 1.5]]])})
        (found,) = json.loads(inspect(odd.name, "--rows", "9", "--json").stdout)
        assert found["values"]["x"] == [["nan", "inf", 1.5]]


def test_a_store_without_rows_and_arguments_that_mean_nothing(name: str, tmp_path: Path) -> None:
    with gt.Store.create(name, FIELDS, max_length=4, capacity=9):
        assert inspect(name, "--rows", "3").stdout == "no row is selectable\n"
    assert "name it" in inspect("--rows", "3").stderr
    assert "--rows shows" in inspect("anything", "--png", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((20, 30), (20, 30)),
        ((20, 30, 3), (20, 30)),
        ((3, 20, 30), (20, 30)),
        ((4, 84, 84), (84, 336)),
        ((84, 84, 4), (84, 336)),
        ((1, 20, 30), (20, 30)),
        ((7, 7, 3), None),
        ((30,), None),
        ((20, 30, 30), None),
        ((2, 3, 20, 30), None),
    ],
)
def test_pictures_are_told_by_their_shape(shape: tuple[int, ...], size: tuple[int, int] | None) -> None:
    field = gt.Field(shape, "uint8")
    picture = picture_of(np.zeros(shape, np.uint8), field)
    assert (None if picture is None else picture.shape[:2]) == size
    assert picture_of(np.zeros(shape, np.float32), field) is None
    if picture is not None:
        assert png(picture).startswith(b"\x89PNG")
        for width in (1, 7, 64):
            lines = "".join(each.text for each in half_blocks(picture, width).segments).splitlines()
            assert max(map(len, lines)) <= width
