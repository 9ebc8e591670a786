"""Benchmark `rpc_rl`: see bench.py."""
