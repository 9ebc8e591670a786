"""What the messages between nodes are: questions go to the side that listened, answers back.

HELLO        the caller's name, first of all
CALL         (name of a function, args, kwargs)
CALL_OBJECT  (function, args, kwargs) with a pickled function: between peers that proved they know the secret
TELL         as CALL; nobody waits for an answer
CANCEL       the call with the same tag is given up; nothing else
RESULT       what the function returned
ERROR        (type's name, text, traceback), three strings
"""

from __future__ import annotations

HELLO, CALL, CALL_OBJECT, TELL, CANCEL, RESULT, ERROR = range(1, 8)
