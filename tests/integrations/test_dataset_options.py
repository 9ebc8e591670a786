"""Options of imports: numbers, flags and words of NumPy are those of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from geartrain.integrations.datasets.arguments import checked_options
from geartrain.integrations.datasets.d4rl import D4rlSource
from geartrain.integrations.datasets.images import ImageForm
from geartrain.integrations.datasets.lerobot import LeRobotSource


@pytest.mark.parametrize(
    "options",
    [
        {"tolerance_s": np.float64(1e-3)},
        {"tolerance_s": np.float32(1e-3)},
        {"tolerance_s": np.int64(1)},
        {"threads": np.int64(2)},
        {"image_size": np.array([32, 48])},
        {"image_size": np.int32(32)},
        {"image_layout": np.str_("hwc")},
        {"timeouts": np.True_},
    ],
)
def test_options_are_numbers_of_numpy_too(options: dict[str, Any]) -> None:
    kind = D4rlSource if "timeouts" in options else LeRobotSource
    given = checked_options("it", kind, options, ())
    assert given.keys() == options.keys()
    for name, value in given.items():
        assert not isinstance(value, np.generic)
        assert np.array_equal(value, options[name])
    if kind is LeRobotSource and "image_size" in options:
        assert ImageForm.of(given["image_size"], "hwc").size in ((32, 48), (32, 32))
