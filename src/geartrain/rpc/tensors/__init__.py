"""Tensors in calls and results: device maps, transfer channels, registered memory."""
