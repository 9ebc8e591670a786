"""TLS over TCP, between programs: what it takes, what it says, and what happens where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import certificates
import numpy as np
import pytest
from deadlines import patience

import geartrain.transport.connection as transport
from geartrain import rpc
from geartrain.errors import ArgumentError, TransportError, UntrustedPeerError, WaitTimeoutError
from geartrain.transport.tls import TLS, VARIABLES


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_everything_over_tcp_is_under_tls_and_shared_memory_is_as_ever(loopback: TLS) -> None:
    with transport.listen(tls=loopback) as listener:
        with transport.connect(listener.address, transport="tcp", tls=loopback) as mine:
            theirs = listener.accept()
            assert mine.tls == theirs.tls
            assert mine.tls.startswith("TLSv1.3 TLS_AES_")
            assert mine.tls in mine.describe()
            array = np.arange(3_000_000)
            sender = threading.Thread(target=theirs.send, args=(b"big", [array]))
            sender.start()
            assert (mine.receive().buffers[0].view(array.dtype) == array).all()
            sender.join()
            assert mine.counts()["bytes_received"]["lanes"] == array.nbytes + 3
            into = np.empty(1000, array.dtype)
            with theirs.expose(array) as region:
                mine.read(region.handle, into, offset=8 * 500)
            assert (into == array[500:1500]).all()
        for name in ("inproc", "shm"):
            with transport.connect(listener.address, transport=name) as plain:
                assert (plain.transport, plain.tls) == (name, "")


def test_one_side_without_tls_is_told_so_and_the_other_side_as_well(loopback: TLS) -> None:
    with transport.listen(tls=loopback) as listener:
        with pytest.raises(UntrustedPeerError, match="it asks for TLS, and none was given here"):
            transport.connect(listener.address, transport="tcp", tls=False)
        with pytest.raises(WaitTimeoutError, match="refused so far: 1, the last one because it came without TLS"):
            listener.accept(timeout_s=0.1)
        assert (listener.refused, listener.refusal) == (1, "it came without TLS")
    with transport.listen() as listener:
        with pytest.raises(UntrustedPeerError, match="the peer uses no TLS, and it was asked for here"):
            transport.connect(listener.address, transport="tcp", tls=loopback)
        with pytest.raises(WaitTimeoutError, match="it asks for TLS, and none is used here"):
            listener.accept(timeout_s=0.1)


def test_a_dialer_with_tls_is_told_at_once_by_whatever_uses_none(loopback: TLS) -> None:
    """Whatever the answer races with; a listener whose places are taken says it as well."""
    with transport.listen(limits=transport.MessageLimits(max_pending=1)) as listener:
        for _ in range(30):
            with pytest.raises(UntrustedPeerError, match="the peer uses no TLS"):
                transport.connect(listener.address, transport="tcp", tls=loopback, timeout_s=patience(600))


def test_another_authority_and_another_name_are_refused(loopback: TLS, tmp_path: Path) -> None:
    stranger = certificates.Authority(tmp_path).sign("stranger", "IP:127.0.0.1")
    strict = TLS(loopback.certificate, loopback.key, loopback.ca, name="learner.cluster")
    with transport.listen(tls=loopback) as listener:
        for wrong, why in ((stranger, "another authority signed it"), (strict, "it is not for learner.cluster")):
            with pytest.raises(UntrustedPeerError, match=f"the peer's certificate is refused: {why}"):
                transport.connect(listener.address, transport="tcp", tls=wrong)
        spy = TLS(stranger.certificate, stranger.key, loopback.ca)
        with pytest.raises(UntrustedPeerError, match="the peer refuses this side's certificate: another authority"):
            transport.connect(listener.address, transport="tcp", tls=spy)


def test_the_environment_turns_it_on_for_nodes_as_well(loopback: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in certificates.environment(loopback).items():
        monkeypatch.setenv(variable, value)
    with rpc.Node("server", secret=b"s") as server:
        with rpc.Node("client", peers={"server": server.address}, secret=b"s", transport="tcp") as client:
            assert client.call("server", "echo_of_tls", 3) == 3
            assert "TLSv1.3" in client.connections()["server"]
        plain = {"server": server.address}
        with rpc.Node("other", peers=plain, secret=b"s", transport="tcp", tls=False) as other:
            with pytest.raises(UntrustedPeerError, match="it asks for TLS"):
                other.call("server", "echo_of_tls", 3)
    monkeypatch.delenv("GEARTRAIN_TLS_KEY")
    with pytest.raises(ArgumentError, match="GEARTRAIN_TLS_KEY is not set"):
        transport.listen()


@rpc.function
def echo_of_tls(value: int) -> int:
    return value


def test_files_that_cannot_be_used_are_errors_at_the_door(loopback: TLS, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot read the certificate '.*nowhere': No such file"):
        transport.listen(tls=TLS(tmp_path / "nowhere", loopback.key, loopback.ca))
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("hello")
    with pytest.raises(ArgumentError, match=r"cannot use the ca '.*nonsense.pem'"):
        transport.listen(tls=TLS(loopback.certificate, loopback.key, nonsense))
    with transport.listen() as listener, pytest.raises(ArgumentError, match="cannot use the certificate"):
        transport.connect(listener.address, tls=TLS(nonsense, loopback.key, loopback.ca))


WITHOUT = """
import geartrain.transport.connection as transport
from geartrain import _native
from geartrain.errors import TransportError
from geartrain.transport.tls import TLS
try:
    transport.listen(tls=TLS("a", "b", "c"))
