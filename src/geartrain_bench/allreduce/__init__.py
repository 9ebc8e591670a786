"""Benchmark `allreduce`: see bench.py."""
