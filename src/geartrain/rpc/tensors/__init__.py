"""Tensors in calls and results: device maps, transfer paths, registered memory."""
