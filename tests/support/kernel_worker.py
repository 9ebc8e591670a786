"""Runs the Triton kernels in a process where Triton interprets them, since one process cannot interpret and compile.

`Interpreter` is this side; `python kernel_worker.py` is the other. Arrays cross as NumPy, errors as themselves.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import subprocess
import sys
from typing import Any

import preloaded
from deadlines import patience


class Interpreter:
    """The other process, started when it is first needed."""

    def __init__(self) -> None:
        self._process: Any = None
        self.dropped: list[int] = []  # candidates nobody here needs any more; said with the next question

    def ask(self, *message: Any) -> Any:
        if self._process is None:
            environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            self._process = preloaded.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=False
            )
        assert self._process.stdin
        assert self._process.stdout
        dropped, self.dropped = self.dropped, []
        pickle.dump((dropped, message), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, function: str, *arguments: Any, **named: Any) -> Any:
        """Calls e.g. "weighted_draw.tile_sums" with tensors made from the arrays."""
        return self.ask("call", function, arguments, named)

    def candidates(self, *arrays: Any) -> RemoteCandidates:
        return RemoteCandidates(self, self.ask("new", arrays))

    def numbers(self, total: int, key: tuple[int, int, int], draws: int, strata: int) -> Any:
        """Whole numbers below `total`, from (seed, step, word) and draws 0, 1, 2, ..."""
        return self.ask("numbers", total, key, draws, strata)

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=patience(30))


class RemoteCandidates:
    """A `DeviceCandidates` over there. Every method passes its arguments on."""

    def __init__(self, interpreter: Interpreter, number: int) -> None:
        self._interpreter = interpreter
        self._number = number

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments: self._interpreter.ask("method", self._number, method, arguments)

    def __del__(self) -> None:
        self._interpreter.dropped.append(self._number)


def serve() -> None:
    import numpy as np
    import torch

    import geartrain.device.kernels.weighted_draw as weighted_draw
    from geartrain.device.kernels.candidates import DeviceCandidates

    def to_torch(value: Any) -> Any:
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    def to_numpy(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(to_numpy(part) for part in value)
        return value.numpy().copy() if isinstance(value, torch.Tensor) else value

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    made: dict[int, DeviceCandidates] = {}
    numbers = itertools.count()
    while True:
        try:
            dropped, (kind, *rest) = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for number in dropped:
            del made[number]
        answer: Any = None
        try:
            if kind == "new":
                answer = next(numbers)
                made[answer] = DeviceCandidates(*(to_torch(array) for array in rest[0]))
            elif kind == "numbers":
                total, key, draws, strata = rest
                population = weighted_draw.EveryRow(total, torch.device("cpu"))
                answer = to_numpy(population.draw(weighted_draw.DrawKey(*key), range(draws), strata)[0])
            elif kind == "method":
                answer = to_numpy(getattr(made[rest[0]], rest[1])(*rest[2]))
            else:
                module, name = rest[0].rsplit(".", 1)
                function = getattr(importlib.import_module(f"geartrain.device.kernels.{module}"), name)
                arguments = [to_torch(argument) for argument in rest[1]]
                answer = to_numpy(function(*arguments, **{k: to_torch(v) for k, v in rest[2].items()}))
                if answer is None:  # it works in place
                    answer = tuple(to_numpy(argument) for argument in arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
