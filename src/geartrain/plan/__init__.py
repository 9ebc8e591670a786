"""What a cluster that is not here would do, from what was measured here: `geartrain plan`."""

from geartrain.plan.constants import DEFAULTS, Constants, measure
from geartrain.plan.ranks import ARMS, Checked, Cluster, Prediction, check, moved_rows, predict, surplus_rows

__all__ = [
    "ARMS",
    "DEFAULTS",
    "Checked",
    "Cluster",
    "Constants",
    "Prediction",
    "check",
    "measure",
    "moved_rows",
    "predict",
    "surplus_rows",
]
