"""Message kinds of the RPC protocol. The side that connected sends calls, the side that listened sends replies.

HELLO        the client's name, the first message of a connection
CALL         (name of a function, args, kwargs)
CALL_OBJECT  (function, args, kwargs) with a pickled function: between peers that proved they know the secret
TELL         as CALL, without a reply
CANCEL       cancels the call with the same tag
RESULT       what the function returned
ERROR        (type's name, text, traceback), three strings

If the bit OUT_OF_BAND is set, the value is a pair (value, bundles). The bundles describe tensors that are transferred
out of band (tensors/endpoint.py).

The kind of a call also contains its timeout, in the bits above the lowest eight. The unit is a hundredth of a second,
counted from the call's arrival. The server cancels the call at that time, even if it gets no CANCEL.
"""

from __future__ import annotations

from functools import lru_cache

HELLO, CALL, CALL_OBJECT, TELL, CANCEL, RESULT, ERROR = range(1, 8)
OUT_OF_BAND = 0x80
#: Bits of a kind without `OUT_OF_BAND` and timeout.
KIND = 0x7F

_TIMEOUT_BITS = 24


class _TimeoutBits(dict[float, int]):
    """The bits of a call's kind for each timeout, in seconds. The longest that fits is 46 hours."""

    def __missing__(self, timeout_s: float) -> int:
        bits = min(max(int(timeout_s * 100) + 1, 1), (1 << _TIMEOUT_BITS) - 1) << 8
        if len(self) < 256:
            self[timeout_s] = bits
        return bits


timeout_bits = _TimeoutBits()


@lru_cache(maxsize=256)
def timeout_in(word: int) -> float:
    """The timeout in a call's kind, in seconds; infinite where it has none."""
    return (word >> 8) / 100 or float("inf")
