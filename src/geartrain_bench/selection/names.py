"""Names of cases and metrics in a result."""

from __future__ import annotations

from geartrain_bench.selection.uniformity import MOD

P_METRIC = f"equal priorities, upper-half counts by index mod {MOD}: chi2 p"


def short(n: int) -> str:
    """1e6 for 1000000; 256 stays."""
    zeros = len(str(n)) - len(str(n).rstrip("0"))
    return f"{str(n)[:-zeros]}e{zeros}" if zeros >= 4 else str(n)


def case_name(rows: int, batch: int) -> str:
    """A case's name in the result."""
    return f"N {short(rows)}, B {short(batch)}"


def cpu_metric(what: str) -> str:
    """The metric of "sample" or "update" that other load on the machine affects least."""
    return f"{what}, CPU time per row"
