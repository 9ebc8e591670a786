"""Benchmark: two builds of geartrain in turn."""
