"""Command `python -m geartrain.integrations.di_engine ditask ...`."""

from __future__ import annotations

import sys

from geartrain.integrations.di_engine.ditask import main

if sys.argv[1:2] == ["ditask"]:
    main(sys.argv[2:])
else:
    sys.exit("usage: python -m geartrain.integrations.di_engine ditask [options of ditask]")
