"""Launches a compiled Triton kernel without Triton's lookup of its arguments.

`kernel[grid](...)` inspects every argument to find the matching compiled kernel, which takes longer than the launch.
The match depends on four things: the dtype of each tensor, whether its address is a multiple of 16, the device, and the
constants. Numbers that are not specialized do not count. A `Launch` keeps the compiled kernel of each combination and
passes it the arguments unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Launch:
    """One kernel, whose parameters are tensors, then numbers, then constants.

    Args:
        kernel: a `triton.jit` function, with all of its numbers in `do_not_specialize`.
        constants: those that are the same for every launch.
        options: of the compiler, as `num_warps`.

    Example (on a GPU):
        >>> launch = Launch(mark_kernel, {"BLOCK": 128}, num_warps=4)                    # doctest: +SKIP
        >>> launch(8, marks, (marks, rows), (len(rows),), {"PLACED": True})              # doctest: +SKIP
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._options = options
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        programs: int,
        like: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[Any, ...],
        constants: Mapping[str, Any],
    ) -> None:
        """Launches on the current stream of the device of `like`, which is the current one; returns at once.

        Args:
            programs: how many.
            tensors, numbers: the kernel's parameters but for its constants, in order; tensors may be in mapped memory.
            constants: those of this launch, always with the same names in the same order.
        """
        key = (like.get_device(), *constants.values(), *[(t.dtype, t.data_ptr() & 15 == 0) for t in tensors])
        known = self._compiled.get(key)
        if known is None:
            chosen = self._constants | dict(constants)
            compiled = self._kernel[(programs,)](*tensors, *numbers, **chosen, **self._options)
            if compiled is not None:  # None from the interpreter
                last = tuple(chosen[p.name] for p in self._kernel.params if p.is_constexpr)
                self._compiled[key] = (compiled, last)
            return
        compiled, last = known
        stream = torch._C._cuda_getCurrentRawStream(like.get_device())  # type: ignore[attr-defined]
        compiled[(programs, 1, 1)](*tensors, *numbers, *last, stream=stream)


__all__ = ["Launch"]
