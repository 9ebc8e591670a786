"""Benchmark `messages`: see bench.py."""
