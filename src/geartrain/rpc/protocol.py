"""Kinds of messages between nodes. The side that connected sends calls, the side that listened sends replies.

HELLO        the client's name, the first message of a connection
CALL         (name of a function, args, kwargs)
CALL_OBJECT  (function, args, kwargs) with a pickled function: between peers that proved they know the secret
TELL         as CALL, without a reply
CANCEL       cancels the call with the same tag
RESULT       what the function returned
ERROR        (type's name, text, traceback), three strings

With the bit OUT_OF_BAND the value is (value, bundles of tensors that are transferred out of band): tensors/endpoint.py.
The kind of a call has its timeout in the bits above the lowest eight, in hundredths of a second from its arrival: the
server cancels the call then, whether the client still says so or not.
"""

from __future__ import annotations

from functools import lru_cache

HELLO, CALL, CALL_OBJECT, TELL, CANCEL, RESULT, ERROR = range(1, 8)
OUT_OF_BAND = 0x80
#: Bits of a kind without `OUT_OF_BAND` and timeout.
KIND = 0x7F

_TIMEOUT_BITS = 24


@lru_cache(maxsize=256)
def with_timeout(kind: int, timeout_s: float) -> int:
    """A call's kind with its timeout; the longest that fits is 46 hours."""
    return kind | min(max(int(timeout_s * 100) + 1, 1), (1 << _TIMEOUT_BITS) - 1) << 8


@lru_cache(maxsize=256)
def timeout_in(word: int) -> float:
    """The timeout in a call's kind, in seconds; infinite where it has none."""
    return (word >> 8) / 100 or float("inf")
