"""TLS without the variables of the caller's environment, and with four threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geartrain.transport.tls import TLS, VARIABLES


@pytest.fixture
def without_tls_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def four(loopback: TLS) -> TLS:
    return replace(loopback, threads=4)
