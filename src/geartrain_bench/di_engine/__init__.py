"""Benchmark `di_engine`: see bench.py."""
