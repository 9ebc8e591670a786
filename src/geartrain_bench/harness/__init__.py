"""Benchmark harness: timing, reports, child processes, baselines."""
