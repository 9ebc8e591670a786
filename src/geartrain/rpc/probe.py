"""Functions that every node registers so that `geartrain doctor --peer` can test the connection to it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.errors import ArgumentError
from geartrain.rpc.caller import Caller
from geartrain.rpc.registry import function

ABOUT, TAKE, GIVE = "geartrain.rpc.about", "geartrain.rpc.take", "geartrain.rpc.give"
#: The largest result of `GIVE`.
MOST_BYTES = 64 << 20


def _about(caller: Caller) -> dict[str, Any]:
    return {
        "name": caller.node.name,
        "host": platform.node(),
        "pid": os.getpid(),
        "cores": _native.available_cores(),
        "geartrain": metadata.version("geartrain"),
    }


def _take(array: Any) -> int:
    return int(array.nbytes)


def _give(nbytes: int) -> Any:
    if not 0 <= nbytes <= MOST_BYTES:
        raise ArgumentError(f"0 to {MOST_BYTES:,} bytes can be asked for, found {nbytes!r}")
    return np.zeros(nbytes, np.uint8)


function(name=ABOUT, with_caller=True)(_about)
function(name=TAKE)(_take)
function(name=GIVE)(_give)
