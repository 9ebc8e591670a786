"""Carriers of rank groups: messages between ranks over geartrain's transports; lost, late and strange peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import certificates
import numpy as np
import pytest
from deadlines import patience
from rank_carriers import Ranks, dist, on_threads, simulated_nixl

import geartrain.ranks.carrier_addresses as carrier_addresses
import geartrain.ranks.transport_carrier as transport_carrier
from geartrain.errors import ArgumentError, PeerLostError, TransportError, UntrustedPeerError, WaitTimeoutError
from geartrain.ranks.carrier import CarrierError, Cause
from geartrain.ranks.carrier_addresses import open_carrier
from geartrain.ranks.rounds_in_flight import TransportRounds
from geartrain.ranks.transport_carrier import INLINE_BYTES, TransportCarrier
from geartrain.transport.connection import connect
from geartrain.transport.tls import TLS


@pytest.fixture(autouse=True)
def nixl_is_simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from simulated_nixl(monkeypatch)


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(size: int, transport: str | None = None) -> Ranks:
        made.append(Ranks(size, transport))
        return made[-1]

    yield make
    for each in made:
        for carrier in each.carriers:
            carrier.close()


def bytes_of(sender: int, receiver: int, nbytes: int) -> Any:
    return np.resize(np.arange(sender, 251 + receiver, dtype=np.uint8), nbytes)


def error_of(found: object) -> CarrierError:
    assert isinstance(found, CarrierError), found
    return found


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "nixl"])
def test_messages_of_all_sizes_arrive_in_order(ranks: Callable[..., Ranks], transport: str) -> None:
    group, size = ranks(3, transport), 3
    # Up to what is sent in the ring, the first byte beyond, what is received as a view, and what no socket holds.
    most = 9 << 20 if transport in ("tcp", "nixl") else 1 << 20
    for number, sizes in enumerate([[1], [7, 5, INLINE_BYTES - 12], [INLINE_BYTES, 1], [600_000, 3, 70_000], [most]]):
        received = {
            (peer, rank): [np.zeros(nbytes, np.uint8) for nbytes in sizes]
            for rank in range(size)
            for peer in range(size)
            if peer != rank
        }

        def all_to_all(rank: int, sizes: Any = sizes, received: Any = received) -> tuple[Any, Any]:
            others = [peer for peer in range(size) if peer != rank]
            sends = [(peer, bytes_of(rank, peer, nbytes)) for nbytes in sizes for peer in others]
            return sends, [(peer, received[peer, rank][i]) for i in range(len(sizes)) for peer in others]

        assert group.exchange(all_to_all, number) == [None] * size
        for (sender, receiver), arrays in received.items():
            for array, nbytes in zip(arrays, sizes, strict=True):
                assert (array == bytes_of(sender, receiver, nbytes)).all()
    assert [carrier.peers() for carrier in group.carriers] == [{transport: size - 1}] * size


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("nbytes", [1, INLINE_BYTES + 1], ids=["short", "long"])
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_dies_is_named_while_another_one_is_waited_for(
    ranks: Callable[..., Ranks], transport: str, nbytes: int, dead: int
) -> None:
    group = ranks(3, transport)
    parts = [np.zeros(nbytes, np.uint8)] * 3
    until_s = time.monotonic() + patience(30)
    numbers = [each.rounds.begin() for each in group.carriers]
    first = on_threads(3, lambda rank: group.carriers[rank].all_to_all(numbers[rank], parts, until_s))
    assert all(isinstance(found, list) for found in first), first
    waits = (dead + 2) % 3  # for rank dead + 1 first, which is alive and late
    timer = threading.Timer(0.1, group.carriers[dead].close)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(CarrierError) as raised:
        group.carriers[waits].all_to_all(group.carriers[waits].rounds.begin(), parts, until_s)
    timer.join()
    assert (raised.value.peer, raised.value.cause) == (dead, Cause.lost)
    assert time.monotonic() - began_s < patience(5)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["rounds", "exchange"])
def test_a_send_to_a_rank_that_left_because_of_another_one_names_that_one(
    ranks: Callable[..., Ranks], transport: str, way: str
) -> None:
    group = ranks(3, transport)
    sender, leaver, _ = group.carriers
    part = np.zeros(1 if way == "rounds" else INLINE_BYTES + 1, np.uint8)
    until_s = time.monotonic() + patience(30)
    numbers = [each.rounds.begin() for each in group.carriers]
    found = on_threads(3, lambda rank: group.carriers[rank].all_to_all(numbers[rank], [part] * 3, until_s))
    assert all(isinstance(each, list) for each in found), found
    leaver.close("rank 2 was lost: its connection closed")

    def send() -> None:
        number = sender.rounds.begin()
        if way == "exchange":
            return sender.exchange(number, [(1, part)], [], until_s)
        try:
            return sender.rounds.send(number, [(1, part)], patience(30))
        except PeerLostError as error:
            raise sender.error_of_round(error) from error

    with pytest.raises(CarrierError) as raised:
        while time.monotonic() < until_s:  # a socket may take some for a peer that is gone
            send()
            time.sleep(0.001)
    assert (raised.value.peer, raised.value.cause) == (1, Cause.told)
    assert raised.value.detail == "rank 2 was lost: its connection closed"


@pytest.mark.parametrize("nbytes", [1, INLINE_BYTES + 1], ids=["short", "long"])
def test_a_rank_that_has_sent_its_part_may_leave_before_a_late_one_comes(
    ranks: Callable[..., Ranks], nbytes: int
) -> None:
    group = ranks(3, "tcp")
    parts = [np.zeros(nbytes, np.uint8)] * 3
    until_s = time.monotonic() + patience(30)
    numbers = [[each.rounds.begin() for each in group.carriers] for _ in range(2)]
    for number, late_s in zip(numbers, (0.0, 1.2), strict=True):

        def take_part(rank: int, number: list[int] = number, late_s: float = late_s) -> list[Any]:
            if rank == 2 and late_s:  # sends to rank 1 long before it sends to rank 0
                carrier = group.carriers[2]
                carrier.send(number[2], 1, [parts[1]], until_s)
                time.sleep(late_s)
                carrier.send(number[2], 0, [parts[0]], until_s)
                return []
            found = group.carriers[rank].all_to_all(number[rank], parts, until_s)
            if late_s and rank == 1:
                group.carriers[1].close()
            return found

        found = on_threads(3, take_part)
        assert [len(each) if isinstance(each, list) else each for each in found[:2]] == [3, 3]


def test_ranks_connect_with_those_they_have_messages_for(ranks: Callable[..., Ranks]) -> None:
    group = ranks(4)
    into = np.zeros(2, np.uint8)
    from_to = {0: ([(3, np.array([4, 2], np.uint8))], []), 3: ([], [(0, into)])}
    assert group.exchange(lambda rank: from_to.get(rank, ([], []))) == [None] * 4
    assert into.tolist() == [4, 2]
    assert [sum(carrier.peers().values()) for carrier in group.carriers] == [1, 0, 0, 1]


def test_a_rank_that_leaves_is_lost_to_all_that_wait_for_it_or_for_one_that_comes_late(
    ranks: Callable[..., Ranks],
) -> None:
    group, size = ranks(3), 3

    def ring(rank: int) -> tuple[Any, Any]:
        others = [peer for peer in range(size) if peer != rank]
        return [(p, np.ones(1, np.uint8)) for p in others], [(p, np.zeros(1, np.uint8)) for p in others]

    assert group.exchange(ring) == [None] * size
    began_s = time.monotonic()

    def body(rank: int) -> None:
        if rank == 2:
            group.carriers[2].close()
        elif rank == 0:  # it waits for rank 1, which never sends, and is told that rank 2 is gone
            receives = [(1, np.zeros(1, np.uint8)), (2, np.zeros(1, np.uint8))]
            group.carriers[0].exchange(2, [], receives, time.monotonic() + 60)
        else:
            group.carriers[1].exchange(2, [], [(2, np.zeros(1, np.uint8))], time.monotonic() + 60)

    found = on_threads(size, body)
    assert time.monotonic() - began_s < patience(10)
    for rank in (0, 1):
        assert (error_of(found[rank]).peer, error_of(found[rank]).cause) == (2, Cause.lost)


def test_a_rank_that_does_not_answer_is_named_at_the_deadline(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    assert group.exchange(lambda rank: ([(1 - rank, np.ones(1, np.uint8))], [])) == [None, None]
    began_s = time.monotonic()
    with pytest.raises(CarrierError) as error:
        # Its byte of exchange 1 is there, and is none of this one.
        group.carriers[0].exchange(2, [], [(1, np.zeros(1, np.uint8))], time.monotonic() + 0.1)
    assert error.value.cause is Cause.refused and "is at its exchange 1" in error.value.detail
    with pytest.raises(CarrierError) as error:
        group.carriers[0].exchange(3, [], [(1, np.zeros(1, np.uint8))], time.monotonic() + 0.1)
    assert (error.value.peer, error.value.cause) == (1, Cause.timed_out)
    assert 0.1 <= time.monotonic() - began_s < patience(5)


def test_a_message_of_another_size_is_refused(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    found = group.exchange(
        lambda rank: ([(1, np.ones(5, np.uint8))], []) if rank == 0 else ([], [(0, np.zeros(6, np.uint8))])
    )
    assert found[0] is None
    assert (
        error_of(found[1]).cause is Cause.refused and "sent 5 bytes where 6 were expected" in error_of(found[1]).detail
    )


def test_strangers_are_refused_and_disturb_nobody(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    address = group.store.get("address/0").decode()
    for secret in (b"", b"another"):
        with pytest.raises(UntrustedPeerError):
            connect(address, secret=secret, timeout_s=patience(10))
    # Who knows the key and says no rank, or one that cannot dial this one, is hung up on.
    key = bytes(group.store.get("key"))
    for hello in (b"", b"garbage", transport_carrier.HELLO.pack(transport_carrier.MAGIC, 0)):
        stranger = connect(address, secret=key, timeout_s=patience(10))
        stranger.send(hello)
    into = [np.zeros(1, np.uint8), np.zeros(1, np.uint8)]
    found = group.exchange(lambda rank: ([(1 - rank, np.full(1, rank, np.uint8))], [(1 - rank, into[rank])]))
    assert found == [None, None] and [int(each[0]) for each in into] == [1, 0]


def test_close_ends_an_exchange_that_waits_and_one_that_waits_for_a_connection(ranks: Callable[..., Ranks]) -> None:
    for connected in (False, True):
        group = ranks(2)
        if connected:
            assert group.exchange(lambda rank: ([(1 - rank, np.ones(1, np.uint8))], [])) == [None, None]
            group.carriers[0].exchange(1, [], [(1, np.zeros(1, np.uint8))], time.monotonic() + patience(10))
        waiting = threading.Event()

        def body(rank: int, group: Ranks = group, waiting: threading.Event = waiting) -> None:
            if rank == 1:
                waiting.wait()
                group.carriers[0].close()
                return
            waiting.set()
            group.carriers[0].exchange(2, [], [(1, np.zeros(1, np.uint8))], time.monotonic() + 1000)

        found = on_threads(2, body)
        assert found[1] is None and error_of(found[0]).cause is Cause.left


def test_a_rank_that_failed_before_it_connected_is_lost(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2)
    group.failed.set()
    with pytest.raises(CarrierError) as error:
        group.carriers[0].exchange(1, [], [(1, np.zeros(1, np.uint8))], time.monotonic() + 1000)
    assert (error.value.peer, error.value.cause) == (1, Cause.lost)
    group.carriers[0].close()
    with pytest.raises(CarrierError) as error:  # and so is one that has closed its listener
        group.carriers[1].exchange(1, [], [(0, np.zeros(1, np.uint8))], time.monotonic() + patience(20))
    assert (error.value.peer, error.value.cause) == (0, Cause.lost)


def test_no_rank_uses_the_transports_when_one_cannot_and_all_say_why() -> None:
    store = dist.HashStore()
    refusals = [None, "no sockets here", None]
    found = on_threads(3, lambda rank: open_carrier(store, rank, 3, patience(20), lambda: False, refuse=refusals[rank]))
    assert found == ["rank 1: no sockets here"] * 3


def test_a_group_with_tls_has_no_other_carrier(monkeypatch: pytest.MonkeyPatch, loopback: TLS) -> None:
    for name, value in {**certificates.environment(loopback), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    # One that has TLS, and one that cannot use the transports and asks for none.
    store = dist.HashStore()
    store.set("address/1", f"{carrier_addresses.NOT_VIABLE}no sockets here")
    store.set("known/1", "")
    with pytest.raises(ArgumentError, match=r"rank 0 of the group asks for TLS .* rank 1 cannot .*: no sockets here"):
        open_carrier(store, 0, 2, patience(20), lambda: False)
    # With TLS on all of them they exchange messages.
    group = Ranks(2, "tcp")
    into = [np.zeros(1, np.uint8), np.zeros(1, np.uint8)]
    found = group.exchange(lambda rank: ([(1 - rank, np.full(1, rank, np.uint8))], [(1 - rank, into[rank])]))
    assert found == [None, None] and [int(each[0]) for each in into] == [1, 0]
    for carrier in group.carriers:
        carrier.close()

    def fails(*arguments: Any, **options: Any) -> Any:
        raise TransportError("OpenSSL 3 is not installed")

    monkeypatch.setattr(carrier_addresses, "listen", fails)
    store = dist.HashStore()
    for each in on_threads(2, lambda rank: open_carrier(store, rank, 2, patience(20), lambda: False)):
        assert isinstance(each, ArgumentError) and "rank 0 of the group" in str(each) and "OpenSSL 3" in str(each)


def test_ranks_that_do_not_join_are_named() -> None:
    store = dist.HashStore()
    found = on_threads(2, lambda rank: open_carrier(store, rank, 4, 0.2, lambda: False))
    for each in found:
        assert isinstance(each, WaitTimeoutError) and "[2, 3]" in str(each)


def test_the_interface_of_gloos_variable_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = Ranks(2)
    assert "127.0.0.1:" in group.store.get("address/1").decode()
    for carrier in group.carriers:
        carrier.close()


@pytest.mark.parametrize("interface", ["eth-none", "lo" + 20 * "o"])
def test_an_interface_that_is_not_there_is_an_error_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, interface: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    store = dist.HashStore()
    for each in on_threads(2, lambda rank: open_carrier(store, rank, 2, patience(20), lambda: False)):
        assert isinstance(each, ArgumentError), each
        assert f"rank 0 of the group cannot take part: GLOO_SOCKET_IFNAME names '{interface}'" in str(each)


@pytest.mark.parametrize("transport", ["inproc", "tcp"])
def test_an_all_to_all_carries_sizes_that_only_senders_know(ranks: Callable[..., Ranks], transport: str) -> None:
    group, size = ranks(3, transport), 3
    for number, most in enumerate([0, 1, 9 << 20 if transport == "tcp" else 1 << 20]):
        found = on_threads(
            size,
            lambda rank, number=number, most=most: group.carriers[rank].all_to_all(
                number,
                [bytes_of(rank, peer, most * (rank + peer) // 2) for peer in range(size)],
                time.monotonic() + patience(20),
            ),
        )
        for rank, parts in enumerate(found):
            assert isinstance(parts, list), parts
            for peer, part in enumerate(parts):
                assert np.array_equal(part, bytes_of(peer, rank, most * (rank + peer) // 2))


class BareGroup:
    """As much of a group as its rounds need."""

    def __init__(self, rank: int, carrier: TransportCarrier, size: int) -> None:
        self.rank, self.size, self.timeout_s = rank, size, patience(20)
        self.native_rounds = carrier.rounds
        self.carrier = carrier

    def check_usable(self) -> None:
        pass

    def round_failed(self, error: Any) -> None:
        raise self.carrier.error_of_round(error)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_rounds_are_begun_before_others_are_received_however_long_their_messages_are(
    ranks: Callable[..., Ranks], transport: str
) -> None:
    group, size = ranks(3, transport), 3
    most = 9 << 20 if transport == "tcp" else 1 << 20  # what no socket holds
    everyone = [(peer, np.ones(1, np.uint8)) for peer in range(size)]
    sizes = [100, most, 5, INLINE_BYTES + 1, 0]

    def body(rank: int) -> None:
        others = [peer for peer in range(size) if peer != rank]
        ones = [each for each in everyone if each[0] != rank]
        into = [(peer, np.zeros(1, np.uint8)) for peer in others]
        group.carriers[rank].exchange(group.carriers[rank].rounds.begin(), ones, into, time.monotonic() + patience(20))
        bare: Any = BareGroup(rank, group.carriers[rank], size)
        rounds = TransportRounds(bare)
        numbers = []
        for nbytes in sizes:  # all of them at once, and the last one for the next rank alone
            to = others if nbytes else [(rank + 1) % size]
            numbers.append(rounds.post({peer: bytes_of(rank, peer, nbytes or 7) for peer in to}))
        for number, nbytes in zip(numbers, sizes, strict=True):
            of = others if nbytes else [(rank - 1) % size]
            until_s = time.monotonic() + patience(20)
            while nbytes != 5 and not rounds.arrived(number, of):
                assert time.monotonic() < until_s
            found = rounds.collect(number, of)
            assert sorted(found) == of
            for peer, part in found.items():
                assert np.array_equal(part, bytes_of(peer, rank, nbytes or 7))
        rounds.flush()

    assert on_threads(size, body) == [None] * size


def test_a_round_of_a_rank_that_is_lost_names_it(ranks: Callable[..., Ranks]) -> None:
    group = ranks(2, "tcp")
    assert group.exchange(lambda rank: ([(1 - rank, np.ones(1, np.uint8))], [(1 - rank, np.zeros(1, np.uint8))])) == [
        None,
        None,
    ]
    bare: Any = BareGroup(0, group.carriers[0], 2)
    rounds = TransportRounds(bare)
    number = rounds.post({1: np.zeros(9 << 20, np.uint8)})  # which waits for rank 1 to receive it
    group.carriers[1].close()
    with pytest.raises(CarrierError) as error:
        rounds.collect(number, [1])
    assert (error.value.peer, error.value.cause) == (1, Cause.lost)
    rounds.flush()


def test_a_round_is_waited_for_as_long_as_the_group_says_however_often_it_is_asked_after(
    ranks: Callable[..., Ranks],
) -> None:
    group = ranks(2, "tcp")
    one = np.ones(1, np.uint8)
    group.exchange(lambda rank: ([(1 - rank, one)], [(1 - rank, np.zeros(1, np.uint8))]))
    bare: Any = BareGroup(0, group.carriers[0], 2)
    bare.timeout_s = 0.3
    rounds = TransportRounds(bare)
    first, second = rounds.post({1: one}), rounds.post({1: one})
    assert not rounds.arrived(first, [1])
    group.carriers[1].exchange(first, [(0, one)], [], time.monotonic() + patience(10))
    assert (rounds.collect(first, [1])[1] == one).all()
    began_s = time.monotonic()
    with pytest.raises(CarrierError) as error:
        while not rounds.arrived(second, [1]):
            pass
    assert 0.3 <= time.monotonic() - began_s < patience(2)
    assert (error.value.peer, error.value.cause) == (1, Cause.timed_out)


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
def test_a_rank_that_leaves_tells_why(ranks: Callable[..., Ranks], transport: str) -> None:
    group = ranks(2, transport)
    into = np.zeros(1, np.uint8)
    assert group.exchange(lambda rank: ([(1 - rank, np.ones(1, np.uint8))], [])) == [None, None]
    group.carriers[1].close("its disk is full")
    group.carriers[1].close("said twice")
    group.carriers[0].exchange(1, [], [(1, into)], time.monotonic() + patience(10))  # what it had sent is still there
    assert into[0] == 1
    with pytest.raises(CarrierError) as error:
        group.carriers[0].exchange(2, [], [(1, into)], time.monotonic() + 1000)
    assert (error.value.cause, error.value.detail) == (Cause.told, "its disk is full")
