"""Weights between hosts: each version crosses once, and readers relay it to the others of their host."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience
from weights_processes import SHM, filled, heard, kill, run

import geartrain.weights.server as serving
from geartrain import rpc, weights
from geartrain.errors import WaitTimeoutError
from geartrain.rpc.registry import functions, with_caller_functions


@pytest.fixture
def trainer() -> Iterator[rpc.Node]:
    with rpc.Node("trainer", timeout_s=patience(10)) as node:
        yield node


def test_a_version_crosses_to_another_host_once(host: Path, other_host: Path, trainer: rpc.Node) -> None:
    given = filled(1, 300_000)
    nbytes = sum(array.nbytes for array in given.values())
    nodes = [rpc.Node(f"actor{i}", peers={"trainer": trainer.address}, transport="tcp") for i in range(3)]
    readers = [weights.Reader("p", node=node, source="trainer", directory=other_host) for node in nodes]
    with weights.Publisher("p", node=trainer, directory=host) as publisher:
        with weights.Reader("p", node=trainer, source="trainer", directory=host) as beside:
            for version in (1, 2, 3):
                publisher.publish(version, filled(version, 300_000))
                for reader in [*readers, beside]:
                    found = reader.latest(at_least=version, timeout_s=patience(20))
                    assert {int(v) for a in found.values() for v in np.unique(a)} == {version}
            assert [reader.is_relay for reader in readers].count(True) == 1
            assert not beside.is_relay
        came = sum(sum(c["bytes_received"].values()) for node in nodes for c in node.counts().values())
        assert 3 * nbytes <= came < 3.05 * nbytes
        for reader in readers:
            reader.close()
    for node in nodes:
        node.close()


def test_a_relay_that_stops_or_dies_holds_a_version_for_a_while_only(
    host: Path, trainer: rpc.Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weights.Publisher("p", node=trainer, directory=host, buffers=2) as publisher:
        publisher.publish(1, filled(1))
        with rpc.Node("stuck", peers={"trainer": trainer.address}) as node:
            found = node.call("trainer", serving.NEWER, "p", b"", 0, 1.0)
            assert found["version"] == 1
            publisher.publish(2, filled(2))
            with pytest.raises(weights.BuffersHeldError):
                publisher.publish(3, filled(3), timeout_s=0.05)
            with monkeypatch.context() as patched:
                patched.setattr(serving, "PIN_S", 0.0)
                publisher.publish(3, filled(3), timeout_s=patience(10))
            assert node.call("trainer", serving.DONE, "p", found["sequence"]) is False
            found = node.call("trainer", serving.NEWER, "p", b"", 0, 1.0)
            publisher.publish(4, filled(4))
        publisher.publish(5, filled(5), timeout_s=patience(10))  # the node has hung up


@pytest.mark.parametrize("where", ["a buffer", "a piece"])
def test_closing_a_reader_ends_its_relays_wait(host: Path, other_host: Path, trainer: rpc.Node, where: str) -> None:
    hold, asked = threading.Event(), threading.Event()
    piece = functions[serving.PIECE]

    def slow(*args: Any) -> Any:
        asked.set()
        hold.wait(patience(60))
        return piece(*args)

    with (
        weights.Publisher("p", node=trainer, directory=host) as publisher,
        rpc.Node("actor", peers={"trainer": trainer.address}) as node,
    ):
        publisher.publish(1, filled(1))
        reader = weights.Reader("p", node=node, source="trainer", directory=other_host)
        held = [reader.latest(timeout_s=patience(20))]
        try:
            if where == "a piece":
                with_caller_functions.add(slow)
                functions[serving.PIECE] = slow
                publisher.publish(2, filled(2))
                assert asked.wait(patience(20))
            else:
                for version in (2, 3, 4):  # the relay has three buffers, and needs a fourth
                    publisher.publish(version, filled(version), timeout_s=patience(20))
                    if version < 4:
                        held.append(reader.latest(at_least=version, timeout_s=patience(20)))
                until_s = time.monotonic() + patience(20)
                assert reader._follower is not None
                while not (reader._follower._writer and reader._follower._writer._in_turn):
                    assert time.monotonic() < until_s
                    time.sleep(0.001)
            began_s = time.monotonic()
            reader.close()
            assert time.monotonic() - began_s < patience(1)
            assert [snapshot.version for snapshot in held] == ([1] if where == "a piece" else [1, 2, 3])
        finally:
            hold.set()
            functions[serving.PIECE] = piece
            with_caller_functions.discard(slow)


def test_a_forked_child_holds_no_version_that_a_relay_has_pinned(
    host: Path, trainer: rpc.Node, fork: Callable[..., int]
) -> None:
    go = os.pipe()
    with weights.Publisher("p", node=trainer, directory=host, buffers=2) as publisher:
        publisher.publish(1, filled(1))
        with rpc.Node("relay", peers={"trainer": trainer.address}) as node:
            found = node.call("trainer", serving.NEWER, "p", b"", 0, 1.0)
            child = fork(lambda: os.read(go[0], 1) == b"")
            assert node.call("trainer", serving.DONE, "p", found["sequence"]) is True
            for version in (2, 3):
                publisher.publish(version, filled(version), timeout_s=patience(5))
            os.write(go[1], b"x")
            assert os.waitpid(child, 0)[1] == 0
    for pipe in go:
        os.close(pipe)


def test_a_relay_is_a_source_for_others(host: Path, other_host: Path, trainer: rpc.Node) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="geartrain-test-", dir=SHM) as third_host,
        rpc.Node("near", peers={"trainer": trainer.address}) as near,
        rpc.Node("far", peers={"near": near.address}) as far,
        weights.Publisher("p", node=trainer, directory=host) as publisher,
        weights.Reader("p", node=near, source="trainer", directory=other_host) as first,
        weights.Reader("p", node=far, source="near", directory=third_host) as second,
    ):
        publisher.publish(1, filled(1))
        assert (second.latest(at_least=1, timeout_s=patience(20))["a"] == 1).all()
        publisher.publish(2, filled(2))
        assert (second.latest(at_least=2, timeout_s=patience(20))["a"] == 2).all()
        assert first.is_relay
        assert second.is_relay


def test_another_process_relays_when_the_relay_is_killed(host: Path, other_host: Path, trainer: rpc.Node) -> None:
    with weights.Publisher("p", node=trainer, directory=host) as publisher:
        publisher.publish(1, filled(1))
        child = run(
            "n = rpc.Node('child', peers={'trainer': sys.argv[2]})\n"
            "r = weights.Reader('p', node=n, source='trainer', directory=sys.argv[1])\n"
            "r.latest(); say(r.is_relay); sys.stdin.read()",
            other_host,
            trainer.address,
        )
        assert heard(child) == "True"
        with rpc.Node("actor", peers={"trainer": trainer.address}) as node:
            with weights.Reader("p", node=node, source="trainer", directory=other_host) as reader:
                assert reader.latest().version == 1
                assert not reader.is_relay
                kill(child)
                assert (reader.latest()["a"] == 1).all()
                publisher.publish(2, filled(2))
                assert reader.latest(at_least=2, timeout_s=patience(20)).version == 2
                assert reader.is_relay


def test_a_trainer_killed_in_the_middle_of_a_transfer_leaves_the_version_before(host: Path, other_host: Path) -> None:
    code = (
        "n = rpc.Node('trainer')\n"
        "p = weights.Publisher('p', node=n, directory=sys.argv[1])\n"
        "p.publish(1, filled(int(sys.argv[2])))\n"
        "say(n.address); sys.stdin.readline()\n"
        "from geartrain.rpc.registry import functions, with_caller_functions\n"
        "piece, asked = functions['geartrain.weights.piece'], []\n"
        "def dying(caller, name, sequence, offset, size):\n"
        "    asked.append(offset)\n"
        "    if len(asked) > 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return piece(caller, name, sequence, offset, 1000)\n"
        "with_caller_functions.add(dying)\n"
        "functions['geartrain.weights.piece'] = dying\n"
        "p.publish(2, filled(2)); sys.stdin.read()"
    )
    first = run(code, host, 1)
    peers = {"trainer": heard(first)}
    with rpc.Node("actor", peers=peers, timeout_s=patience(5)) as node:
        with weights.Reader("p", node=node, source="trainer", directory=other_host) as reader:
            assert reader.latest().version == 1
            assert first.stdin is not None
            first.stdin.write("\n")
            first.stdin.flush()
            # The first piece is too short, and given up; when it is asked for again the trainer dies.
            assert first.wait(patience(20)) == -signal.SIGKILL
            until_s, why = time.monotonic() + patience(20), ""
            while "fetching from 'trainer'" not in why:
                assert time.monotonic() < until_s, why
                with pytest.raises(WaitTimeoutError) as caught:
                    reader.latest(at_least=2, timeout_s=0.1)
                why = str(caught.value)
            assert (reader.latest()["a"] == 1).all()
            kill(first)
            second = run(code, host, 7)
            node.directory.known["trainer"] = heard(second)
            until_s = time.monotonic() + patience(20)
            while (reader.latest()["a"] != 7).any():  # its version is 1 again
                assert time.monotonic() < until_s
                time.sleep(0.01)
            kill(second)
    weights.reap(host)
