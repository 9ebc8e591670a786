"""Stands for NIXL's wheel in tests: put `tests/support/simulated_nixl` on the path."""
