"""Benchmark `selection`: see bench.py."""
