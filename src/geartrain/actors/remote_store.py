"""Remote store: a client for a store of another process or host, by the name under which it is served.

    node = rpc.init("simulator-3", ...)
    store = RemoteStore(node, "learner", "replay")
    Actor(environments, policy, store).run(steps=1_000_000)     # no store, learner or GPU on this host

`geartrain.actors.StoreServer` is the server.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from geartrain.actors.remote_calls import RemoteCalls
from geartrain.actors.remote_tasks import RemoteReader, RemoteRows
from geartrain.actors.served_writes import pack, unpack
from geartrain.core.arguments import (
    OUTPUT,
    PAD,
    check_choice,
    check_flag,
    check_names_of,
    check_text,
    check_texts,
    check_type,
    check_unmasked,
    check_whole,
    leave_out,
    optional,
    timeout,
)
from geartrain.core.dtypes import DTYPES, as_tensor
from geartrain.core.keys import Keys, check_keys
from geartrain.core.lifetime import Closing, Uncopied
from geartrain.core.schema import Field
from geartrain.errors import (
    ArgumentError,
    CallCancelledError,
    ConnectionClosedError,
    FieldError,
    GeartrainError,
    PeerLostError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.replay.batch import Batch
from geartrain.replay.fetch import ServedRows
from geartrain.replay.packed_batch import fetch_packed
from geartrain.rpc.future import Future
from geartrain.rpc.node import Node
from geartrain.rpc.remote_objects import DROP, METHOD, Remote
from geartrain.store.claims import check_durable
from geartrain.store.rate_limiter import INSERT_TIMEOUT_S
from geartrain.store.segment import plan_of_described
from geartrain.store.tasked import Found, TaskedRows
from geartrain.store.waiting_claims import Asked

if TYPE_CHECKING:
    import geartrain._native as _native

#: By default calls wait as long as a local commit waits for the store's rate limiter.
TIMEOUT_S = 600.0
#: Between looks at a store's `stopping`, while a recorder waits.
_LOOK_EVERY_S = 0.1


class RemoteStore(
    Uncopied, ServedRows, TaskedRows, elsewhere="make another one there, with RemoteStore(node, peer, name)"
):
    """A store that a peer serves with `StoreServer`. Any thread may use it.

    Keys are the same on both sides: those that `insert` returns here, and those of a learner's batch there, name the
    same rows. Arrays are sent without pickle, one message there and one back; large ones go through shared memory
    within a host.

    Args:
        node: the `geartrain.rpc` node that knows the peer.
        peer: name of the peer.
        name: name of the store at the peer.
        timeout_s: longest wait of each call, 0 to 1e9 seconds. Inserts and steps wait this long for the store's rate
            limiter, and writes this long for a peer that was lost.

    Raises:
        PeerLostError, UnknownPeerError, WaitTimeoutError: the peer cannot be reached. All methods may raise these. The
            message says so if it is unknown whether a write took effect.
        LookupError: the peer serves no store of that name. Errors of the store itself are raised here as a
            `RemoteError` that is also of the original type, such as `SchemaError`.

    Attributes:
        name: name of the store at the peer.
        id: the store's id, which its keys carry. It changes once the peer has loaded the store from a checkpoint or
            journal; keys from before are then refused.
        fields, max_length, capacity, per_step: as for `Store`.
        stopping: a function. While it returns True, steps that would wait for earlier ones raise `CallCancelledError`.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> from geartrain import rpc
        >>> from geartrain.actors import StoreServer
        >>> fields = gt.recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=8)
        >>> learner = rpc.Node("learner")
        >>> server = StoreServer(learner, store, "replay")
        >>> host = rpc.Node("host", peers={"learner": learner.address})
        >>> with RemoteStore(host, "learner", "replay").recorder(autoreset="disabled") as recorder:  # a RemoteRecorder
        ...     _ = recorder.reset(np.zeros((1, 1)))
        ...     _ = recorder.step(np.ones((1, 1)), reward=[1.0], terminated=[True], truncated=[False])
        >>> store.status()["length"].tolist()
        [2]
        >>> server.close(); host.close(); learner.close(); store.close()
    """

    name: str
    capacity: int
    stopping: Callable[[], bool] | None = None

    def __init__(self, node: Node, peer: str, name: str, *, timeout_s: float = TIMEOUT_S) -> None:
        check_type("a RemoteStore needs a node of geartrain.rpc", node, Node)
        self.node, self.peer, self.name = node, check_text("peer", peer), check_text("the name of a store", name)
        self.timeout_s = timeout(timeout_s)
        about = self._call("describe")
        self.plan = None if about["plan"] is None else plan_of_described(about["plan"])
        if self.plan is None:
            described = about["fields"].items()
            self.fields = {each: Field(tuple(shape), kind, per_row=once) for each, (shape, kind, once) in described}
            self._calls = RemoteCalls(node, self.peer, self.name, self.timeout_s, about)
        else:
            self.fields = dict(self.plan.fields)
            self._calls = self._rows = RemoteRows(node, self.peer, self.name, self.timeout_s, about, self.plan)
            self.native = cast("_native.Store", self._rows)
        self.max_length: int = about["max_length"]
        self.capacity = about["capacity"]
        self.per_step: bool = about["per_step"]

    @property
    def id(self) -> int:
        """The store's id, which its keys carry."""
        return self._calls.store_id

    def _call(self, what: str, *args: Any) -> Any:
        return self.node.call(self.peer, f"geartrain.store.{what}", self.name, *args, timeout_s=self.timeout_s)

    def __len__(self) -> int:
        return int(self._call("figures")[0])

    def stats(self) -> dict[str, int]:
        """The store's counters, as `Store.stats` returns them."""
        return dict(self._call("figures")[1])

    def keys(self) -> Keys:
        """Keys of all rows, oldest first. For a large store this is a large message."""
        return unpack(self._call("keys"))

    def insert(
        self,
        fields: Mapping[str, Any],
        *,
        lengths: ArrayLike | Mapping[str, ArrayLike] | None = None,
        priorities: ArrayLike | None = None,
        versions: ArrayLike | None = None,
        casting: Literal["no", "safe", "same_kind"] = "no",
        timeout_s: float | None = None,
        durable: bool = False,
    ) -> Keys:
        """Inserts `n` rows and returns their keys.

        If the connection breaks, the call connects again and returns the keys. Every row is then in the store once,
        whether the request or the reply was lost. `update_priorities` and `delete` do the same.

        Args:
            fields, lengths, priorities, versions, casting, timeout_s, durable: as for `Store.insert`.

        Raises:
            ArgumentError: an argument does not fit the store. The other errors are those of `Store.insert`.
            PeerUnreachableError: nothing answered at the peer's address. The rows are not in the store.
            PeerLostError: the peer's server ended during the call, or did not come back within the `timeout_s` of the
                `RemoteStore`. Unless the message says otherwise, it is unknown whether the rows are in the store.
            WaitTimeoutError: no reply in time; as for `PeerLostError`, if the message says that it is unknown.
        """
        if self.plan is not None:
            within_s = INSERT_TIMEOUT_S if timeout_s is None else timeout(timeout_s)
            durable = check_durable(self.native, durable)
            return self.insert_spans(self.plan, fields, lengths, priorities, versions, 0, casting, within_s, durable)
        if timeout_s is not None:
            raise ArgumentError("timeout_s= is the wait for room; this store evicts rows instead")
        check_type("insert takes a dict of arrays by field", fields, Mapping)
        given: dict[str, Any] = {"lengths": lengths, "priorities": priorities, "versions": versions}
        given = {what: np.asarray(value) for what, value in given.items() if value is not None}
        if check_choice("casting", casting, ("no", "safe", "same_kind")) != "no":
            given["casting"] = casting
        if check_flag("durable", durable):
            given["durable"] = True
        for each, value in fields.items():
            if value.__class__ is not np.ndarray:
                check_unmasked(f"field {each!r}", value)
        arrays = {each: value if hasattr(value, "dtype") else np.asarray(value) for each, value in fields.items()}
        rows, generations = self._calls.write("insert", lambda again: (arrays, given))
        return Keys.of_rows(rows, generations, self.id)

    def fetch(
        self,
        keys: Keys,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        ends: ArrayLike | None = None,
        pad: Literal["left", "right"] = "left",
        output: Literal["torch", "numpy"] = "torch",
        on_stale: Literal["raise", "drop"] = "raise",
    ) -> Batch:
        """Reads rows by key, as one batch.

        Args:
            keys, fields, window, ends, pad, output, on_stale: as for `geartrain.fetch`.

        Raises:
            StaleKeyError: rows were overwritten or removed since the keys were made.

        Cost: a copy at the peer; then the bytes cross the transport once.
        """
        return self.begin_fetch(
            keys, fields=fields, window=window, ends=ends, pad=pad, output=output, on_stale=on_stale
        )()

    def begin_fetch(
        self,
        keys: Keys,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        ends: ArrayLike | None = None,
        pad: Literal["left", "right"] = "left",
        output: Literal["torch", "numpy"] = "torch",
        on_stale: Literal["raise", "drop"] = "raise",
    ) -> Callable[[], Batch]:
        """Requests rows as `fetch` does and returns at once.

        Args:
            keys, fields, window, ends, pad, output, on_stale: as for `geartrain.fetch`.

        Returns:
            A function that waits for the batch. Call it once.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        OUTPUT("output", output)
        PAD("pad", pad)
        check_choice("on_stale", on_stale, ("raise", "drop"))
        if self.plan is not None:
            return self._fetch_packed(keys, fields, (window, ends, pad), output, on_stale)
        given: dict[str, Any] = {"fields": fields, "window": window, "pad": pad, "on_stale": on_stale}
        if fields is not None:
            check_names_of("fields", fields)
        given["fields"] = None if fields is None else list(fields)
        if ends is not None:
            given["ends"] = np.asarray(ends)
        asked = self.node.call_async(
            self.peer, "geartrain.store.fetch", self.name, pack(keys), given, timeout_s=self.timeout_s
        )

        def wait() -> Batch:
            found = asked.result()
            arrays = {each: self._as_output(each, value, output) for each, value in found["fields"].items()}
            rest = [self._plain(found[each], output) for each in ("mask", "start", "length", "version")]
            return Batch(arrays, unpack(found["keys"]), *rest)

        return wait

    def _fetch_packed(
        self, keys: Keys, fields: Sequence[str] | None, placed: tuple[Any, ...], output: str, on_stale: Any
    ) -> Callable[[], Batch]:
        assert self.plan is not None
        window, ends, pad = placed
        why = f"the store {self.name!r} has axes, strings or tasks: its rows are read whole"
        leave_out(why, window=window, ends=ends, pad=pad != "left" and pad)
        optional(check_names_of, "fields", fields)
        batch = fetch_packed(self.packed_reader, self.plan, keys, fields, output, on_stale)
        return lambda: batch

    # --- tasks ----------------------------------------------------------------------------------------------

    def packed_reader(self, names: Sequence[str], axes: Sequence[str] = (), threads: int = 0) -> RemoteReader:
        """Internal: reads fields of rows.

        Args:
            names, axes, threads: as for `PackedReader`.
        """
        assert self.plan is not None
        self.plan.check_fields(names)
        return RemoteReader(self._rows, self.plan, names, axes)

    def one_row_writer(self, task: int, *, append: bool) -> None:
        """Internal: rows are written by general calls.

        Args:
            task, append: as for `Store`.
        """

    def insert_together(
        self, n: int, sources: Any, table: Any, of_rows: Any, threads: int, timeout_s: float, durable: bool
    ) -> Keys | int:
        """Internal: as of `Store`.

        Args:
            n, sources, table, of_rows, threads, timeout_s, durable: as there.
        """
        values, until_s = (n, list(sources), table, *of_rows), time.monotonic() + timeout_s

        def given(again: bool) -> tuple[Any, ...]:
            return *values, max(0.0, until_s - time.monotonic()) if again else timeout_s, durable

        found: tuple[Any, Any] | int = self._calls.write("insert_packed", given, wait_s=timeout_s)
        return found if isinstance(found, int) else Keys.of_rows(*found, self.id)

    def _claim_rows(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
        found: Found = self._rows.claim(asked, timeout_s, later, fields)
        return found

    async def _claim_rows_async(self, asked: Asked, timeout_s: float, later: bool, fields: Sequence[str]) -> Found:
        found: Found = await self._rows.claim_async(asked, timeout_s, later, fields)
        return found

    def lag_before(self, number: int) -> str:
        """Internal: as `Store.lag_before`.

        Args:
            number: of the task.
        """
        return self._rows.lag(number)

    def _as_output(self, name: str, value: Any, output: str) -> Any:
        dtype = DTYPES[self.fields[name].dtype]
        if output == "numpy" and dtype.numpy_name is None:
            raise FieldError(f"NumPy has no {dtype.name}, of field {name!r}; use output='torch'")
        return as_tensor(value, dtype) if output == "torch" and isinstance(value, np.ndarray) else value

    def _plain(self, value: Any, output: str) -> Any:
        if isinstance(value, np.ndarray):
            return as_tensor(value, DTYPES[value.dtype.name]) if output == "torch" else value
        return value if value is None or output == "torch" else value.numpy()

    def update_priorities(self, keys: Keys | ArrayLike, priorities: ArrayLike) -> int:
        """Sets priorities of rows or steps; returns how many keys were stale.

        Args:
            keys, priorities: as for `Store.update_priorities`.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        given = pack(keys), np.asarray(priorities)
        return int(self._calls.write("update_priorities", lambda again: given))

    def delete(self, keys: Keys | ArrayLike) -> int:
        """Removes rows; returns how many keys were stale.

        Args:
            keys: keys of the rows.
        """
        keys = check_keys(keys)
        keys.check_store(self.id, self.name)
        return int(self._calls.write("delete", lambda again: (pack(keys),)))

    def recorder(
        self,
        n_envs: int = 1,
        *,
        obs: Sequence[str] | None = None,
        publish_every: int | None = None,
        overlap: int = 0,
        priority: float | None = None,
        autoreset: Any = None,
        zeros: Sequence[str] = (),
        max_in_flight: int = 8,
    ) -> RemoteRecorder:
        """A recorder of the steps of `n_envs` environments in the peer's store.

        Args:
            n_envs, obs, publish_every, overlap, priority, autoreset, zeros: as for `Store.recorder`.
            max_in_flight: steps that are sent before the first is acknowledged; 0 waits for each.

        Raises:
            ArgumentError: an argument does not fit the store.
        """
        options: dict[str, Any] = {"publish_every": publish_every, "overlap": overlap, "priority": priority}
        if obs is not None and not isinstance(obs, str):
            check_names_of("obs", obs)
        if obs is not None:
            options["obs"] = [obs] if isinstance(obs, str) else list(obs)
        if zeros.__class__ is not tuple or zeros:
            options["zeros"] = check_texts("zeros", zeros)
        if autoreset is not None:
            options["autoreset"] = str(getattr(autoreset, "value", autoreset))
        check_whole("max_in_flight", max_in_flight, 0, 2**31)
        number, found = self._call("recorder", n_envs, options)
        remote = Remote(self.node, self.peer, number)
        return RemoteRecorder(remote, n_envs, tuple(found), int(max_in_flight), self)

    def __repr__(self) -> str:
        return f"<RemoteStore {self.name!r} of {self.peer!r}>"


