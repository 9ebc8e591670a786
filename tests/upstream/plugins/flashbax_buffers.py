"""pytest plug-in: flashbax's flat, prioritised flat and trajectory buffers are geartrain's, where tests make them.

Substituted are the functions that users call, in the package and in the module of each; flashbax's own buffers, which
call each other's, stay as they are. Each case tells in the report how many it has made ("substituted").
"""

from __future__ import annotations

import functools
from typing import Any

import flashbax
import pytest
import substitutions
from flashbax.buffers import flat_buffer, prioritised_flat_buffer, trajectory_buffer

from geartrain.integrations import jax as ours

MODULES = {
    "make_flat_buffer": flat_buffer,
    "make_prioritised_flat_buffer": prioritised_flat_buffer,
    "make_trajectory_buffer": trajectory_buffer,
}


def counted(make: Any) -> Any:
    @functools.wraps(make)
    def made(*arguments: Any, **names: Any) -> Any:
        substitutions.count += 1
        return make(*arguments, **names)

    return made


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(substitutions.Hooks("buffer"))
    for name, module in MODULES.items():
        make = counted(getattr(ours, name))
        setattr(module, name, make)
        setattr(flashbax, name, make)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"substituted: {substitutions.count} buffers of geartrain's were made, flashbax from {flashbax.__path__[0]}"
    )
