"""Fixtures for the tests of launching."""

from __future__ import annotations

import pytest
from launch_jobs import TESTS
from launched_hosts import HostsJob

from geartrain import launch


@pytest.fixture
def job(store_name):
    """Jobs of a name of their own, whose processes find the tests."""

    def make(*roles, **options):
        return launch.Job(store_name(), roles, **{"timeout_s": 60, "directory": str(TESTS), **options})

    return make


@pytest.fixture
def hosts_job(tmp_path):
    """Jobs on emulated hosts: called with the number of hosts, the description and what is filled in."""
    made = []

    def make(n, text, **options):
        made.append(HostsJob(n, tmp_path, text, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
