"""What the messages between nodes are: questions go to the side that listened, answers back.

HELLO        the caller's name, first of all
CALL         (name of a function, args, kwargs)
CALL_OBJECT  (function, args, kwargs) with a pickled function: between peers that proved they know the secret
TELL         as CALL; nobody waits for an answer
CANCEL       the call with the same tag is given up; nothing else
RESULT       what the function returned
ERROR        (type's name, text, traceback), three strings

With the bit BESIDE the value is (value, groups of tensors that travel beside it): devices.py.
The kind of a question has its deadline in the bits above the lowest eight, in hundredths of a second from its arrival:
the side that answers gives it up then, whether its caller still says so or not.
"""

from __future__ import annotations

HELLO, CALL, CALL_OBJECT, TELL, CANCEL, RESULT, ERROR = range(1, 8)
BESIDE = 0x80

_LIMIT_BITS = 24


def limited(kind: int, timeout_s: float) -> int:
    """A question's kind with its deadline; the longest that fits is 46 hours."""
    return kind | min(max(int(timeout_s * 100) + 1, 1), (1 << _LIMIT_BITS) - 1) << 8


def kind_and_limit(word: int) -> tuple[int, float]:
    """The kind, and seconds until it is given up; infinite where it has none."""
    return word & 0x7F, (word >> 8) / 100 or float("inf")
