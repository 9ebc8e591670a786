"""Arguments of `geartrain bench allreduce`: its parts, and options of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from geartrain.core.arguments import check_choice, check_pair
from geartrain.errors import ArgumentError

PARTS = ("shaped", "slow-link", "delay", "loopback", "ddp", "throughput")
#: Only these need no hosts.
ON_LOOPBACK = ("loopback",)
MOST_RANKS = 256
#: What `--quick` measures where no part is named: the others take minutes.
QUICK_PARTS = ("shaped", "loopback")


@dataclass(frozen=True)
class Asked:
    """What the arguments ask for; `baidu` are libraries of baidu-allreduce by the MPI that they need."""

    parts: tuple[str, ...]
    baidu: dict[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    profile: bool = False


def read(arguments: Sequence[str], *, quick: bool = False) -> Asked:
    """The arguments. Raises `ArgumentError`."""
    parser = argparse.ArgumentParser(
        prog="geartrain bench allreduce",
        description="All-reduce over shaped networks and loopback. Further options: --quick, --full, --json FILE, "
        "--plot FILE, --baseline-python mpich=PYTHON, --baseline-python openmpi=PYTHON.",
    )
    parser.add_argument(
        "--part",
        action="append",
        help=f"{', '.join(PARTS)} or all; repeat for several. By default all, with --quick {' and '.join(QUICK_PARTS)}",
    )
    parser.add_argument("--baidu", action="append", default=[], metavar="MPI=LIBRARY", help="mpich=/path/to/it.so")
    parser.add_argument("--ranks", help="of the part loopback: 2,8", metavar="N,N")
    parser.add_argument("--profile", action="store_true", help="of the part loopback: where the time of a call goes")
    given = parser.parse_args(list(arguments))
    default = list(QUICK_PARTS) if quick else ["all"]
    parts = tuple(dict.fromkeys(part for word in given.part or default for part in word.split(",")))
    if "all" in parts:
        parts = PARTS
    for part in parts:
        check_choice("--part", part, (*PARTS, "all"))
    baidu = {}
    for word in given.baidu:
        mpi, library = check_pair("--baidu", word, "MPI=LIBRARY, such as mpich=/path/to/libbaidu.so")
        if not Path(library).is_file():
            raise ArgumentError(f"--baidu {mpi}: there is no file {library!r}")
        baidu[mpi] = str(Path(library).resolve())
    ranks = () if given.ranks is None else tuple(_ranks(word) for word in given.ranks.split(","))
    if (ranks or given.profile) and "loopback" not in parts:
        raise ArgumentError("--ranks and --profile are for the part loopback, which is not among those asked for")
    return Asked(parts, baidu, ranks, given.profile)


def _ranks(word: str) -> int:
    if word.isascii() and word.isdigit() and 2 <= int(word) <= MOST_RANKS:
        return int(word)
    raise ArgumentError(f"--ranks takes numbers from 2 to {MOST_RANKS}, such as 2,8, found {word!r}")
