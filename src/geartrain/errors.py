"""Errors of geartrain, all below `GeartrainError`.

Most derive from `StoreError`, `ReplayError`, `PeerError` or `JobError`. Errors for a caller's mistake also derive from
the built-in that Python users expect (`ValueError`, `KeyError`, `FileExistsError`, ...), so code that does not know
geartrain catches them.
"""

from __future__ import annotations


class GeartrainError(Exception):
    """Base of all errors that geartrain raises on purpose."""


class ArgumentError(GeartrainError, ValueError):
    """An argument is invalid. The message says what was given and which values are allowed."""


class StoreError(GeartrainError):
    """Base of errors of a store: its segment, rows, keys and checkpoints."""


class ReplayError(GeartrainError):
    """Base of errors that prevent a batch."""


class PeerError(GeartrainError):
    """Base of errors between processes: connections, messages, calls, collectives."""


class JobError(GeartrainError):
    """Base of errors that end a job, or one of its processes."""


class SchemaError(StoreError, ArgumentError):
    """A field, dtype, shape, length or priority does not fit the store."""


class FieldError(SchemaError, KeyError):
    """The store has no field of this name, or cannot show it as requested."""

    def __str__(self) -> str:  # KeyError would show the repr, quotes and all
        return str(self.args[0]) if self.args else ""


class StoreExistsError(StoreError, FileExistsError):
    """A segment of this name exists already, in use or left behind."""


class StoreMissingError(StoreError, FileNotFoundError):
    """No segment of this name is on this host."""


class StaleStoreError(StoreError):
    """The processes that used the segment died. Open it with `adopt=True` to keep its rows, or replace it."""


class IncompatibleStoreError(StoreError):
    """The file is not a segment of geartrain, or has another format version, layout or schema."""


class UntrustedStoreError(StoreError, PermissionError):
    """More users may write to the segment than `trust` allows: another user's file, a wide mode, or a symbolic link."""


class StoreIOError(StoreError):
    """The system refused a call on the file of a store, weights or counters. The message has the file and the reason.

    Usual reasons are an I/O error, missing permission, and too many open files.
    """


class StoreClosedError(StoreError, ValueError):
    """The handle was closed. The segment itself may still exist."""


class ReadOnlyStoreError(StoreError, PermissionError):
    """The handle changes nothing: it was opened with mode="r", or is that of an imported data set."""


class StoreFullError(StoreError):
    """No block is free: all of them are being written right now."""


class EmptyStoreError(ReplayError):
    """There is nothing to draw: no available row, or none with a priority above 0."""


class TurnoverError(ReplayError):
    """Rows are overwritten faster than they can be read: the store is too small for its rate of inserts."""


class NotEnoughRowsError(EmptyStoreError, ValueError):
    """A batch needs more rows than are available, and no other process could add some."""


class EmptyBufferError(NotEnoughRowsError, RuntimeError):
    """A replay buffer is empty; also a `RuntimeError`, which the library that it stands in for raises."""


class SplitGroupError(ReplayError, ValueError):
    """Over several ranks: a group that is drawn as a whole has rows in more than one shard."""


class StaleKeyError(StoreError, KeyError):
    """Rows were overwritten or removed since their keys were made."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StaleClaimError(StoreError, KeyError):
    """A row is not claimed by this process any more: it was put, released, dropped or taken back."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NoSpaceError(StoreError, MemoryError):
    """The file system, usually /dev/shm, is too small for the segment; or its spans are too small for a row."""


class PinError(ReplayError, MemoryError):
    """Memory that a GPU should read in place cannot be pinned. The message says why."""


class LockTimeoutError(StoreError, TimeoutError):
    """Another process held the segment's lock beyond the deadline, probably because it is stopped."""


class WaitTimeoutError(GeartrainError, TimeoutError):
    """A wait, such as that for the next batch, reached its deadline."""


class BuffersHeldError(WaitTimeoutError):
    """Readers held all buffers of the weights but the newest version's until the deadline."""


