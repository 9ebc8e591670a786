"""Capacity planning (`geartrain plan`): predicts a cluster's throughput from constants measured on one machine."""

from geartrain.tools.plan.machine import DEFAULTS, Constants, measure
from geartrain.tools.plan.replay import ARMS, Checked, Cluster, Prediction, check, moved_rows, predict, surplus_rows

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
