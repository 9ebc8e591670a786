"""The message queue that DI-engine is given, without DI-engine: its interface, its options, and what it refuses."""

from __future__ import annotations

import logging
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience, until

import geartrain.integrations.di_engine.message_queue as engine
import geartrain_bench.di_engine.bench as bench
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    MissingDependencyError,
    TransportError,
    UntrustedPeerError,
)
from geartrain.integrations import di_engine
from geartrain.integrations.di_engine import Queue, options
from geartrain.integrations.di_engine.discovery import parse_contact
from geartrain.integrations.di_engine.options import DevicePair, QueueOptions

SECRET = b"known to all of us"


def test_a_queue_of_bytes_is_what_di_engine_expects_of_one(tmp_path: Path) -> None:
    one = Queue(f"ipc://{tmp_path}/0", [], QueueOptions(node_id=0, secret=SECRET))
    two = Queue(f"ipc://{tmp_path}/1", [f"ipc://{tmp_path}/0"], QueueOptions(node_id=1, secret=SECRET))
    one.listen()
    two.listen()
    two.subscribe("task.a")
    two.subscribe("task.b")
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(iter(two.recv, None)))
    thread.start()
    until(lambda: one._bus.peers == {1: {"task.a", "task.b"}})
    one.publish("task.a", b"data")
    until(lambda: got == [("task.a", b"data")])
    two.unsubscribe("task.*")
    until(lambda: one._bus.peers == {1: set()})
    assert len(two.attach_to) == 1
    two.stop()
    thread.join(patience(5))
    assert not thread.is_alive()
    one.stop()
    assert two.recv() is None
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_an_error_where_the_queue_is_made(tmp_path: Path) -> None:
    one = Queue("tcp://127.0.0.1:0", [], QueueOptions(secret=SECRET))
    port = one._bus.address.rpartition(":")[2]
    with pytest.raises(GeartrainError, match=port):
        Queue(f"tcp://127.0.0.1:{port}", [], QueueOptions(secret=SECRET))
    one.stop()
    with pytest.raises(UntrustedPeerError, match="secret"):
        Queue("tcp://0.0.0.0:0", [], QueueOptions())


def test_the_bench_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(GeartrainError, match="--baseline-python di=/path/to/python"):
        bench.main()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no DI-engine in here >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(GeartrainError, match="over geartrain did not start: no DI-engine in here"):
        bench.main(baselines={"di": str(broken)})


@pytest.mark.skipif(find_spec("ding") is not None, reason="DI-engine is installed here")
def test_without_di_engine_there_is_an_error_that_says_how_to_get_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps DI-engine==0\.5\.3"):
        di_engine.install()


def test_an_unknown_version_of_di_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    class Parallel:
        @classmethod
        def runner(cls, n_parallel_workers: int, something_new: int) -> None: ...

    fakes: dict[str, Any] = {
        "ding": types.SimpleNamespace(__version__="v9.9"),
        "ding.framework.parallel": types.SimpleNamespace(Parallel=Parallel),
        "ding.utils.registry_factory": types.SimpleNamespace(MQ_REGISTRY={}),
        "ding.framework.message_queue": types.SimpleNamespace(MQ=object),
    }
    monkeypatch.setattr(engine.importlib, "import_module", fakes.__getitem__)
    with pytest.raises(MissingDependencyError, match=r"this is DI-engine 9\.9, and the queue was made for 0\.5\.3"):
        engine.install()
    fakes["ding"].__version__ = f"v{engine.KNOWN_VERSIONS[-1]}"
    with pytest.raises(MissingDependencyError, match=r"Parallel\.runner of DI-engine .* is not known"):
        engine.install()


# --- what may be asked for ------------------------------------------------------------------------------------------


def test_device_maps_are_parsed_and_nonsense_is_refused() -> None:
    assert options.parse_device_map("1_0_1, 2_0_2") == (DevicePair(1, 0, 1), DevicePair(2, 0, 2))
    assert options.parse_device_map(None) == options.parse_device_map("") == ()
    assert options.parse_devices("0, 3") == (0, 3)
    assert options.parse_devices(None) is None
    for nonsense in ("1_0", "a_b_c", "1_0_1;2_0_2", "1_0_-1", "1_0_1,,"):
        with pytest.raises(ArgumentError, match="--cuda-device-map takes"):
            options.parse_device_map(nonsense)
    with pytest.raises(ArgumentError, match="two partners at node 1"):
        options.parse_device_map("1_0_0,1_0_1")
    for nonsense in ("a", "0;1", "-1"):
        with pytest.raises(ArgumentError, match="--local-cuda-devices takes numbers"):
            options.parse_devices(nonsense)
    with pytest.raises(ArgumentError, match="twice"):
        options.parse_devices("1,1")


def test_devices_that_are_not_there_are_an_error_and_not_a_slow_path() -> None:
    pair = (DevicePair(1, 1, 0),)
    assert not options.check_devices(None, None, (), 8)
    assert options.check_devices(True, None, (), 1)
    assert options.check_devices(None, (0, 1), pair, 2)
    with pytest.raises(TransportError, match="no CUDA device here"):
        options.check_devices(True, None, (), 0)
    with pytest.raises(TransportError, match="no CUDA device here"):
        options.check_devices(None, None, pair, 0)
    with pytest.raises(TransportError, match="no CUDA device 3"):
        options.check_devices(True, (3,), (), 2)
    with pytest.raises(TransportError, match="CUDA_VISIBLE_DEVICES=0"):
        options.check_devices(True, (0,), (), 2)
    with pytest.raises(ArgumentError, match="not among those of this process"):
        options.check_devices(True, (0,), pair, 1)
    with pytest.raises(ArgumentError, match="through the CPU"):
        options.check_devices(False, (0,), (), 2)
    with pytest.raises(ArgumentError, match=r"mq_type is one of .*, found 'pigeon'"):
        options.check_mq_type("pigeon")


def test_places_to_attach_to_are_told_apart() -> None:
    assert parse_contact(" tcp://10.0.0.1:50515 ").address() == "id=any;tcp=10.0.0.1:50515"
    assert parse_contact("ipc:///nowhere/at/all").address() is None
    with pytest.raises(ArgumentError, match="give --init-method"):
        parse_contact("0_0_0")
    for nonsense in ("", "tcp://host", "ipc://", "udp://a:1", "tcp://a:b"):
        with pytest.raises(ArgumentError, match="attach_to takes"):
            parse_contact(nonsense)


def test_the_secret_may_stand_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("sesame\n")
    file.chmod(0o600)
    assert options.cluster_secret({"GEARTRAIN_SECRET_FILE": str(file)}) == b"sesame"
    assert options.cluster_secret({"GEARTRAIN_SECRET": "a", "GEARTRAIN_SECRET_FILE": "b"}) == b"a"
    assert options.cluster_secret({}) == b""
    file.chmod(0o640)
    with pytest.raises(UntrustedPeerError, match="chmod 600"):
        options.cluster_secret({"GEARTRAIN_SECRET_FILE": str(file)})
    with pytest.raises(UntrustedPeerError, match="cannot be read"):
        options.cluster_secret({"GEARTRAIN_SECRET_FILE": str(tmp_path / "none")})
    assert "sesame" not in repr(QueueOptions(secret=b"sesame"))


logging.getLogger("geartrain.di_engine").setLevel(logging.INFO)
