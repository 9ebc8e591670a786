"""Errors: operating events, and arguments that are refused.

Every class here derives from `GeartrainError`, most through `StoreError`, `ReplayError`, `PeerError` or `JobError`.
Those that report a caller's mistake also derive from the built-in that Python users expect (`ValueError`, `KeyError`,
`FileExistsError`, ...), so that code which does not know geartrain catches them.
"""

from __future__ import annotations


class GeartrainError(Exception):
    """Base of every error that geartrain raises on purpose."""


class ArgumentError(GeartrainError, ValueError):
    """An argument that cannot be used; the message says what was given, and which values are allowed."""


class StoreError(GeartrainError):
    """Base of what goes wrong with a store: its segment, its rows, its keys, its checkpoints."""


class ReplayError(GeartrainError):
    """Base of what keeps a batch from being made."""


class PeerError(GeartrainError):
    """Base of what goes wrong between processes: connections, messages, calls, collectives."""


class JobError(GeartrainError):
    """Base of what ends a job, or one of its processes."""


class SchemaError(StoreError, ArgumentError):
    """A field, dtype, shape, length or priority that the store does not hold."""


class FieldError(SchemaError, KeyError):
    """A field name that the store does not have, or a field that cannot be shown as asked."""

    def __str__(self) -> str:  # KeyError would show the repr, quotes and all
        return str(self.args[0]) if self.args else ""


class StoreExistsError(StoreError, FileExistsError):
    """A segment of that name is already there, alive or left behind."""


class StoreMissingError(StoreError, FileNotFoundError):
    """No segment of that name is on this host."""


class StaleStoreError(StoreError):
    """The segment was left by a run that has ended; joining it must be asked for (`adopt=True`)."""


class IncompatibleStoreError(StoreError):
    """The segment is not geartrain's, or has another format version, layout or schema."""


class UntrustedStoreError(StoreError, PermissionError):
    """A segment that others may write to than the caller trusts: another user's, of a wider mode, or behind a link."""


class StoreClosedError(StoreError, ValueError):
    """The handle was closed; the segment may well live on."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """The handle changes nothing: it was opened with mode="r", or is that of an imported data set."""


class StoreFullError(StoreError):
    """No block can be had: all of them are being written right now."""


class EmptyStoreError(ReplayError):
    """Nothing can be drawn: no selectable row, or none with a positive weight."""


class TurnoverError(ReplayError):
    """Rows are overwritten faster than they can be read: the store is too small for its rate of inserts."""


class NotEnoughRowsError(EmptyStoreError, ValueError):
    """More rows were asked for than are selectable."""


class EmptyBufferError(NotEnoughRowsError, RuntimeError):
    """A replay buffer that nothing was added to; a `RuntimeError` too, as its project raises there."""


class SplitGroupError(ReplayError, ValueError):
    """Over several ranks: the rows of a group that is to be drawn as a whole are in more than one shard."""


class StaleKeyError(StoreError, KeyError):
    """Keys whose rows were overwritten or removed since the keys were made."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NoSpaceError(StoreError, MemoryError):
    """The file system (most often /dev/shm) cannot hold the segment."""


class PinError(ReplayError, MemoryError):
    """Memory that a GPU is to read in place cannot be pinned; the message says what is in the way."""


class LockTimeoutError(StoreError, TimeoutError):
    """Another process held the segment's lock for longer than the deadline (stopped, perhaps)."""


class WaitTimeoutError(GeartrainError, TimeoutError):
    """A wait, such as the one for the next batch, met its deadline."""


class BuffersHeldError(WaitTimeoutError):
    """Readers hold every buffer of the weights but the newest version's, and none released one before the deadline."""


class PeerLostError(PeerError, ConnectionError):
    """A peer, or a rank of the group, is gone, hung up or did not answer in time; the message says which and why."""


class RankLostError(PeerLostError):
    """A rank of a collective group died, hung up or left; `ranks` says which, `reducers` is empty."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class ReducerLostError(PeerLostError):
    """A reducer of a collective group died or was stopped; `reducers` says which, as host:port."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class CollectiveTimeoutError(PeerError, WaitTimeoutError):
    """A collective operation was not over in time; `ranks` and `reducers` say who it waited for."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class TransportError(PeerError, OSError):
    """A way of reaching a peer that is not viable here; the message says why."""


class PeerUnreachableError(PeerLostError, TransportError):
    """Nobody answers where a peer was: it died, or was never there; the message has every transport's reason."""


class ListenerGoneError(TransportError):
    """Nobody listens at the address: its host has refused the connection."""


class UntrustedPeerError(PeerError, PermissionError):
    """The other side did not prove that it knows the secret, or something is only done between those who do."""


class MessageError(PeerError, ValueError):
    """A message that is malformed, exceeds a limit, or holds what cannot be sent."""


class DeviceError(PeerError, ValueError):
    """A tensor, or a device map, names a device that is not there or that nothing can be sent from or to."""


class ConnectionClosedError(PeerError, ValueError):
    """The connection was closed on this side, or belongs to the process that this one was forked from."""


class RegionError(PeerError, ValueError):
    """A region of a peer's memory that is closed, too small for what was asked, or only for reading."""


class CollectiveClosedError(ConnectionClosedError):
    """The group was closed on this rank, or aborted by one of them."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class ObjectGoneError(PeerLostError, KeyError):
    """A peer does not keep the object of a `Remote` any more: it was dropped, or went with a lost connection."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RemoteError(PeerError):
    """A function of a peer raised. `remote_type` and `remote_traceback` say what and where.

    When the peer raised a built-in exception or one of these, this is also one: `except ValueError` catches it here.
    """

    remote_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:  # whatever the built-in would make of it
        return str(self.args[0]) if self.args else ""


class CallCancelledError(PeerError):
    """The call, or the wait, was cancelled before its result was there."""


class BusyError(PeerError):
    """A queue of the peer is full: it is asked for more than it can do."""


class UnknownPeerError(PeerError, KeyError):
    """No peer of that name has joined within the deadline."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NameTakenError(PeerError, ValueError):
    """A node of that name has joined before, and is alive or not proven gone."""


class RanksDisagreeError(ReplayError, ValueError):
    """The ranks of one replay were set up differently; the message names two of them and the difference."""


class ActorDiedError(JobError):
    """More actors died than may be started again; the message says what the last one died of."""


class ProcessDiedError(JobError):
    """A process of a job died and may not be started again; the message has its last lines and where its log is."""


class JobTimeoutError(JobError, WaitTimeoutError):
    """A job was not over within its time limit."""


class JobInterruptedError(JobError):
    """A job was stopped by Ctrl-C, or by SIGTERM."""


class CorruptStoreError(StoreError):
    """The segment's own records do not agree: it is damaged; the message says in what, and what mends it."""


class CheckpointError(StoreError):
    """A checkpoint that is absent, incomplete, of another version, or damaged; or one that cannot be written."""


class JournalError(StoreError):
    """A journal that is in use, damaged, of another version, or of a store with another schema."""


class SourceError(StoreError, ValueError):
    """A dataset, or one episode of it, that cannot go into the store; or rows that cannot go into a dataset."""


class DatasetExistsError(StoreError, FileExistsError):
    """There is something where a dataset was to be written."""


class MissingDependencyError(GeartrainError, ImportError):
    """An optional package is needed; the message carries the line that installs it."""
