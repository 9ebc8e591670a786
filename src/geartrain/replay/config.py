"""Configuration of a replay: the arguments of `Replay`, checked once at construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from geartrain.core.arguments import (
    OUTPUT,
    SEED,
    Options,
    check_names_of,
    check_type,
    check_whole,
    checked,
    leave_out,
    optional,
    shown,
)
from geartrain.errors import ArgumentError, ReadOnlyStoreError
from geartrain.ranks.rank_group import RankGroup
from geartrain.replay.batch import Batch
from geartrain.replay.cost import Cost, as_cost
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.distributed.assignment import Assignment
from geartrain.replay.fetch_plan import As, FetchPlan, Pad, check_same_schema
from geartrain.replay.options import MAX_PREFETCH, RankOptions, ReplayOptions
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.transitions import TransitionPlan, Transitions
from geartrain.replay.windows import Windows, as_windows, check_windows
from geartrain.selection.declared import MAX_DRAWS
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Mixture, Selection, strategies_of, with_seeds
from geartrain.selection.strategy import Strategy, traits_of
from geartrain.store.recorder import EPISODES, shares_rows
from geartrain.store.store import Store

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

#: What torch's `DataLoader` takes in a replay's place.
DATASET = "For torch's DataLoader: DataLoader(geartrain.ReplayDataset(replay), batch_size=None)"


class ReplayKeywords(TypedDict, total=False):
    """The keyword arguments of `Replay`, which documents them, for type checkers."""

    fields: Sequence[str] | None
    window: int | Windows | None
    view: Transitions | None
    prefetch: int
    output: As
    num_batches: int | None
    group: ProcessGroup | RankGroup | RankOptions | None
    device: str | torch.device | DeviceOptions | None
    options: ReplayOptions | None


@dataclass(frozen=True, eq=False, repr=False)
class ReplayConfig(Options):
    """The arguments and options of a `Replay`, as its builders take them; see there.

    Attributes:
        fields: names of the fields wanted; where inputs or targets are given, all of those.
        device: where batches go; None for host memory.
        view: what of the rows a batch shows; None for the fields as they are.
        transform: makes of a batch what the replay gives; None for the batch itself.

    Raises:
        ArgumentError: values out of range, or some that do not go together.
    """

    batch_size: int = field(metadata=checked(check_whole, 1, MAX_DRAWS))
    fields: Sequence[str] | None
    window: int | Windows | None
    pad: Pad
    first_only: Sequence[str]
    prefetch: int = field(metadata=checked(check_whole, 0, MAX_PREFETCH))
    output: As = field(metadata=OUTPUT)
    num_batches: int | None
    min_rows: int | None
    min_steps: int | None
    threads: int | None
    timeout_s: float
    inputs: Sequence[str] | None
    targets: Sequence[str] | None
    assignment: Assignment
    balance: str | Cost | None
    device: DeviceOptions | None
    seed: int
    view: Transitions | None
    transform: Callable[[Batch], Any] | None
    update_lag: int | None
    keep: Literal["saved"] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        optional(check_whole, "num_batches", self.num_batches, 0, 2**63 - 1)
        if self.update_lag is not None and self.update_lag < self.prefetch:
            raise ArgumentError(
                "update_lag must be at least prefetch, because batches are drawn that much earlier; found "
                f"update_lag={self.update_lag} with prefetch={self.prefetch}"
            )
        optional(check_names_of, "fields", self.fields)
        if self.device is not None and self.output != "torch":
            raise ArgumentError(
                f"batches on a device are torch tensors, found output={self.output!r}; they support DLPack"
            )
        as_windows(self.window)
        if self.view is not None:
            self._check_view(self.view)
        if self.inputs is not None or self.targets is not None:
            leave_out("inputs and targets name the fields of pipeline stages", fields=self.fields)
            object.__setattr__(self, "inputs", list(self.inputs or ()))
            object.__setattr__(self, "targets", list(self.targets or ()))
            object.__setattr__(self, "fields", list(dict.fromkeys([*(self.inputs or ()), *(self.targets or ())])))

    @property
    def cost(self) -> Cost | None:
        """The cost that replicas have about the same of; None where they have the same number of rows."""
        return as_cost(self.balance)

    @property
    def extra_lag(self) -> int:
        """Batches after which updates take effect, beyond the prefetched ones."""
        return 0 if self.update_lag is None else self.update_lag - self.prefetch

    def _check_view(self, view: Transitions) -> None:
        check_type("a view is a geartrain.Transitions", view, Transitions)
        placed = {"window": self.window, "pad": self.pad != "left" and self.pad}
        leave_out("a view places its own windows and takes all of their steps", **placed, first_only=self.first_only)
        leave_out("views are built in host memory (move batches with batch.to())", device=self.device is not None)
        leave_out("a view has no stages of a pipeline", inputs=self.inputs, targets=self.targets)


def stores_of(store: object) -> list[Store]:
    """The stores of a replay, given as one or as several; raises `ArgumentError` for anything else."""
    if isinstance(store, Store):
        return [store]
    if not isinstance(store, Sequence) or not store or not all(isinstance(each, Store) for each in store):
        raise ArgumentError(f"a replay takes a Store, or a list of them for a Mixture; found {shown(store)}")
    return list(store)


def seeded_selection(stores: Sequence[Store], selection: Selection, seed: int) -> Selection:
    """The selection with all its seeds. Raises `ArgumentError` unless it fits the stores."""
    SEED("seed", seed)
    if isinstance(selection, Mixture):
        if len(selection.strategies) != len(stores):
            raise ArgumentError(
                f"a mixture of {len(selection.strategies)} strategies needs as many stores, found {len(stores)}"
            )
    elif isinstance(selection, type) or not isinstance(selection, Strategy):  # a class has a strategy's attributes
        raise ArgumentError(f"selection must be a strategy such as Uniform(seed=0), found {selection!r}")
    elif len(stores) != 1:
        raise ArgumentError(f"{len(stores)} stores need a Mixture, found {selection!r}")
    return with_seeds(selection, seed)


def make_samplers(stores: Sequence[Store], selection: Selection, config: ReplayConfig) -> list[StoreSampler]:
    """A sampler for each store. Raises `FieldError` or `ArgumentError` where fields do not fit."""
    samplers: list[StoreSampler] = []
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        view = config.view
        fields = config.fields if view is None else view.fields_of(store, config.fields)
        window = as_windows(config.window if view is None else view.window)
        if window is not None and view is None:
            check_windows(window, store, strategy)
        pad = config.pad
        _check_read_only(store, strategy)
        if shares_rows(store.fields):
            _check_shared_rows(store, strategy, window)
            if window is None:  # whole rows are whole episodes there
                window, pad = Windows(store.max_length, at="episode"), "right"
                check_windows(window, store, strategy)
        plan = FetchPlan.make(store, fields, window, pad, config.output, config.threads, config.first_only)
        if samplers:
            check_same_schema([samplers[0].plan, plan])
            plan = plan.of_fields(samplers[0].plan.names)  # stores may have them in another order
        limited = store.options["max_times_sampled"] is not None
        least = config.min_rows
        if least is None:
            least = config.batch_size if limited else 1
        transitions = None if view is None else TransitionPlan(view, plan)
        mixed = isinstance(selection, Mixture)
        samplers.append(
            StoreSampler(
                plan,
                strategy,
                least,
                config.timeout_s,
                transitions=transitions,
                mixed=mixed,
                min_steps=config.min_steps or 0,
                keeps=config.keep is not None,
            )
        )
    return samplers


def _check_read_only(store: Store, strategy: Strategy) -> None:
    """Raises `ReadOnlyStoreError` where draws would have to change a store whose handle changes nothing."""
    if not store.read_only:
        return
    limit = store.options["max_times_sampled"]
    why = None
    if limit is not None:
        why = f"removes a row with its last sample (max_times_sampled={limit})"
    elif store.native.limited:
        why = "has a rate limiter, which counts draws"
    elif callable(traits_of(strategy).alpha):
        why = "would have all of its priorities raised by the schedule of alpha"
    if why is not None:
        raise ReadOnlyStoreError(
            f"the store {store.name!r} {why}, and mode='r' changes nothing: "
            f"Store.open({store.name!r}) opens it for writing"
        )


def _check_shared_rows(store: Store, strategy: Strategy, windows: Windows | None) -> None:
    """Raises `ArgumentError` where batches of rows that hold several episodes would cross from one to the next, or
    would have some steps more often than others."""
    several = f"rows of {store.name!r} hold several episodes (it has the field {EPISODES!r})"
    traits = traits_of(strategy)
    passes = isinstance(strategy, Epochs) and strategy.over == "steps"
    if not (passes or traits.over_steps or (store.per_step and traits.by_priority)):
        raise ArgumentError(
            f"{several}, so steps must be drawn instead of rows: use Uniform(over='steps'), "
            f"Epochs(over='steps'), or Prioritized with priority_per='step'; found {strategy!r}. Without "
            "window= and view= the first two give whole episodes"
        )
    if windows is not None:
        leave_out(f"{several}, which have windows told by every step", stride=windows.stride != 1 and windows.stride)


__all__ = ["ReplayConfig", "ReplayKeywords", "make_samplers", "seeded_selection", "stores_of"]
