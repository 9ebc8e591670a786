"""Benchmark `online_rl`: see bench.py."""
