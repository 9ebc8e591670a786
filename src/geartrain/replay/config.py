"""Configuration of a replay: what `Replay` was asked for, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.core.arguments import check_whole
from geartrain.errors import ArgumentError
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.distributed.assignment import ASSIGNMENTS, Assignment
from geartrain.replay.fetch import As, FetchPlan, Pad, check_same_schema
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.transitions import Transitions
from geartrain.selection.mixture import Mixture, Selection, strategies_of, with_seeds
from geartrain.selection.strategy import Strategy, check_seed
from geartrain.store.store import Store


@dataclass(frozen=True)
class ReplayConfig:
    """The arguments of a `Replay`, as its builders take them; see there.

    Attributes:
        fields: names of the fields wanted; where inputs or targets are given, all of those.
        device: where batches go; None for host memory.
        view: what of the rows a batch shows; None for the fields as they are.

    Raises:
        ArgumentError: values out of range, or some that do not go together.
    """

    batch_size: int
    fields: Sequence[str] | None = None
    window: int | None = None
    pad: Pad = "left"
    prefetch: int = 2
    output: As = "torch"
    num_batches: int | None = None
    min_rows: int | None = None
    threads: int | None = None
    timeout_s: float = 60.0
    inputs: Sequence[str] | None = None
    targets: Sequence[str] | None = None
    assignment: Assignment = "local_first"
    device: DeviceOptions | None = None
    seed: int = 0
    view: Transitions | None = None

    def __post_init__(self) -> None:
        for what, value, least in (
            ("batch_size", self.batch_size, 1),
            ("prefetch", self.prefetch, 0),
            ("min_rows", 1 if self.min_rows is None else self.min_rows, 1),
            ("num_batches", 0 if self.num_batches is None else self.num_batches, 0),
        ):
            if check_whole(what, value) < least:
                raise ArgumentError(f"{what} must be at least {least}, found {value}")
        if self.window is not None:
            check_whole("window", self.window)
        if self.threads is not None:
            check_whole("threads", self.threads)
        if not 0 <= self.timeout_s <= 1e9:
            raise ArgumentError(f"timeout_s must be from 0 to 1e9 seconds, found {self.timeout_s}")
        if self.assignment not in ASSIGNMENTS:
            raise ArgumentError(f"assignment is one of {', '.join(ASSIGNMENTS)}, found {self.assignment!r}")
        if self.device is not None and self.output != "torch":
            raise ArgumentError(
                f"batches on a device are torch tensors, found output={self.output!r}; they support DLPack"
            )
        check_seed(self.seed)
        if self.view is not None:
            self._check_view(self.view)
        if self.inputs is not None or self.targets is not None:
            if self.fields is not None:
                raise ArgumentError("give fields, or inputs and targets, not both")
            object.__setattr__(self, "inputs", list(self.inputs or ()))
            object.__setattr__(self, "targets", list(self.targets or ()))
            object.__setattr__(self, "fields", list(dict.fromkeys([*(self.inputs or ()), *(self.targets or ())])))

    def _check_view(self, view: Transitions) -> None:
        if not isinstance(view, Transitions):
            raise ArgumentError(f"a view is a geartrain.Transitions, found {view!r}")
        if self.window is not None or self.pad != "left":
            raise ArgumentError("a view places its own windows: leave out window and pad")
        if self.device is not None:
            raise ArgumentError("views are made in host memory: leave out device, and move batches with batch.to()")
        if self.inputs is not None or self.targets is not None:
            raise ArgumentError("a view has no inputs and targets of pipeline stages: give fields")


def seeded_selection(stores: Sequence[Store], selection: Selection, seed: int) -> Selection:
    """The selection with all its seeds. Raises `ArgumentError` unless it fits the stores."""
    if isinstance(selection, Mixture):
        if len(selection.strategies) != len(stores):
            raise ArgumentError(f"a mixture of {len(selection.strategies)} needs as many stores, found {len(stores)}")
    elif not isinstance(selection, Strategy):
        raise ArgumentError(f"selection must be a strategy such as Uniform(seed=0), found {selection!r}")
    elif len(stores) != 1:
        raise ArgumentError(f"{len(stores)} stores need a Mixture, found {selection!r}")
    return with_seeds(selection, seed)


def make_samplers(stores: Sequence[Store], selection: Selection, config: ReplayConfig) -> list[StoreSampler]:
    """A sampler for each store. Raises `FieldError` or `ArgumentError` where the fields do not fit."""
    samplers: list[StoreSampler] = []
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        view = config.view
        fields = config.fields if view is None else view.fields_of(store, config.fields)
        window = config.window if view is None else view.window
        plan = FetchPlan.make(store, fields, window, config.pad, config.output, config.threads)
        if samplers:
            check_same_schema([samplers[0].plan, plan])
        limited = store.options["max_times_sampled"] is not None
        least = (config.batch_size if limited else 1) if config.min_rows is None else config.min_rows
        samplers.append(StoreSampler(plan, strategy, least, config.timeout_s, ahead=0 if view is None else view.n_step))
    return samplers


__all__ = ["ReplayConfig", "make_samplers", "seeded_selection"]