except TransportError as error:
    print(error)
with transport.listen() as listener, transport.connect(listener.address, transport="tcp") as connection:
    print(connection.transport, _native.tls_not_viable() != "")
"""


@pytest.mark.parametrize(
    ("library", "why"),
    [
        ("", "TLS needs OpenSSL 3, and libssl.so.3 is not on this machine"),
        ("libc.so.6", "libssl.so.3 is not OpenSSL 3: it has no OPENSSL_init_ssl"),
    ],
)
def test_without_openssl_tls_says_so_and_all_else_works(library: str, why: str, tmp_path: Path) -> None:
    """The loader finds another libssl.so.3 first: an empty file, or a library without its functions."""
    found = tmp_path / "libssl.so.3"
    if library:
        loaded = Path("/proc/self/maps").read_text().split()
        found.symlink_to(next(word for word in loaded if word.endswith(f"/{library}")))
    else:
        found.write_bytes(b"")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert why in first
    assert second == "tcp True"


AT_EXIT = """
import ssl, sys
import numpy as np
import geartrain.transport.connection as transport
ssl.create_default_context()
listener = transport.listen()
kept = [transport.connect(listener.address, transport="tcp", peer_timeout_s=2) for _ in range(4)]
kept += [listener.accept() for _ in range(4)]
array = np.ones(1_000_000)
regions = [one.expose(array) for one in kept[4:]]
for mine, region in zip(kept, regions):
    mine.read(region.handle, np.empty_like(array))
import builtins
builtins.kept = kept + regions + [listener]  # until the process is gone
"""


def test_a_process_that_ends_with_open_connections_ends_well(loopback: TLS, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in certificates.environment(loopback).items():
        monkeypatch.setenv(variable, value)
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_no_certificate_has_and_a_missing_library_are_different_errors(loopback: TLS) -> None:
    with transport.listen(tls=loopback) as listener:
        elsewhere = f"id=any;tcp=localhost:{listener.address.rpartition(':')[2]}"
        with pytest.raises(UntrustedPeerError, match="it is not for localhost"):
            transport.connect(elsewhere, transport="tcp", tls=loopback)
        with pytest.raises(TransportError, match="Connection refused"):
            transport.connect("id=any;tcp=127.0.0.1:1", transport="tcp", tls=loopback)
