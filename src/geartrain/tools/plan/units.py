"""Parses and prints units of links, bytes and times as people write them: 8x100Gbit, 1.2GB, 0.1ms."""

from __future__ import annotations

import math
import re

from geartrain.errors import ArgumentError

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+"
_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RATE = re.compile(rf"({_NUMBER})\s*([kmgt]?i?)(bit|bps|b)(?:/s)?", re.IGNORECASE)
_BYTES = re.compile(rf"({_NUMBER})\s*([kmgt]?i?)b?", re.IGNORECASE)
_TIME = re.compile(rf"({_NUMBER})\s*([a-z]+)", re.IGNORECASE)
#: More members than this are a slip of the keyboard.
MOST_MEMBERS = 100_000


def parse_links(text: str) -> tuple[float, ...]:
    """Rates of links in bytes a second: "8x100Gbit", "1x100Mbit+3x400Mbit", "4x12.5GB/s"; "" or "0" for none.

    Bits are decimal (1 Gbit is 1e9 bits), as networks count them; "B" is bytes, "GiB" 2**30 of them.

    Raises:
        ArgumentError: it is none of these.
    """
    if text.strip() in ("", "0", "none"):
        return ()
    rates: list[float] = []
    for part in text.split("+"):
        count, times, rate = part.strip().rpartition("x")
        if times and not (count.strip().isascii() and count.strip().isdigit()):
            raise ArgumentError(f"links are written like 8x100Gbit or 1x100Mbit+3x400Mbit, found {text!r}")
        number = int(count) if times else 1
        if len(rates) + number > MOST_MEMBERS:
            raise ArgumentError(f"at most {MOST_MEMBERS:,} members, found {text!r}")
        rates += [parse_rate(rate)] * number
    return tuple(rates)


def parse_rate(text: str) -> float:
    """Bytes a second: "100Gbit", "100Gbit/s", "12.5GB/s"."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(f"a rate is a number and a unit, such as 100Mbit, 25Gbit or 3GB/s; found {text!r}")
    number, prefix, unit = found.groups()
    rate = float(number) * _PREFIXES[prefix.lower()] / (1.0 if unit == "B" else 8.0)
    if not 0 < rate < math.inf:
        raise ArgumentError(f"a rate is above zero, found {text!r}")
    return rate


def parse_bytes(text: str) -> float:
    """Bytes: "1.2GB", "16MiB", "4096"."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ArgumentError(f"bytes are a number with or without a unit, such as 1.2GB, 16MiB or 4096; found {text!r}")
    return float(found[1]) * _PREFIXES[found[2].lower()]


def parse_seconds(text: str) -> float:
    """Seconds: "0.1ms", "40 ms", "0.2s", "10m", "1h", "1d"; "0"."""
    if text.strip() == "0":
        return 0.0
    found = _TIME.fullmatch(text.strip())
    if found is None or found[2].lower() not in _TIMES:
        raise ArgumentError(f"a time is a number and one of {', '.join(_TIMES)}, such as 0.1ms or 10m; found {text!r}")
    seconds = float(found[1]) * _TIMES[found[2].lower()]
    if math.isinf(seconds):
        raise ArgumentError(f"a time is finite, found {text!r}")
    return seconds


def bytes_text(nbytes: float) -> str:
    """A number of bytes for people, three digits that count."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.3g} B"


def rate_text(rate: float) -> str:
    """A rate in bits a second, as networks are sold."""
    for scale, unit in ((1e12, "Tbit"), (1e9, "Gbit"), (1e6, "Mbit"), (1e3, "kbit")):
        if 8 * rate >= scale:
            return f"{8 * rate / scale:.4g} {unit}/s"
    return f"{8 * rate:.4g} bit/s"


def seconds_text(seconds: float) -> str:
    """A time for people, three digits that count."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
