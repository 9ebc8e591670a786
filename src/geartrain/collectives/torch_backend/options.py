"""Options of the backend "geartrain". They come from environment variables, or from `pg_options`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from geartrain.collectives.group_arguments import ON_REDUCER_LOSS


@dataclass(frozen=True)
class BackendOptions:
    """Options of the `torch.distributed` backend "geartrain".

    Most are those of `geartrain.collectives.Group` and of its `GroupOptions`.

    Attributes:
        reducers: "host:port" of each `geartrain reducer`.
        shares: "auto", "equal", or a number for each rank of the job and then for each reducer, of sum 1.
        rates: bytes/s of each rank of the job and then of each reducer; for "auto".
        algorithm: "shares" or "ring".
        wire_dtype: "bfloat16" or "float16" to send float32 tensors with fewer bytes; None sends float32.
        secret: ranks and reducers prove to each other that they know it.
        epoch: number of this incarnation; connections of an earlier one are refused.
        on_reducer_loss: "raise", or "continue": the ranks do the work of a reducer that died or is silent. "continue"
            needs connections between all ranks.
        reducer_silence_s: with "continue", a reducer that is waited for and silent for this many seconds counts as
            lost.
        hierarchical: reduce within each host first, and then across hosts.
        spin_us: how long a wait spins before it sleeps, if ranks share memory, in microseconds; None: 50, or less if
            others need the cores.
        cuda: how tensors on a GPU are reduced: "staged" through pinned memory by geartrain, or "nccl".

    Examples:
        >>> options = BackendOptions(reducers=("10.0.0.9:7777",), rates=(1e9, 1e9, 2e9))
        >>> options.of_ranks([1], world_size=2).rates
        (1000000000.0, 2000000000.0)
    """

    reducers: tuple[str, ...] = ()
    shares: str | tuple[float, ...] = "auto"
    rates: tuple[float, ...] | None = None
    algorithm: str = "shares"
    wire_dtype: str | None = None
    secret: bytes | None = None
    epoch: int = 0
    on_reducer_loss: str = "raise"
    reducer_silence_s: float = 3.0
    hierarchical: bool = False
    spin_us: float | None = None
    cuda: str = "staged"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> BackendOptions:
        """Options from GEARTRAIN_REDUCERS and the related variables (docs/collectives-torch.md).

        Args:
            environment: variables by name; `os.environ` by default.

        Raises:
            ValueError: a variable has an invalid value. The message names it and the valid values.
        """
        env = os.environ if environment is None else environment
        reducers = tuple(part.strip() for part in env.get("GEARTRAIN_REDUCERS", "").split(",") if part.strip())
        for address in reducers:
            if not re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", address):
                raise ValueError(f"GEARTRAIN_REDUCERS is host:port,host:port,..., found {address!r}")
        shares: str | tuple[float, ...] = env.get("GEARTRAIN_ALLREDUCE_SHARES", "auto").strip() or "auto"
        if shares not in ("auto", "equal"):
            shares = _numbers("GEARTRAIN_ALLREDUCE_SHARES", str(shares))
        wire = env.get("GEARTRAIN_ALLREDUCE_WIRE_DTYPE") or None
        if wire not in (None, "bfloat16", "float16"):
            raise ValueError(f"GEARTRAIN_ALLREDUCE_WIRE_DTYPE is bfloat16 or float16, found {wire!r}")
        on_loss = env.get("GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS", "raise")
        if on_loss not in ON_REDUCER_LOSS:
            raise ValueError(
                f"GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS is {' or '.join(ON_REDUCER_LOSS)}, found {on_loss!r}"
            )
        hierarchical = env.get("GEARTRAIN_ALLREDUCE_HIERARCHICAL", "0") or "0"
        if hierarchical not in ("0", "1"):
            raise ValueError(f"GEARTRAIN_ALLREDUCE_HIERARCHICAL is 0 or 1, found {hierarchical!r}")
        if hierarchical == "1" and on_loss != "raise":
            raise ValueError(
                "GEARTRAIN_ALLREDUCE_ON_REDUCER_LOSS=continue needs connections between all ranks, which "
                "GEARTRAIN_ALLREDUCE_HIERARCHICAL=1 has not: use one of them"
            )
        cuda = env.get("GEARTRAIN_ALLREDUCE_CUDA", "") or "staged"
        if cuda not in ("staged", "nccl"):
            raise ValueError(f"GEARTRAIN_ALLREDUCE_CUDA is staged or nccl, found {cuda!r}")
        return cls(
            cuda=cuda,
            hierarchical=hierarchical == "1",
            on_reducer_loss=on_loss,
            reducers=reducers,
            shares=shares,
            wire_dtype=wire,
            secret=_secret(env),
            epoch=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def of_ranks(self, ranks: Sequence[int], world_size: int) -> BackendOptions:
        """Options for a group of some of the job's ranks. Their shares are scaled to sum 1.

        Args:
            ranks: ranks of the group.
            world_size: ranks of the job.
        """
        return replace(
            self,
            shares=self.shares if isinstance(self.shares, str) else _shares(self._pick("shares", ranks, world_size)),
            rates=None if self.rates is None else self._pick("rates", ranks, world_size),
        )

    def wire_dtype_of(self, dtype: torch.dtype) -> str | None:
        """Dtype in which tensors are sent; None if it is their own.

        Args:
            dtype: of the tensors.
        """
        return self.wire_dtype if dtype == torch.float32 else None

    def _pick(self, what: str, ranks: Sequence[int], world_size: int) -> tuple[float, ...]:
        numbers = tuple(float(number) for number in getattr(self, what))
        owners = world_size + len(self.reducers)
        if len(numbers) != owners:
            raise ValueError(
                f"{what} are one number for each of {world_size} ranks and {len(self.reducers)} reducers, "
                f"found {len(numbers)}"
            )
        return (*(numbers[rank] for rank in ranks), *numbers[world_size:])


def _shares(numbers: tuple[float, ...]) -> str | tuple[float, ...]:
    """Scaled to sum 1; "equal" where the remaining owners had none."""
    total = sum(numbers)
    return tuple(number / total for number in numbers) if total > 0 else "equal"


def _numbers(variable: str, text: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{variable} is numbers separated by commas, found {text!r}") from None


def _secret(env: Mapping[str, str]) -> bytes | None:
    path = env.get("GEARTRAIN_SECRET_FILE")
    if path:
        try:
            return Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"GEARTRAIN_SECRET_FILE: {error}") from error
    given = env.get("GEARTRAIN_SECRET")
    return given.encode() if given else None
