"""Progress: a bar on a terminal, lines elsewhere, silence when asked."""

from __future__ import annotations

import io
import time

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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal() -> None:
    pytest.importorskip("rich")
    stream = Terminal()
    with Progress("toy", 3, stream=stream) as progress:
        for _ in range(3):
            progress.advance(2_000_000)
    assert "3/3" in stream.getvalue()
    assert "6 MB" in stream.getvalue()


@pytest.mark.parametrize("took_s", [1, 3])
def test_work_that_is_soon_done_has_no_bar(took_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    stream, now = Terminal(), time.monotonic
    with Progress("toy", 3, delay_s=2, stream=stream) as progress:
        progress.advance(0)
        monkeypatch.setattr("time.monotonic", lambda: now() + took_s)
        progress.advance(0)
    assert ("2/3" in stream.getvalue()) == (took_s > 2)
    assert "MB" not in stream.getvalue()  # where no bytes are counted


def test_progress_can_be_silent() -> None:
    stream = io.StringIO()
    with Progress("toy", 3, enabled=False, stream=stream) as progress:
        progress.advance(5)
        progress.say("done")
    assert (stream.getvalue(), progress.done, progress.nbytes) == ("", 1, 5)
