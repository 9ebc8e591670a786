"""What benchmarks share: timing, reports, child processes, baselines."""
