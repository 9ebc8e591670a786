"""What a user may ask for: kinds of queue, device maps, places to attach to, the cluster's secret."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from geartrain.errors import ArgumentError, MissingDependencyError, TransportError, UntrustedPeerError

#: What `mq_type` may be, and whether tensors go from GPU to GPU: True, False, or None for whenever devices are named.
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
    """Tensors for a node go from a GPU of this process to one of that node's."""

    node_id: int
    local: int
    peer: int


@dataclass(frozen=True)
class Options:
    """What every worker of a runner is told. Travels to the workers, so everything in it can be pickled."""

    mq_type: str = "geartrain"
    node_id: int = 0
    topology: str = "mesh"
    init_method: str | None = None
    devices: tuple[int, ...] | None = None
    device_map: tuple[DevicePair, ...] = ()
    secret: bytes = b""
    timeout_s: float = 60.0

    def __repr__(self) -> str:  # the secret is nobody's business
        return f"<Options of node {self.node_id}: {self.mq_type}, {self.topology}>"


def check_mq_type(mq_type: str) -> bool | None:
    """Whether GPUs are to be used; None when that is left open.

    Raises:
        ArgumentError: there is no such kind.
    """
    if mq_type not in MQ_TYPES:
        raise ArgumentError(f"there is no message queue {mq_type!r} of geartrain's; there are {', '.join(MQ_TYPES)}")
    return MQ_TYPES[mq_type]


def parse_devices(text: str | tuple[int, ...] | list[int] | None) -> tuple[int, ...] | None:
    """The GPUs that this process may use.

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
    """Pairs of GPUs, one of this process and one of a peer, as `<peer's node id>_<local GPU>_<peer's GPU>,...`.

    Example:
        >>> parse_device_map("1_0_1,2_0_2")
        (DevicePair(node_id=1, local=0, peer=1), DevicePair(node_id=2, local=0, peer=2))

    Raises:
        ArgumentError: it does not look like that, or gives one GPU two partners at one peer.
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
    """Whether GPUs are used, of the `visible` ones here.

    Raises:
        TransportError: they are asked for, and are not there.
        ArgumentError: a map speaks of a device that was not named, or devices are named for a queue without them.
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
    """How many GPUs torch sees here."""
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("GPUs need torch: pip install torch") from None
    return torch.cuda.device_count()


def cluster_secret(environment: Mapping[str, str] | None = None) -> bytes:
    """The cluster's secret: GEARTRAIN_SECRET, or what stands in the file that GEARTRAIN_SECRET_FILE names.

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
