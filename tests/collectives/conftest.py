"""What several tests of this folder are given."""

from speaking import processes  # noqa: F401, a fixture
