"""Benchmark `fetch`: see bench.py."""
