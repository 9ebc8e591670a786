"""Uses torch's operators once in advance, so that a fork does not interrupt their first use.

    find_operators()  # before a thread of geartrain's makes tensors

torch looks up an operator at its first use, without the GIL. The lookup counts the readers of a table, and takes a
guard that other threads wait for. If another thread forks at this moment, the child keeps the count and the guard for
ever. The child then hangs at its own first use of an operator. It can also hang at its end, when torch's libraries
leave the tables (`c10::Dispatcher::cleanup`).

`find_operators` therefore uses the operators that batches need once, and a fork waits until it is done. It does not
cover operators that only the program uses.
"""

from __future__ import annotations

import os
import threading

import numpy as np

#: Held during first uses, for less than a millisecond. Reentrant, because a signal handler may fork then.
_looking = threading.RLock()
_found = False

os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


def find_operators() -> None:
    """Uses the operators that batches need, once in a process. Needs torch."""
    global _found
    if _found:
        return
    import torch

    with _looking:
        if _found:
            return
        array = torch.from_numpy(np.zeros(8, np.uint8))
        tensor = torch.full((8,), 1, dtype=torch.uint8)
        tensor.copy_(array)
        tensor.numpy()
        torch.as_tensor(array)
        torch.empty(8, dtype=torch.uint8).fill_(0)
        torch.zeros(8, dtype=torch.uint8)
        torch.empty_like(tensor)
        torch.utils.dlpack.from_dlpack(np.zeros(8, np.uint8))
        words = tensor.view(torch.int32).view(2, 1)
        words[0], words[0:1], words[:, 0], words.reshape(-1), words.narrow(0, 0, 1)
        words[torch.zeros(1, dtype=torch.int64)]
        words.as_strided((1,), (1,)), words.expand(2, 1), words.unsqueeze(0), words.squeeze(-1)
        words.to(torch.float32), words.to("cpu"), words.clone(), words.detach(), words.contiguous()
        _found = True


__all__ = ["find_operators"]
