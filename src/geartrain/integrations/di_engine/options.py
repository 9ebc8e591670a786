"""Options of the message queue: its type, device maps, the cluster's secret."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geartrain.core.arguments import check_choice
from geartrain.core.extras import require
from geartrain.errors import ArgumentError, TransportError, UntrustedPeerError

#: Values of `mq_type`, and whether tensors go from GPU to GPU: True, False, or None for when devices are named.
MQ_TYPES: dict[str, bool | None] = {
    "geartrain": None,
    "geartrain:cpu": False,
    "geartrain:cuda": True,
    "torchrpc": None,
    "torchrpc:cpu": False,
    "torchrpc:cuda": True,
    "cuda": True,
}
TOPOLOGIES = ("mesh", "star", "alone")


@dataclass(frozen=True)
class DevicePair:
    """Entry of a device map: sends tensors from a GPU of this process to a GPU of another node."""

    node_id: int
    local: int
    peer: int


@dataclass(frozen=True)
class QueueOptions:
    """Options of every worker of a runner. Can be pickled, as workers get it that way."""

    mq_type: str = "geartrain"
    node_id: int = 0
    topology: str = "mesh"
    init_method: str | None = None
    devices: tuple[int, ...] | None = None
    device_map: tuple[DevicePair, ...] = ()
    secret: bytes = b""
    timeout_s: float = 60.0

    def __repr__(self) -> str:  # without the secret
        return f"<QueueOptions of node {self.node_id}: {self.mq_type}, {self.topology}>"


def check_mq_type(mq_type: str) -> bool | None:
    """Whether the kind of queue uses GPUs; None where the other options decide.

    Raises:
        ArgumentError: there is no such kind.
    """
    return MQ_TYPES[check_choice("mq_type", mq_type, MQ_TYPES)]


def parse_devices(text: str | tuple[int, ...] | list[int] | None) -> tuple[int, ...] | None:
    """Parses the GPUs that this process may use.

    Example:
        >>> parse_devices("0,1")
        (0, 1)

    Raises:
        ArgumentError: not a list of numbers, or one of them twice.
    """
    if text is None or text == "":
        return None
    parts = text.split(",") if isinstance(text, str) else [str(part) for part in text]
    if not all(re.fullmatch(r"\s*\d+\s*", part) for part in parts):
        raise ArgumentError(f"--local-cuda-devices takes numbers, such as 0,1; found {text!r}")
    devices = tuple(int(part) for part in parts)
    if len(set(devices)) != len(devices):
        raise ArgumentError(f"--local-cuda-devices names a device twice: {text!r}")
    return devices


def parse_device_map(text: str | None) -> tuple[DevicePair, ...]:
    """Parses a device map, `<peer's node id>_<local GPU>_<peer's GPU>,...`.

    Example:
        >>> parse_device_map("1_0_1,2_0_2")
        (DevicePair(node_id=1, local=0, peer=1), DevicePair(node_id=2, local=0, peer=2))

    Raises:
        ArgumentError: it has another form, or maps one GPU to two of one peer.
    """
    if not text:
        return ()
    pairs: dict[tuple[int, int], DevicePair] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)_(\d+)_(\d+)\s*", part)
        if found is None:
            raise ArgumentError(
                f"--cuda-device-map takes <peer's node id>_<local GPU>_<peer's GPU>,... such as 1_0_1,2_0_2; "
                f"found {part!r} in {text!r}"
            )
        node_id, local, peer = (int(number) for number in found.groups())
        other = pairs.setdefault((node_id, local), DevicePair(node_id, local, peer))
        if other.peer != peer:
            raise ArgumentError(f"--cuda-device-map gives GPU {local} two partners at node {node_id}: {text!r}")
    return tuple(pairs.values())


def check_devices(
    wanted: bool | None, devices: tuple[int, ...] | None, device_map: tuple[DevicePair, ...], visible: int
) -> bool:
    """Checks the options for GPUs; returns whether any are used.

    Raises:
        TransportError: they are requested, and torch does not see them.
        ArgumentError: a map has a device that was not named, or devices are named for a queue without GPUs.
    """
    if wanted is False and (devices is not None or device_map):
        raise ArgumentError("devices are named for a queue that moves tensors through the CPU; take mq_type='cuda'")
    if not (wanted or devices or device_map):
        return False
    if visible == 0:
        raise TransportError(
            "no CUDA device here: torch sees none, and mq_type, --local-cuda-devices or --cuda-device-map ask for one. "
            "mq_type='torchrpc:cpu' moves tensors through the CPU"
        )
    usable = tuple(range(visible)) if devices is None else devices
    for device in usable:
        if device >= visible:
            raise TransportError(f"there is no CUDA device {device} here: torch sees {visible}")
    if set(usable) != set(range(visible)):
        chosen = ",".join(map(str, usable))
        raise TransportError(
            f"this process sees {visible} CUDA devices, and is to use {chosen}: what peers send may land on any "
            f"that it sees, so show it no others: CUDA_VISIBLE_DEVICES={chosen}"
        )
    for pair in device_map:
        if pair.local not in usable:
            raise ArgumentError(
                f"the device map uses GPU {pair.local}, which is not among those of this process: {usable}"
            )
    return True


def visible_devices() -> int:
    """Number of GPUs that torch sees."""
    count: int = require("torch", "geartrain[torch]", "A GPU").cuda.device_count()
    return count


def cluster_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """The cluster's secret: GEARTRAIN_SECRET, or the contents of the file GEARTRAIN_SECRET_FILE.

    Raises:
        UntrustedPeerError: the file is empty, or others may read it.
    """
    environment = os.environ if environment is None else environment
    if environment.get("GEARTRAIN_SECRET"):
        return environment["GEARTRAIN_SECRET"].encode()
    name = environment.get("GEARTRAIN_SECRET_FILE")
    if not name:
        return b""
    path = Path(name)
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise UntrustedPeerError(f"GEARTRAIN_SECRET_FILE cannot be read: {error}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UntrustedPeerError(f"others may read the secret in {path}: chmod 600 {path}")
    if not secret:
        raise UntrustedPeerError(f"{path} holds no secret")
    return secret
