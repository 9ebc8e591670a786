"""Benchmark `llm`: see bench.py."""
