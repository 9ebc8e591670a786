"""Benchmark `store`: see bench.py."""
