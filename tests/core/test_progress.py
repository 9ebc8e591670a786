"""Progress: a bar on a terminal, lines elsewhere, silence when asked."""

from __future__ import annotations

import io

import pytest

from geartrain.core.progress import Progress


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("geartrain.core.progress.LINE_EVERY_S", 0.0)
    stream = io.StringIO()
    with Progress("toy", 2, stream=stream) as progress:
        progress.advance(1_000_000)
        progress.advance(1_000_000)
    assert "toy: 1 of 2 episodes" in stream.getvalue()
    assert "toy: 2 of 2 episodes" in stream.getvalue()


def test_progress_is_a_bar_on_a_terminal() -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress("toy", 3, stream=stream) as progress:
        for _ in range(3):
            progress.advance(2_000_000)
    assert "3/3" in stream.getvalue()
    assert "6 MB" in stream.getvalue()


def test_progress_can_be_silent() -> None:
    stream = io.StringIO()
    with Progress("toy", 3, enabled=False, stream=stream) as progress:
        progress.advance(5)
        progress.say("done")
    assert (stream.getvalue(), progress.done, progress.nbytes) == ("", 1, 5)
