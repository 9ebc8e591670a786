"""The benchmark of many clients counts the calls that were answered, and refuses what cannot be dealt evenly."""

from __future__ import annotations

import sys

import pytest

import geartrain_bench.messages.many_clients as many_clients


def test_calls_of_every_client_are_counted_and_the_servers_time_is_told():
    rate, cpu_us = many_clients.measure("geartrain", "shm", clients=4, processes=2, seconds=0.2)
    assert rate * 0.2 >= 4  # a call of each at least
    assert (rate * 0.2) % 2 < 1e-6 or 2 - (rate * 0.2) % 2 < 1e-6  # whole rounds of both connections of a process
    assert cpu_us >= 0


def test_clients_that_are_not_dealt_evenly_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["many_clients", "--clients", "10", "--processes", "4"])
    with pytest.raises(SystemExit):
        many_clients.main()
    assert "10 clients are not dealt evenly to 4 processes" in capsys.readouterr().err