def serves_no_more(error: BaseException) -> bool:
    """Whether an error says that the peer is gone, or serves that store no more, and not that the store refused."""
    if isinstance(error, KeyError | IndexError):  # a field or a key that the store does not have
        return isinstance(error, UnknownPeerError)
    return isinstance(error, PeerLostError | LookupError)


class RemoteRecorder(Closing, elsewhere="make another one there, with RemoteStore.recorder(...)"):
    """Records steps of n environments in a peer's store.

    `RemoteStore.recorder` makes one. Use it from one thread at a time.

    It has the methods of `StepRecorder`, but up to `max_in_flight` steps may be unacknowledged. A step returns the keys
    of rows that were completed by now, and raises the error of an earlier step. After an error, or after the peer is
    lost, the episodes are ended and every call raises: make another recorder and call `reset`. With `max_in_flight=0`
    you can pass a refused step again.

    If this process ends or loses the peer, rows that were not published are abandoned there.

    Args:
        remote, max_in_flight, store: set by `RemoteStore.recorder`, which makes the object.

    Attributes:
        n_envs: number of environments.
        obs: names of the fields that are observations.
    """

    def __init__(
        self, remote: Remote, n_envs: int, obs: tuple[str, ...], max_in_flight: int, store: RemoteStore
    ) -> None:
        self._remote = remote
        self.n_envs, self.obs = n_envs, obs
        self._most, self._timeout_s = max_in_flight, store.timeout_s
        self._store = store
        self._sent: deque[Future] = deque()
        self._number = 0
        self._rows = 0
        self._completed: list[Keys] = []
        self._error: GeartrainError | None = None

    def reset(self, obs: Any, *, mask: Any = None, version: int = 0) -> Keys | None:
        """Begins an episode in every environment. An episode in progress is ended and kept.

        Args:
            obs, mask, version: as for `StepRecorder.reset`.
        """
        return self._send("reset", {"obs": _plain(obs), "mask": _plain(mask), "version": version})

    def step(
        self,
        obs: Any,
        *,
        terminated: Any,
        truncated: Any,
        final_obs: Any = None,
        mask: Any = None,
        version: int = 0,
        **values: Any,
    ) -> Keys | None:
        """Sends one step of all environments; returns keys of rows that were completed by now.

        Args:
            obs, terminated, truncated, final_obs, mask, version, values: as for `StepRecorder.step`.
        """
        flags = {"terminated": _plain(terminated), "truncated": _plain(truncated), "mask": _plain(mask)}
        given = {name: _plain(value) for name, value in values.items()}
        given |= {"obs": _plain(obs), "version": version, **flags}
        if final_obs is not None:
            given["final_obs"] = _plain(final_obs)
        return self._send("step", given)

    def cut(self, mask: Any = None) -> Keys | None:
        """Ends episodes and keeps their steps. All steps are recorded when it returns.

        Args:
            mask: (n_envs,) bool: environments whose episodes end; all by default.
        """
        completed = self._send("cut", {"mask": _plain(mask)})
        self._settle(0)
        rest = self._known()
        return rest if completed is None else completed if rest is None else completed + rest

    def discard(self, env: int) -> Keys | None:
        """Takes back an episode of one environment. All steps before are recorded when it returns.

        Args:
            env: as for `StepRecorder.discard`.

        Returns:
            As `StepRecorder.discard`.

        Raises:
            ArgumentError: there is no such environment.
        """
        check_whole("env", env, 0, self.n_envs - 1)
        self._settle(0)
        completed, self._completed = self._completed, []
        try:
            kept = self._send("discard", {"env": int(env)})
            self._settle(0)
            return self._known() if kept is None else kept
        finally:
            self._completed = completed + self._completed

    def close(self) -> None:
        """Ends all episodes and keeps their steps. Later calls raise."""
        if self._error is None:
            self.cut()
            self._error = ConnectionClosedError("the recorder was closed")
            self._drop()

    def __del__(self) -> None:
        if getattr(self, "_error", True) is None:  # rows that were not published are given back, as locally
            self._error = ConnectionClosedError("the recorder was dropped")
            self._drop()

    def _drop(self) -> None:
        with suppress(GeartrainError):
            self._remote.tell(DROP)

    @property
    def lost(self) -> bool:
        """Whether the peer was lost, or no longer serves the store. Another recorder may reach it again."""
        return self._error is not None and serves_no_more(self._error)

    @property
    def rows(self) -> int:
        """Number of rows completed, in the steps that are known to be recorded."""
        return self._rows

    def _send(self, what: str, given: dict[str, Any]) -> Keys | None:
        if self._error is not None:
            raise self._error
        number = self._number if self._most else None
        try:
            self._sent.append(self._remote.call_async("call", number, what, given, timeout_s=self._timeout_s))
        except (PeerLostError, ConnectionClosedError, WaitTimeoutError) as error:
            self._fail(error)
            raise
        self._number += 1
        self._settle(self._most)
        return self._known()

    def _settle(self, most: int) -> None:
        """Waits until so few steps are under way, and takes in what is known of the others."""
        while self._sent and (len(self._sent) > most or self._sent[0].done()):
            try:
                sent = self._sent.popleft()
            except IndexError:  # a signal's handler has taken it in
                return
            try:
                rows, keys, env = self._result(sent)
            except GeartrainError as error:
                if self._most or isinstance(
                    error, PeerLostError | ConnectionClosedError | WaitTimeoutError | CallCancelledError
                ):
                    self._fail(error)
                raise
            self._rows = rows
            if keys is not None:
                self._completed.append(replace(unpack(keys), env=env))

    def _result(self, sent: Future) -> Any:
        """The reply to a step; waits for it, unless the store's `stopping` says otherwise."""
        stopping = self._store.stopping
        while stopping is not None and not sent.done():
            try:
                return sent.result(timeout_s=_LOOK_EVERY_S)
            except WaitTimeoutError:
                if not sent.done() and stopping():
                    raise CallCancelledError(f"stopped while {self._store.peer!r} had not recorded a step") from None
        return sent.result()

    def _fail(self, error: GeartrainError) -> None:
        self._error = error
        self._sent.clear()
        with suppress(GeartrainError):
            self._remote.tell(METHOD, "give_up", (), {})
        self._drop()

    def _known(self) -> Keys | None:
        completed, self._completed = self._completed, []
        return Keys.join(completed) if completed else None


def _plain(value: Any) -> Any:
    """A value in the form that the codec sends: arrays, tensors, NumPy's numbers, and nested dicts, tuples and
    lists.
    """
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return (
            type(value)(_plain(each) for each in value) if type(value) in (tuple, list) else tuple(map(_plain, value))
        )
    if isinstance(value, np.ndarray) and value.dtype == object:  # Gymnasium's final observations
        return [_plain(each) for each in value]
    return np.asarray(value) if isinstance(value, np.generic) else value


__all__ = ["RemoteRecorder", "RemoteStore"]
