"""RPC functions that a client calls on a server to transfer tensors.

They lease and revoke buffers, send and check nonces, and write held results into the client's memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from geartrain.rpc.registry import function
from geartrain.rpc.session import ServerSession
from geartrain.rpc.tensors.bundles import NONCE_BYTES, as_tensor, take_nonce


def _negotiate(session: ServerSession, forced: str | None, hello: bytes | None) -> Any:
    return session.tensors.negotiate(forced, hello)


def _confirm_link(session: ServerSession) -> None:
    if session.tensors.handshake is not None:
        session.tensors.handshake.confirm()


def _lease(session: ServerSession, channel: str, device: int, nbytes: int) -> Any:
    return session.tensors.channels.lease(channel, device, nbytes)


def _revoke(session: ServerSession, number: int) -> None:
    session.tensors.channels.revoke(number)


def _nonce_received(session: ServerSession, number: int, token: bytes) -> bytes:
    return take_nonce(session.tensors.devices.driver, session.tensors.channels, number, token)


def _send_nonce(session: ServerSession, device: int, descriptor: Any) -> Any:
    tensors = session.tensors
    nonce = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
    (tensor,) = tensors.devices.driver.from_host(device, [as_tensor(nonce)])
    return tensors.channels.push("cuda_ipc", device, descriptor, [tensor], 10.0), nonce.tobytes()


def _use_channel(session: ServerSession, device: int, channel: str) -> None:
    session.tensors.result_channels[device] = channel


def _push(session: ServerSession, tag: int, bundle: int, descriptor: Any, timeout_s: float) -> bytes:
    return session.tensors.push(tag, bundle, descriptor, timeout_s)


def _copy_to_host(session: ServerSession, tag: int, bundle: int) -> list[Any]:
    return session.tensors.copy_to_host(tag, bundle)


def _discard(session: ServerSession, tag: int) -> None:
    session.tensors.discard(tag)


_CALLS: dict[str, Callable[..., Any]] = {
    "negotiate": _negotiate,
    "confirm_link": _confirm_link,
    "lease": _lease,
    "revoke": _revoke,
    "nonce_received": _nonce_received,
    "send_nonce": _send_nonce,
    "use_channel": _use_channel,
    "push": _push,
    "copy_to_host": _copy_to_host,
    "discard": _discard,
}
for _name, _function in _CALLS.items():
    # Concurrent: a call of the client that runs meanwhile may wait for them.
    function(name=f"geartrain.rpc.{_name}", concurrent=True, with_caller=True)(_function)
