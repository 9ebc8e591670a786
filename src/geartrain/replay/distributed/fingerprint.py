"""Fingerprint of a job's configuration: a 32-bit checksum.

The ranks compare it before the first batch and with every batch.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from geartrain.replay.distributed.messages import PROTOCOL
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.state import as_text, describe_strategy
from geartrain.replay.transitions import Transitions
from geartrain.replay.windows import FIRST_STEP
from geartrain.selection.mixture import Selection


def describe_job(
    parts: Sequence[StoreSampler], selection: Selection, batch_size: int, view: Transitions | None = None
) -> dict[str, Any]:
    """The configuration that all ranks must have alike to draw the same batches, by name."""
    job: dict[str, Any] = {
        "protocol": PROTOCOL,
        "seed": int(selection.seed or 0),
        "strategy": describe_strategy(selection),
        "batch_size": int(batch_size),
    }
    if view is not None:
        job["view"] = as_text(view)
    for number, part in enumerate(parts):
        which = f" of store {number}" if len(parts) > 1 else ""
        plan, options = part.plan, part.plan.store.options
        job |= {f"window{which}": plan.window, f"pad{which}": "left" if plan.pad_left else "right"}
        if plan.windows is not None and not plan.windows.plain:
            job[f"windows{which}"] = as_text(plan.windows)
        first = sorted(name for name, steps in plan.taken.items() if steps == FIRST_STEP)
        if first:
            job[f"first_only{which}"] = first
        job[f"min_rows{which}"] = int(part.min_rows)
        job[f"min_steps{which}"] = int(part.min_steps)
        if part.step_plan is not None:
            steps = part.step_plan  # of rows as long as they can be in every shard
            job[f"steps{which}"] = list(steps if steps.after else steps[:4])
        for name in ("priority_fraction_bits", "priority_per", "max_times_sampled", "max_age_s"):
            job[f"{name}{which}"] = options[name]
        if plan.store.plan is not None:
            rows = plan.store.plan
            job[f"axes{which}"] = [dataclasses.astuple(axis) for axis in rows.axes]
            job[f"tasks{which}"] = {task: list(described.after) for task, described in rows.tasks.items()}
            job |= {f"field {name!r}{which}": repr(field) for name, field in rows.fields.items()}
            continue
        for name, spec in plan.store.fields.items():
            job[f"field {name!r}{which}"] = (
                f"{spec.dtype} {spec.block_shape(plan.store.max_length)}{' without time' if spec.per_row else ''}"
            )
    return job


def fingerprint_of(job: Mapping[str, Any]) -> int:
    """A 32-bit checksum of a configuration."""
    return zlib.crc32(json.dumps(job, sort_keys=True).encode())


__all__ = ["describe_job", "fingerprint_of"]
