"""Expected writers of a store: writers that are starting and have not opened the store yet."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from geartrain.core.lifetime import Closing

if TYPE_CHECKING:
    pass


class ExpectedWriters(Closing, elsewhere="they are expected by replays of this process"):
    """Writers that the replays of a store handle wait for; made by `Writers.expect`. Any thread may call it.

    Attributes:
        trouble: a description of the writers' problem, for error messages of waits. Empty while there is none.
        failure: the error after which no more rows come; None while rows may come.
    """

    def __init__(self, among: list[ExpectedWriters]) -> None:
        self.trouble = ""
        self.failure: BaseException | None = None
        self._among = among
        among.append(self)

    def give_up(self, failure: BaseException, trouble: str) -> None:
        """No rows will come. Waits that have nothing else to wait for end with this."""
        self.trouble, self.failure = trouble, failure

    def close(self) -> None:
        """They are no longer expected."""
        with suppress(ValueError):  # closed before
            self._among.remove(self)


class Writers:
    """The writers that one store handle expects, in addition to the processes that have the store open."""

    def __init__(self) -> None:
        self._all: list[ExpectedWriters] = []

    def expect(self) -> ExpectedWriters:
        """Has the waits of this handle's replays take it that rows will come, until the result is closed."""
        return ExpectedWriters(self._all)

    @property
    def expected(self) -> bool:
        """Whether rows may come from writers that need not have the store open yet."""
        return any(each.failure is None for each in self._all.copy())

    @property
    def failure(self) -> BaseException | None:
        """The error that writers have given up with; None where none have."""
        return next((each.failure for each in self._all.copy() if each.failure is not None), None)

    @property
    def trouble(self) -> str:
        """The writers' problem, to append to an error's text; empty if there is none."""
        return "".join(f"; {each.trouble}" for each in self._all.copy() if each.trouble)


__all__ = ["ExpectedWriters", "Writers"]
