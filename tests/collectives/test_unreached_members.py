"""Errors of a bootstrap name every member that did not answer, and no other."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from geartrain.collectives import Group, Reducer
from geartrain.errors import WaitTimeoutError


def test_every_reducer_that_does_not_answer_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
        Reducer() as good,
    ):
        mute = [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]
        reducers = [mute[0], good.address, mute[1]]
        with pytest.raises(
            WaitTimeoutError, match=rf"reducer {mute[0]}: .*; cannot reach reducer {mute[1]}: "
        ) as raised:
            Group(0, 1, reducers=reducers, shares=[0, 0.3, 0.4, 0.3], timeout_s=1.0)
        error: Any = raised.value
        assert list(error.reducers) == mute
        assert list(error.ranks) == []
