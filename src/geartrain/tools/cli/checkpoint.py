"""`geartrain checkpoint`: saves a store once, or at intervals while its job runs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from geartrain.core.shared_files import Trust, check_trust
from geartrain.core.threads import sleep
from geartrain.errors import ArgumentError, GeartrainError, StoreMissingError
from geartrain.store.checkpoint_series import holding, save_next
from geartrain.store.checkpoint_writer import Saved
from geartrain.store.store import Store
from geartrain.tools.cli.app import Terminated, app, ended_by_sigterm, escape, out, print_error
from geartrain.tools.cli.checks import output_folder
from geartrain.tools.cli.inspect_remove import TRUST_HELP

_LONGEST_S = 366 * 86400.0
#: How often a store that is not there is looked for.
_LOOK_S = 1.0


@app.command()
def checkpoint(
    name: Annotated[str, typer.Argument(help="A store's name or path.")],
    path: Annotated[
        Path,
        typer.Argument(
            callback=output_folder, help="A directory for checkpoints: one a save, and `latest`, which leads to it."
        ),
    ],
    every: Annotated[
        str | None, typer.Option(help="Save again and again: 30s, 10m, 2h or 1d. Without it once.", show_default=False)
    ] = None,
    keep: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many checkpoints stay; older ones are removed.")
    ] = 3,
    trust: Annotated[str, typer.Option(help=TRUST_HELP)] = "user",
) -> None:
    """Save a store beside the job that uses it, once or --every 10m; only what is new is written.

    It does not join the store, but for the time of a save if rows have axes, strings or tasks: it holds up nobody, and
    no end of it, of the job or of the machine leaves half a checkpoint. With --every it goes on when the job ends and
    waits for the store to come back, until Ctrl-C or SIGTERM; what fails is one line on stderr, and is tried again at
    the next time. A store in which nothing happened is not saved.

    Example: geartrain checkpoint pendulum /data/pendulum --every 10m --keep 5
    """
    from geartrain.tools.plan.units import parse_seconds

    trusted = check_trust(trust)
    every_s = None if every is None else parse_seconds(every)
    if every_s is not None and not 0.1 <= every_s <= _LONGEST_S:
        raise ArgumentError(f"--every is a time like 30s, 10m, 2h or 1d, found {every!r}")
    with contextlib.ExitStack() as looked:
        if every_s is None:
            looked.enter_context(Store.open(name, mode="r", adopt=True, trust=trusted))  # before a directory is made
        with holding(path):
            if every_s is None:
                if saved := _save(name, path, keep, trusted, None)[1]:
                    _show(saved)
            else:
                with ended_by_sigterm():
                    _save_every(name, path, keep, trusted, every_s)


def _save_every(name: str, path: Path, keep: int, trust: Trust, every_s: float) -> None:
    due_s, seen, waits = time.monotonic(), None, False
    while True:
        saved = None
        try:
            seen, saved = _save(name, path, keep, trust, seen)
            waits = False
        except StoreMissingError as error:
            if not waits:
                print_error(f"waiting for the store: {error}")
            waits = True
        except ArgumentError:
            raise
        except (GeartrainError, OSError) as error:
            print_error(str(error) or type(error).__name__)
        if saved is not None:
            try:
                _show(saved)
            except (OSError, SystemExit) as error:  # rich's of a broken pipe: nobody reads, and saving goes on
                if (end := _hidden_end(error)) is not None:
                    raise end from None
        now_s = time.monotonic()
        if waits:
            sleep(min(_LOOK_S, every_s))
            due_s = time.monotonic()
        else:
            due_s += every_s * max(1, -((due_s - now_s) // every_s))  # those that a slow save has missed are left out
            sleep(due_s - now_s)


def _hidden_end(error: BaseException | None) -> BaseException | None:
    """The Ctrl-C or SIGTERM in whose place it came: rich writes what it has as it is left, which fails again."""
    while error is not None and not isinstance(error, KeyboardInterrupt | Terminated):
        error = error.__context__
    return error


def _save(name: str, path: Path, keep: int, trust: Trust, seen: object) -> tuple[object, Saved | None]:
    """Saves unless the store is as it was; what to compare it with the next time, and the figures of the save."""
    with Store.open(name, mode="r", adopt=True, trust=trust) as store:
        tasks = None if store.plan is None else store.native.task_state()
        state = (store.id, store.native.next_sequence(), store.native.counters(), tasks)
        if state == seen:
            return state, None
        if store.plan is None:
            return state, save_next(store, path, keep)
    # Rows under way are looked at with the lock, which a process of the store alone can take.
    joined = Store.open(name, adopt=True, trust=trust)
    try:
        return state, save_next(joined, path, keep)
    finally:
        joined.close(keep=True)  # what a job that was killed meanwhile has left is adopted by its next run


def _show(saved: Saved) -> None:
    out.print(
        f"{escape(str(saved.path))}: {saved.rows:,} rows, {saved.bytes_written / 1e6:,.1f} MB written, "
        f"{saved.bytes_linked / 1e6:,.1f} MB linked, {saved.seconds:.2f} s"
        + (f"; {saved.left_out:,} rows were overwritten meanwhile" if saved.left_out else "")
        + (f"; not linked: {escape(saved.not_linked)}" if saved.not_linked else ""),
        soft_wrap=True,
    )
