"""Device maps: choose the peer's GPU that a tensor is sent to, and the local GPU that a result returns to.

As in `torch.distributed.rpc`, a map is given per peer. `{"learner": {0: 1}}` sends tensors on cuda:0 to cuda:1 of the
learner. Results on the learner's cuda:1 return to cuda:0.

A map can also be text: `<peer>_<local GPU>_<peer's GPU>,...`, for example `1_0_0,2_0_1`. The peer is a rank or a name.

Without a map, a tensor goes to the GPU with the same index if the peer has it. Otherwise it goes to one of the peer's
GPUs in turn, or to the CPU if the peer has no GPU.

This module has pure functions only and does not use CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from geartrain.core.arguments import shown
from geartrain.errors import DeviceError

#: Stands for the CPU in place of the index of a GPU.
CPU = -1

#: For each peer, by name or rank as text: its GPU for each GPU here.
Maps = dict[str, dict[int, int]]


@dataclass(frozen=True)
class DeviceMap:
    """The device map to one peer. `given` is None if devices are chosen automatically."""

    peer: str
    given: Mapping[int, int] | None = None

    def there(self, here: int, their_count: int) -> int:
        """The peer's device for a tensor on GPU `here`. The peer has `their_count` GPUs. Raises `DeviceError`.

        Example:
            >>> DeviceMap("learner", {0: 1}).there(0, 2), DeviceMap("learner").there(3, 2)
            (1, 1)
        """
        if self.given is None:
            return automatic(here, their_count)
        if here not in self.given:
            raise DeviceError(
                f"a tensor is on cuda:{here}, but the device map to {self.peer!r} does not name that GPU: "
                f"{_text(self.given)}"
            )
        there = self.given[here]
        if there >= their_count:
            raise DeviceError(
                f"the device map sends cuda:{here} to cuda:{there} of {self.peer!r}, which has {_gpus(their_count)}"
            )
        return there

    def back(self, there: int, my_count: int) -> int:
        """Where a result on the peer's GPU `there` goes here: the map reversed. Raises `DeviceError`."""
        if self.given is None:
            return automatic(there, my_count)
        for here, target in self.given.items():
            if target == there:
                return here
        raise DeviceError(
            f"a result is on cuda:{there} of {self.peer!r}, but the device map names no GPU here for it: "
            f"{_text(self.given)}"
        )


def automatic(index: int, count: int) -> int:
    """The same index if the peer has that GPU, else one of its GPUs in turn, else the CPU.

    Example:
        >>> [automatic(i, 2) for i in range(4)], automatic(3, 0)
        ([0, 1, 0, 1], -1)
    """
    return index % count if count else CPU


def maps_of(given: str | Mapping[Any, Any] | None, local_count: int) -> Maps:
    """Maps as they were given, checked against the GPUs that there are here.

    Raises:
        DeviceError: malformed; a GPU that is not here; two GPUs for one of the peer's, so that results could not be
            mapped back.

    Example:
        >>> maps_of("1_0_1,1_1_0,2_0_0", 2)
        {'1': {0: 1, 1: 0}, '2': {0: 0}}
        >>> maps_of({"learner": {"cuda:0": 1}}, 1)
        {'learner': {0: 1}}
    """
    if given is not None and not isinstance(given, (str, Mapping)):
        raise DeviceError(f"a device map is text, or GPUs by GPU by peer; found {shown(given)}")
    maps = parse(given) if isinstance(given, str) else {} if given is None else _from_mapping(given)
    for peer, pairs in maps.items():
        for here, there in pairs.items():
            if here >= local_count:
                raise DeviceError(f"the device map to {peer!r} names cuda:{here}, and here are {_gpus(local_count)}")
            if list(pairs.values()).count(there) > 1:
                several = [h for h, t in pairs.items() if t == there]
                raise DeviceError(
                    f"the device map to {peer!r} sends GPUs {several} to one, cuda:{there}: results "
                    "could not be mapped back"
                )
    return maps


def parse(text: str) -> Maps:
    """Maps from `<peer>_<local GPU>_<peer's GPU>,...`; a name of a peer may have underscores. Raises `DeviceError`."""
    maps: Maps = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        parts = entry.rsplit("_", 2)
        if len(parts) != 3 or not parts[0] or not (_is_index(parts[1]) and _is_index(parts[2])):
            raise DeviceError(
                f"a device map is <peer>_<local GPU>_<peer's GPU>,... such as 1_0_0; found {shown(entry)}"
            )
        _add(maps, parts[0], int(parts[1]), int(parts[2]))
    return maps


def of_peer(maps: Maps, names: tuple[str, ...]) -> DeviceMap:
    """The map to a peer that goes by any of these names. The first name is its own."""
    for name in names:
        if name in maps:
            return DeviceMap(names[0], maps[name])
    return DeviceMap(names[0])


def _from_mapping(given: Mapping[Any, Any]) -> Maps:
    maps: Maps = {}
    for peer, pairs in given.items():
        if not isinstance(pairs, Mapping):
            raise DeviceError(f"a device map is {{peer: {{GPU here: GPU there}}}}; found {pairs!r} for {peer!r}")
        maps[str(peer)] = {}
        for here, there in pairs.items():
            _add(maps, str(peer), _index(here), _index(there))
    return maps


def _add(maps: Maps, peer: str, here: int, there: int) -> None:
    pairs = maps.setdefault(peer, {})
    if pairs.get(here, there) != there:
        raise DeviceError(f"the device map sends cuda:{here} to two GPUs of {peer!r}: {pairs[here]} and {there}")
    pairs[here] = there


def _index(device: Any) -> int:
    """The index of 1, "1", "cuda:1", "cuda" or torch.device("cuda", 1)."""
    text = str(device)
    if text == "cuda":
        return 0
    number = text.removeprefix("cuda:")
    if isinstance(device, bool) or not _is_index(number):
        raise DeviceError(f"a device map names GPUs, as 0 or 'cuda:0'; found {device!r}")
    return int(number)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4


def _gpus(count: int) -> str:
    return "no GPUs" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}"


def _text(pairs: Mapping[int, int]) -> str:
    return ", ".join(f"{here}->{there}" for here, there in pairs.items()) or "it is empty"
