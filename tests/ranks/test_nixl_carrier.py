"""NIXL as carrier of large messages between ranks: who may ask for it; peers that end or stop. NIXL is simulated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certificates
import numpy as np
import pytest
from deadlines import patience
from rank_carriers import SIMULATED_NIXL, Ranks, dist, on_threads, simulated_nixl

from geartrain.errors import ArgumentError
from geartrain.ranks.carrier import CarrierError, Cause
from geartrain.ranks.carrier_addresses import open_carrier
from geartrain.ranks.transport_carrier import TransportCarrier
from geartrain.transport.one_sided import registered_memory
from geartrain.transport.one_sided.nixl import agent
from geartrain.transport.one_sided.nixl.link import NixlLink
from geartrain.transport.tls import TLS


@pytest.fixture(autouse=True)
def nixl_is_simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from simulated_nixl(monkeypatch)


def test_nixl_is_for_all_ranks_or_none_and_not_with_tls(monkeypatch: pytest.MonkeyPatch, loopback: TLS) -> None:
    def opened(*backends: str | None) -> list[Any]:
        store = dist.HashStore()
        return on_threads(
            len(backends),
            lambda rank: open_carrier(store, rank, len(backends), patience(20), lambda: False, backend=backends[rank]),
        )

    def all_say(found: list[Any], text: str) -> bool:
        return all(isinstance(each, ArgumentError) and text in str(each) for each in found)

    assert all_say(opened(None, "nixl"), "rank 1 of the group asks for nixl, and rank 0 cannot take part")
    monkeypatch.setattr(agent, "_made", "no libucp here")
    assert all_say(opened("nixl", "nixl"), "rank 0 of the group cannot take part: nixl is not viable: no libucp here")
    monkeypatch.setattr(agent, "_made", None)
    for name, value in certificates.environment(loopback).items():
        monkeypatch.setenv(name, value)
    assert all_say(opened("nixl", "nixl"), "nixl does not encrypt")


#: The other rank of two: writes and reads by NIXL once, tells it, and stands still.
NIXL_PEER = """
import sys, time
import numpy as np
import torch.distributed as dist
from geartrain.ranks.carrier_addresses import open_carrier
from geartrain.transport.one_sided.nixl import agent
agent.WHEELS = ("nixl_cu12",)
store = dist.FileStore(sys.argv[1], 2)
carrier = open_carrier(store, 1, 2, 60.0, lambda: False, transport="tcp", backend="nixl")
into = np.zeros(int(sys.argv[2]), np.uint8)
carrier.exchange(1, [(0, np.full(into.size, 7, np.uint8))], [(0, into)], time.monotonic() + 60)
print(carrier.peers(), int(into.min()), int(into.max()), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("end", "cause"), [("SIGKILL", Cause.lost), ("SIGSTOP", Cause.timed_out)])
def test_a_process_that_is_to_be_written_to_and_ends_or_stops_is_named(tmp_path: Path, end: str, cause: Cause) -> None:
    meet, nbytes = str(tmp_path / "meet"), 3 << 20
    path = os.pathsep.join([str(SIMULATED_NIXL), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", NIXL_PEER, meet, str(nbytes)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    ) as peer:
        try:
            store = dist.FileStore(meet, 2)
            carrier = open_carrier(store, 0, 2, patience(60), lambda: False, transport="tcp", backend="nixl")
            assert isinstance(carrier, TransportCarrier), carrier
            into = np.zeros(nbytes, np.uint8)
            mine = [(1, np.full(nbytes, 5, np.uint8))]
            carrier.exchange(1, mine, [(1, into)], time.monotonic() + patience(60))
            assert (into == 7).all()
            assert peer.stdout is not None
            assert peer.stdout.readline() == "{'nixl': 1} 5 5\n"
            peer.send_signal(signal.Signals[end])
            with pytest.raises(CarrierError) as error:
                carrier.exchange(2, mine, [(1, into)], time.monotonic() + patience(1))
            assert (error.value.peer, error.value.cause) == (1, cause)
            carrier.close()
        finally:
            peer.kill()


def test_memory_of_an_interrupted_write_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(2, "nixl")
    sent = [np.full(1 << 20, rank, np.uint8) for rank in range(2)]
    into = np.zeros(1 << 20, np.uint8)
    assert ranks.exchange(lambda rank: ([(1 - rank, sent[rank])], [(1 - rank, into)])) == [None, None]

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt  # as a signal's handler does while the write is waited for

    monkeypatch.setattr(NixlLink, "write", interrupted)
    abandoned = len(registered_memory._abandoned)
    until_s = time.monotonic() + patience(1)
    found = on_threads(
        2, lambda rank: ranks.carriers[rank].exchange(2, *(([(1, sent[0])], []), ([], [(0, into)]))[rank], until_s)
    )
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], CarrierError)
    # The sender's, which a network card may be reading, and the receiver's, which it may be writing to.
    assert len(registered_memory._abandoned) == abandoned + 2
    for carrier in ranks.carriers:
        carrier.close()
        carrier.close()


@pytest.mark.parametrize("sent", [b"", b"garbage" * 9], ids=["empty", "garbage"])
def test_what_is_no_descriptor_is_refused(sent: bytes) -> None:
    ranks = Ranks(2, "nixl")
    row, into = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    assert ranks.exchange(lambda rank: ([(1 - rank, row)], [(1 - rank, into)])) == [None, None]
    until_s = time.monotonic() + patience(20)
    ranks.carriers[1].send(2, 0, [np.frombuffer(sent, np.uint8)], until_s)
    with pytest.raises(CarrierError) as error:
        ranks.carriers[0].exchange(2, [(1, row)], [], until_s)
    assert (error.value.peer, error.value.cause) == (1, Cause.refused)
    for carrier in ranks.carriers:
        carrier.close()
