"""Importing: what every format has in common."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from imports import assert_rows, imported, rows, store_name

from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, MissingDependencyError, SourceError, StoreExistsError, StoreMissingError
from geartrain.integrations import Episode, Source, import_dataset, ingest, open_source
from geartrain.integrations.datasets.episode import choose, flatten
from geartrain.store.store import Store


class Toy(Source):
    """Episodes of the given lengths; `odd` replaces some of them."""

    name = "toy"

    def __init__(self, lengths: list[int], odd: dict[int, Episode] | None = None) -> None:
        self.lengths, self.odd, self.passes = lengths, odd or {}, 0

    def __iter__(self) -> Iterator[Episode]:
        self.passes += 1
        for index, length in enumerate(self.lengths):
            yield self.odd.get(index, self.episode(index, length))

    @staticmethod
    def episode(index: int, length: int) -> Episode:
        obs = np.arange((length + 1) * 3, dtype=np.float32).reshape(length + 1, 3) + 1000 * index
        timed = {"obs": obs[:length], "action": np.arange(length) + index}
        return Episode(f"episode {index}", timed, {"final_obs": obs[length]}, {"final_obs": "obs"})


def expected(source: Toy, lengths: list[int] | None = None) -> list[dict[str, np.ndarray]]:
    return [{**episode.timed, **episode.untimed} for episode in source if lengths is None or episode.length in lengths]


def test_an_import_holds_every_step_of_every_episode() -> None:
    source = Toy([4, 1, 7])
    with imported(source) as store:
        assert store.max_length == 7
        assert store.capacity == 3
        assert store.fields["obs"] == Field((3,), "float32")
        assert store.fields["final_obs"] == Field((3,), "float32", per_row=True)
        assert_rows(store, expected(source))


def test_knowing_the_size_beforehand_saves_a_pass() -> None:
    source = Toy([4, 1, 7])
    with imported(source, capacity=10, max_length=8) as store:
        assert source.passes == 2  # the first episode for the schema, then all of them
        assert (store.capacity, store.max_length, len(store)) == (10, 8, 3)


def odd(**arrays: np.ndarray) -> Episode:
    """Episode 2 of a toy source, with some fields replaced."""
    episode = Toy.episode(2, 5)
    timed = {**episode.timed, **{k: v for k, v in arrays.items() if k != "final_obs"}}
    untimed = {"final_obs": arrays.get("final_obs", episode.untimed["final_obs"])}
    return Episode("episode 2", timed, untimed)


@pytest.mark.parametrize(
    ("episode", "found", "fits"),
    [
        (odd(obs=np.zeros((5, 4), np.float32)), r"field 'obs' has steps of shape \(4,\)", r"\(3,\)"),
        (odd(obs=np.zeros((5, 3), np.float64)), "field 'obs' has dtype float64", "holds float32"),
        (odd(obs=np.full((5, 3, 0), np.nan, np.float32)), r"shape \(3, 0\)", r"holds \(3,\)"),
        (odd(obs=np.zeros((4, 3), np.float32)), "disagree about its length", "'action': 5"),
        (odd(final_obs=np.zeros(4, np.float32)), r"field 'final_obs' has shape \(4,\)", r"\(3,\)"),
        (odd(reward=np.zeros(5)), "has the fields action, final_obs, obs, reward", "final_obs, obs"),
        (odd(obs=np.array(["a"] * 5)), "field 'obs' has steps", "holds"),
    ],
)
def test_an_episode_that_does_not_fit_is_named(episode: Episode, found: str, fits: str) -> None:
    name = store_name()
    with pytest.raises(SourceError, match=f"toy: episode 2: .*{found}.*{fits}"):
        import_dataset(Toy([4, 6, 5, 3], {2: episode}), name, progress=False)
    with pytest.raises(StoreMissingError):
        Store.open(name)


def test_an_episode_that_is_too_long_is_named_with_what_would_help() -> None:
    with pytest.raises(SourceError, match=r"episode 1: has 9 steps, .* holds 5\. .*max_length=9"):
        import_dataset(Toy([4, 9, 5]), store_name(), max_length=5, progress=False)


def test_episodes_that_are_too_long_can_be_left_out() -> None:
    source = Toy([4, 9, 5])
    with imported(source, max_length=5, on_too_long="skip") as store:
        assert_rows(store, expected(source, [4, 5]))


def test_a_truncated_episode_ends_with_the_observation_after_its_last_step() -> None:
    whole = Toy.episode(0, 9)
    with imported(Toy([9]), max_length=5, on_too_long="truncate") as store:
        (row,) = rows(store)
    assert row["obs"].tobytes() == whole.timed["obs"][:5].tobytes()
    assert row["final_obs"].tobytes() == whole.timed["obs"][5].tobytes()


def test_episodes_without_a_step_are_left_out_and_counted(tmp_path: Path) -> None:
    schema = {"obs": Field((3,), "float32"), "action": Field((), "int64")}
    schema["final_obs"] = Field((3,), "float32", per_row=True)
    store = Store.create(store_name(), schema, max_length=5, capacity=4)
    report = ingest(Toy([3, 0, 2, 9]), store, on_too_long="skip", progress=False)
    assert (report.episodes, report.steps, report.empty, report.too_long) == (2, 5, 1, 1)
    assert report.nbytes == 5 * (12 + 8) + 2 * 12
    assert "1 without a step left out" in str(report)
    store.unlink()
    store.close()


def test_a_store_that_is_too_small_is_an_error_and_not_an_eviction() -> None:
    with pytest.raises(SourceError, match=r"episode 2: the store is full \(2 rows\)"):
        import_dataset(Toy([3, 3, 3]), store_name(), capacity=2, progress=False)


@pytest.mark.parametrize("fault", [RuntimeError("the disk is gone"), KeyboardInterrupt()])
def test_a_failed_import_leaves_nothing_behind(fault: BaseException) -> None:
    class Failing(Toy):
        def __iter__(self) -> Iterator[Episode]:
            for episode in super().__iter__():
                if episode.name == "episode 2":
                    raise fault
                yield episode

    name = store_name()
    with pytest.raises(type(fault)):
        import_dataset(Failing([3, 3, 3]), name, capacity=3, max_length=3, progress=False)
    with pytest.raises(StoreMissingError):
        Store.open(name)


def test_an_interrupt_that_keeps_the_creation_from_returning_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = Store.create

    def interrupted(*given: object, **options: object) -> Store:
        made.append(create(*given, **options))
        raise KeyboardInterrupt  # as of a signal that came while the native code was at work

    made: list[Store] = []
    monkeypatch.setattr(Store, "create", interrupted)
    name = store_name()
    with pytest.raises(KeyboardInterrupt):
        import_dataset(Toy([3]), name, capacity=3, max_length=3, persist=True, progress=False)
    made.pop().close()
    with pytest.raises(StoreMissingError):
        Store.open(name)


def test_an_import_does_not_touch_a_store_that_is_there_already() -> None:
    with imported(Toy([4, 2])) as store:
        with pytest.raises(StoreExistsError):
            import_dataset(Toy([5]), store.name, progress=False)
        assert len(store) == 2


def test_a_destination_that_looks_like_a_file_and_lacks_the_slash_is_told_from_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"{store_name()}.gt"
    with import_dataset(Toy([4, 2]), name, progress=False):
        assert f"the file in this directory is './{name}'" in caplog.text
        with pytest.raises(StoreExistsError, match=rf"the file in this directory is '\./{name}'"):
            import_dataset(Toy([5]), name, progress=False)


def test_a_place_where_no_store_can_be_is_refused_before_the_data_is_read(tmp_path: Path) -> None:
    source = Toy([4, 2])
    with pytest.raises(StoreMissingError, match="is no directory"):
        import_dataset(source, tmp_path / "none" / "store", progress=False)
    with imported(Toy([1])) as store, pytest.raises(StoreExistsError):
        import_dataset(source, store.name, progress=False)
    assert source.passes == 0


def test_a_store_in_a_file_stays_when_it_is_closed(tmp_path: Path) -> None:
    source = Toy([4, 2])
    import_dataset(source, tmp_path / "store", progress=False).close()
    with Store.open(tmp_path / "store") as store:
        assert_rows(store, expected(source))


def test_values_change_their_dtype_only_when_asked() -> None:
    class Doubles(Toy):
        @staticmethod
        def episode(index: int, length: int) -> Episode:
            return Episode(f"episode {index}", {"obs": np.linspace(0, 1, length)})

    with imported(Doubles([4]), cast="float64=float32") as store:
        assert store.fields["obs"].dtype == "float32"
        assert_rows(store, [{"obs": np.linspace(0, 1, 4).astype(np.float32)}])
    with imported(Doubles([4])) as store:
        assert store.fields["obs"].dtype == "float64"


def test_a_source_without_episodes_is_refused() -> None:
    with pytest.raises(SourceError, match="toy has no episode"):
        import_dataset(Toy([]), store_name(), progress=False)


def test_fields_are_chosen_renamed_and_taken_with_all_below_them() -> None:
    available = {"obs.state": None, "obs.image": None, "action": None, "task": "text"}
    default = ["obs.state", "action"]
    assert choose("x", None, available, default) == {"obs.state": "obs.state", "action": "action"}
    assert choose("x", "obs", available, default) == {
        "obs.state": "obs.state",
        "obs.image": "obs.image",
    }
    assert choose("x", ["o=obs", "a=action"], available, default) == {
        "o.state": "obs.state",
        "o.image": "obs.image",
        "a": "action",
    }
    assert choose("x", {"act": "action"}, available, default) == {"act": "action"}
    with pytest.raises(SourceError, match=r"has no field 'reward'; it has action, obs\.image"):
        choose("x", ["reward"], available, default)
    with pytest.raises(SourceError, match="stored as 'a'"):
        choose("x", ["a=obs.state", "a=action"], available, default)


def test_what_cannot_be_stored_is_refused_with_what_can() -> None:
    available = {"obs": None, "task": "text"}
    with pytest.raises(SourceError, match=r"task \(text\).*skip_unsupported.*can be stored: obs"):
        choose("x", None, available, list(available))
    assert choose("x", None, available, list(available), skip_unsupported=True) == {"obs": "obs"}


def test_nested_values_are_flattened_with_dots() -> None:
    flat = flatten({"obs": {"x": 1, "pair": (2, 3)}, "action": 4})
    assert flat == {"obs.x": 1, "obs.pair.0": 2, "obs.pair.1": 3, "action": 4}


def test_a_path_of_no_known_format_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(SourceError, match="has no known format") as caught:
        open_source(tmp_path)
    for looked_for in ("codebase_version", "features.json", "terminals", "data_format", ".npz"):
        assert looked_for in str(caught.value)
    with pytest.raises(SourceError, match=r"none does not exist$"):  # a slip of the pen needs no list of formats
        open_source(tmp_path / "none")


def test_unknown_formats_and_options_are_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"format is one of 'auto', 'minari', .* found 'zarr'"):
        open_source(tmp_path, format="zarr")
    with pytest.raises(ArgumentError, match="arrays importer has no option split; it has lengths"):
        open_source({"obs": np.zeros((2, 3))}, split="train")
    with pytest.raises(ArgumentError, match=r"on_too_long is one of .*found 'cut'"):
        import_dataset(Toy([1]), "never", on_too_long="cut")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("package", "format", "extra"),
    [
        ("h5py", "d4rl", "hdf5"),
        ("minari", "minari", "minari"),
        ("pyarrow.parquet", "lerobot", "lerobot"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    package: str, format: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what an absent package looks like to import
    with pytest.raises(MissingDependencyError, match=rf"pip install 'geartrain\[{extra}\]'"):
        open_source(tmp_path, format=format)


def test_no_optional_package_is_imported_before_it_is_needed() -> None:
    importlib.import_module("geartrain.integrations")
    import subprocess

    script = (
        "import sys, geartrain.integrations as i\n"
        "for m, _ in i.FORMATS.values(): __import__(m)\n"
        "print([m for m in ('torch','h5py','minari','pyarrow','google.protobuf','rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_an_import_can_be_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with imported(Toy([3])):
        pass
    assert capfd.readouterr() == ("", "")


def test_an_import_says_what_it_did(capfd: pytest.CaptureFixture[str]) -> None:
    store = import_dataset(Toy([3, 5]), store_name())
    store.unlink()
    store.close()
    assert "toy: 2 episodes, 8 steps" in capfd.readouterr().err


def test_the_command_line_imports_and_says_why_it_cannot(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    import geartrain.tools.cli.app as app

    source = {"obs": np.arange(24.0).reshape(2, 4, 3), "lengths": np.array([4, 2])}
    np.savez(tmp_path / "data.npz", **source)
    command = ["import", str(tmp_path / "data.npz"), "--into", str(tmp_path / "store")]
    refused = CliRunner().invoke(app, [*command, "--max-length", "3"])
    assert refused.exit_code == 1
    assert "episode 0: has 4 steps" in refused.output
    assert not (tmp_path / "store").exists()
    done = CliRunner().invoke(app, [*command, "--cast", "float64=float32", "--field", "x=obs"])
    assert done.exit_code == 0, done.output
    with Store.open(tmp_path / "store") as store:
        assert_rows(store, [{"x": source["obs"][i, :n].astype(np.float32)} for i, n in enumerate((4, 2))])
