"""Benchmark `distributed_replay`: see bench.py."""
