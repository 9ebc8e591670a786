"""`TorchRankGroup`: the rank group of a `torch.distributed` job.

It has connections of its own (carrier.py). The job's key-value store keeps the reason of a failure, so that all ranks
report the same one.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from geartrain.core.arguments import check_choice
from geartrain.core.extras import require_torch
from geartrain.core.threads import DaemonThread
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError, WaitTimeoutError
from geartrain.ranks.carrier import MAX_MESSAGES, Bytes, Carrier, CarrierError, Cause, Message
from geartrain.ranks.gloo_carrier import GlooCarrier
from geartrain.ranks.rank_collectives import (
    RADIX,
    all_gather_bruck,
    all_gather_object,
    all_to_all_of_known_sizes,
)
from geartrain.ranks.rank_group import RankGroup

if TYPE_CHECKING:  # the network is loaded by the group that uses it
    import geartrain._native as _native
    from geartrain.ranks.transport_carrier import TransportCarrier

#: What `GEARTRAIN_RANK_CARRIER` may say, besides the name of a one-sided backend.
CARRIERS = ("auto", "tcp", "gloo")
# Longest wait for the key-value store when the reason of a failure is read or written.
NOTE_S = 2.0

T = TypeVar("T")

# Number of groups made so far, by their members; equal on all of them.
_groups_made: Counter[tuple[int, ...]] = Counter()


class TorchRankGroup:
    """A `RankGroup` over some or all ranks of a `torch.distributed` job.

    Ranks of one host exchange messages through shared memory, ranks of different hosts over TCP (transport_carrier.py).
    If a rank cannot use these transports, all ranks use Gloo (gloo_carrier.py). A rank that has not asked for Gloo then
    warns. `repr` shows the carrier in use, and why.

    The environment variable `GEARTRAIN_RANK_CARRIER` selects the carrier, the same on all ranks:

    - "auto", the default;
    - "tcp": no shared memory;
    - "gloo": all ranks use Gloo, even if only one rank asks for it;
    - a backend of `geartrain.transport.one_sided`: large messages between hosts by RDMA (one_sided_carrier.py).

    Gloo and the backends have no TLS. If a rank asks for TLS (`GEARTRAIN_TLS_CERT` and the others), all ranks raise.

    Args:
        members: global ranks; their order gives the ranks in this group. This process must be one of them, and all of
            them construct the group at the same point of the program.
        timeout_s: timeout of each collective.

    Attributes:
        native_rounds: rounds of the transports, for native code that exchanges small messages; None with Gloo.
        timeout_s: see above.

    Raises:
        ArgumentError: there is no process group, this rank is not a member, or `GEARTRAIN_RANK_CARRIER` has another
            value. Raised on all ranks if the settings of one cannot be used: certificates, TLS over Gloo or a
            backend, a backend that does not work or that only some ranks ask for, or a missing interface in
            `GLOO_SOCKET_IFNAME`.
        PeerLostError: not all members joined in time.
    """

    def __init__(self, members: Sequence[int], timeout_s: float = 60.0) -> None:
        require_torch("a group of ranks")
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "a replay over several ranks needs torch.distributed: start the script with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        here = dist.get_rank()
        self._members = list(members)
        if here not in self._members:
            raise ArgumentError(f"rank {here} is not a member of the group {self._members}")
        self.rank = self._members.index(here)
        self.size = len(self._members)
        self.native_rounds: _native.RankRounds | None = None
        self.timeout_s = timeout_s
        self._sent_bytes = 0  # besides those of native rounds
        self._sent_messages = 0
        self._calls = 0  # where there are none
        self._broken: str | None = None
        self._pid = os.getpid()
        self._why_gloo = ""
        self._carrier: Carrier | None = None
        self._transports: TransportCarrier | None = None  # the carrier, where it is this one
        wanted = os.environ.get("GEARTRAIN_RANK_CARRIER", "auto")
        backend = None
        if wanted not in CARRIERS:
            from geartrain.transport import one_sided

            backend = check_choice("GEARTRAIN_RANK_CARRIER", wanted, (*CARRIERS, *one_sided.names()))
        # torch names a group by the number of groups the process has made, which may differ between ranks, and uses a
        # name again once its group is destroyed. These names are unique for the life of the job. (torchrun's restart
        # count is of no use: hosts that restart because another host did count differently.)
        key = tuple(self._members)
        name = f"geartrain/{zlib.crc32(repr(key).encode()):08x}/{_groups_made[key]}"
        _groups_made[key] += 1
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            name, dist.distributed_c10d._get_default_store()
        )
        if self.size > 1:
            self._open(wanted, backend)

    def _open(self, wanted: str, backend: str | None) -> None:
        from geartrain.ranks.carrier_addresses import open_carrier

        try:
            opened = open_carrier(
                self._store,
                self.rank,
                self.size,
                self.timeout_s,
                self._is_broken,
                transport="tcp" if wanted == "tcp" else None,
                refuse="GEARTRAIN_RANK_CARRIER says gloo" if wanted == "gloo" else None,
                backend=backend,
            )
            if isinstance(opened, str):
                self._why_gloo = opened
                if wanted != "gloo":
                    warnings.warn(
                        f"the ranks exchange rows over Gloo, which is slower, because of {opened}",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                self._carrier = GlooCarrier(self._store, self.rank, self.size, self.timeout_s)
            else:
                self._carrier = self._transports = opened
                self.native_rounds = opened.rounds
            self.all_gather(np.zeros(1, np.uint8))  # all of them reach those they have most to do with
        except (RuntimeError, WaitTimeoutError) as error:
            which = f": missing are {error}" if isinstance(error, WaitTimeoutError) else f": {error}"
            raise PeerLostError(
                f"ranks {self._members} did not all join within {self.timeout_s} s{which}{_restart_hint()}"
            ) from error

    @property
    def sent_bytes(self) -> int:
        rounds = self.native_rounds
        return self._sent_bytes + (0 if rounds is None else rounds.sent_bytes)

    @property
    def sent_messages(self) -> int:
        rounds = self.native_rounds
        return self._sent_messages + (0 if rounds is None else rounds.sent_messages)

    def all_gather(self, mine: Bytes) -> Bytes:
        if self.size > RADIX or self._transports is None:
            return all_gather_bruck(self, mine)
        parts = self.all_to_all([mine] * self.size)
        gathered = np.empty((self.size, mine.size), np.uint8)
        for rank, part in enumerate(parts):
            if part.size != mine.size:
                detail = f"sent {part.size} bytes to an all-gather of {mine.size}"
                self._lost(CarrierError(rank, Cause.refused, detail))
            gathered[rank] = part
        return gathered

    def all_gather_object(self, mine: Any) -> list[Any]:
        return all_gather_object(self, mine)

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        self.check_usable()
        carrier = self._transports
        if carrier is None:
            return all_to_all_of_known_sizes(self, parts)
        number = carrier.rounds.begin()
        if not carrier.rounds.carries(max(part.size for part in parts)):
            self._sent_bytes += sum(part.size for part in parts) - parts[self.rank].size
            self._sent_messages += self.size - 1
        try:
            return carrier.all_to_all(number, parts, time.monotonic() + self.timeout_s)
        except CarrierError as error:
            self._lost(error)
        except GeartrainError as error:  # no more threads to send with
            self.abort(str(error))
            raise

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.check_usable()
        for messages in (sends, receives):
            if len(messages) > MAX_MESSAGES and max(Counter(peer for peer, _ in messages).values()) > MAX_MESSAGES:
                raise ArgumentError(f"one exchange takes at most {MAX_MESSAGES} messages a peer")
        number = self._next_number()
        sends = [message for message in sends if message[1].size]
        receives = [message for message in receives if message[1].size]
        carrier = self._carrier
        if carrier is None or not (sends or receives):
            return
        self._sent_bytes += sum(array.size for _, array in sends)
        self._sent_messages += len({peer for peer, _ in sends})
        try:
            carrier.exchange(number, sends, receives, time.monotonic() + self.timeout_s)
        except CarrierError as error:
            self._lost(error)
        except GeartrainError as error:  # no more threads to send with
            self.abort(str(error))
            raise

    def _next_number(self) -> int:
        """The number of an exchange, equal on all ranks."""
        if self.native_rounds is not None:
            return self.native_rounds.begin()
        self._calls += 1
        return self._calls

    def check_usable(self) -> None:
        """Raises `PeerLostError` where this rank has left the group, or is the child of one that is in it."""
        if os.getpid() != self._pid:
            raise PeerLostError("a rank group belongs to the process that made it: this one was forked from it")
        if self._broken is not None:
            raise PeerLostError(self._broken)

    def round_failed(self, error: GeartrainError) -> NoReturn:
        """Raises what an error of native code that uses `native_rounds` means: the error itself, or `PeerLostError`."""
        if self._transports is None:
            raise error
        self._lost(self._transports.error_of_round(error))

    def peers(self) -> dict[str, int]:
        return {} if self._carrier is None else self._carrier.peers()

    def shm_peers(self) -> set[int]:
        """Of those that it is connected with by now."""
        return set() if self._transports is None else self._transports.shm_peers()

    def check_peers(self) -> None:
        """Over Gloo no rank is known to be gone before a call fails."""
        self.check_usable()
        for peer in sorted(self._transports.lost_peers()) if self._transports is not None else ():
            self._lost(CarrierError(peer, Cause.lost))

    def abort(self, reason: str) -> None:
        if self._broken is None:
            self._broken = self._leave_note(f"rank {self._members[self.rank]} aborted: {reason}")
            self._leave(self._broken)
        self.close()

    def close(self) -> None:
        if self._broken is None:
            self._broken = "this rank has left the group"
        self._leave("")

    def _leave(self, reason: str) -> None:
        if self._carrier is not None and os.getpid() == self._pid:
            self._carrier.close(reason)  # its connections, which the other ranks notice

    def __repr__(self) -> str:
        ways = ", ".join(f"{count} by {name}" for name, count in self.peers().items()) or "none yet"
        why = f" (Gloo, because {self._why_gloo})" if self._why_gloo else ""
        return f"<TorchRankGroup rank {self.rank} of {self.size}, peers: {ways}{why}>"

    def _lost(self, error: CarrierError) -> NoReturn:
        if error.cause is Cause.left:
            raise PeerLostError(self._broken or "this rank has left the group") from error
        who = f"rank {self._members[error.peer]}"
        if error.cause is Cause.told:
            self._broken = error.detail
            self._leave(error.detail)
            raise PeerLostError(f"{error.detail} [told by {who}]") from error
        found = {
            Cause.timed_out: f"{who} did not answer within {self.timeout_s} s",
            Cause.lost: f"{who} was lost: its connection closed. It ended, or closed its replay before this rank did",
            Cause.refused: f"{who} {error.detail}",
        }[error.cause]
        note = self._leave_note(found)
        self._broken = note if note == found else f"{note} (noticed as: {found})"
        self._leave(note)
        raise PeerLostError(self._broken) from error

    def _leave_note(self, note: str) -> str:
        """Writes the reason for the other ranks, and returns the one that was written first."""
        if os.getpid() != self._pid:
            return note  # a forked child shares the store's connection with its parent, which goes on
        return _asked(lambda: str(self._store.compare_set("lost", "", note).decode()), note)

    def _is_broken(self) -> bool:
        """Whether another rank has written a reason."""
        return _asked(lambda: bool(self._store.check(["lost"])), False)


def _asked(ask: Callable[[], T], otherwise: T) -> T:
    """An answer of the key-value store, which may be lost with the rank that served it, and has a longer timeout."""
    answers = [otherwise]

    def run() -> None:
        answers.append(ask())

    thread = DaemonThread(_quietly, "geartrain-note", (run,))
    with contextlib.suppress(GeartrainError):  # no more threads
        thread.start()
        thread.join(NOTE_S)
    return answers[-1]


def as_rank_group(group: Any, members: Sequence[int], timeout_s: float) -> RankGroup:
    """The group itself where it is a `RankGroup`, else a new `TorchRankGroup` of the members. Collective."""
    if group is not None and hasattr(group, "exchange"):
        ranks: RankGroup = group
        return ranks
    return TorchRankGroup(members, timeout_s)


def _restart_hint() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return ""
    return (
        " (if torchrun has restarted this job, ranks may read addresses of the run before the restart, unless it is "
        "started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d)"
    )


def _quietly(body: Any) -> None:
    try:
        body()
    except Exception:  # the reason is for error texts only
        return


__all__ = ["NOTE_S", "TorchRankGroup", "as_rank_group"]
