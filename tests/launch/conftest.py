"""Fixtures for the tests of launching."""

from __future__ import annotations

import pytest
from launch_jobs import TESTS

from geartrain import launch


@pytest.fixture
def job(store_name):
    """Jobs of a name of their own, whose processes find the tests."""

    def make(*roles, **options):
        return launch.Job(store_name(), roles, **{"timeout_s": 60, "directory": str(TESTS), **options})

    return make