class PeerLostError(PeerError, ConnectionError):
    """A peer, or a rank of the group, is gone or did not answer in time. The message says which and why."""


class RankLostError(PeerLostError):
    """A rank of a collective group died, disconnected or left; `ranks` names it, `reducers` is empty."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class ReducerLostError(PeerLostError):
    """A reducer of a collective group died or is stopped; `reducers` names it as "host:port"."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class CollectiveTimeoutError(PeerError, WaitTimeoutError):
    """A collective operation did not end in time; `ranks` and `reducers` name the members that it waited for."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class TransportError(PeerError, OSError):
    """A transport cannot reach the peer from here. The message says why."""


class PeerUnreachableError(PeerLostError, TransportError):
    """Nothing answers at a peer's address: it died, or never was there. The message has each transport's reason."""


class ListenerGoneError(TransportError):
    """The listener of the address is gone: its host refused the connection, or something else answers there."""


class UntrustedPeerError(PeerError, PermissionError):
    """The peer did not prove that it knows the secret, or an operation is allowed only between peers that did."""


class MessageError(PeerError, ValueError):
    """A message is malformed, exceeds a limit, or contains something that cannot be sent."""


class DeviceError(PeerError, ValueError):
    """A tensor or a device map names a device that does not exist, or that tensors cannot be sent from or to."""


class ConnectionClosedError(PeerError, ValueError):
    """The connection was closed on this side, or belongs to the process that this one was forked from."""


class RegionError(PeerError, ValueError):
    """A region of a peer's memory is closed, too small, or read-only."""


class CollectiveClosedError(ConnectionClosedError):
    """The group was closed on this rank, or aborted by a rank."""

    ranks: tuple[int, ...] = ()
    reducers: tuple[str, ...] = ()


class ObjectGoneError(PeerLostError, KeyError):
    """The peer no longer keeps the object of a `Remote`: it was dropped, or its connection was lost."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RemoteError(PeerError):
    """A function of a peer raised. `remote_type` and `remote_traceback` say what and where.

    It is also of the type that the peer raised, if that is a built-in exception or one of geartrain's: `except
    ValueError` catches it here.
    """

    remote_type: str = ""
    remote_traceback: str = ""

    def __str__(self) -> str:  # whatever the built-in would make of it
        return str(self.args[0]) if self.args else ""


class CallCancelledError(PeerError):
    """The call, or the wait, was cancelled before its result was there."""


class BusyError(PeerError):
    """A queue of the peer is full: it gets more calls than it can handle."""


class UnknownPeerError(PeerError, KeyError):
    """No peer of this name joined before the deadline."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NameTakenError(PeerError, ValueError):
    """Another node has this name, and is alive or may be."""


class RanksDisagreeError(ReplayError, ValueError):
    """The ranks have different arguments. The message names two of them and the difference."""


class ActorDiedError(JobError):
    """Actors died more often than `max_restarts` allows. The message has the last one's traceback."""


class ProcessDiedError(JobError):
    """A process of a job died and may not be restarted. The message has its last lines and the path of its log."""


class JobTimeoutError(JobError, WaitTimeoutError):
    """A job reached its time limit."""


class JobInterruptedError(JobError):
    """A job was stopped by Ctrl-C, or by SIGTERM."""


class CorruptStoreError(StoreError):
    """The segment is damaged: its metadata is inconsistent. The message says where, and how to repair it."""


class CheckpointError(StoreError):
    """A checkpoint is missing, incomplete, of another version, or damaged; or it cannot be written."""


class JournalError(StoreError):
    """A journal is in use, damaged, of another version, or of a store with another schema."""


class SourceError(StoreError, ValueError):
    """A dataset, or an episode of it, does not fit the store; or rows do not fit a dataset."""


class DatasetExistsError(StoreError, FileExistsError):
    """Something exists already where a dataset should be written."""


class MissingDependencyError(GeartrainError, ImportError):
    """An optional package is not installed. The message has the command that installs it."""
