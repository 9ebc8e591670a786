"""Shards are saved together, complete everywhere or not there, and come back to any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience
from job_checkpoints import FIELDS, close, load_all, population, put, records, save_all, stores_of

import geartrain as gt
import geartrain.checkpoints.job as shards
from geartrain.checkpoints.job import load_checkpoint, newest_step, save_checkpoint
from geartrain.checkpoints.requests import torchrun_shard
from geartrain.checkpoints.steps import describe_steps
from geartrain.errors import ArgumentError, CheckpointError, RanksDisagreeError, StoreExistsError
from geartrain.tools.testing import ThreadRankGroup, run_ranks

pytestmark = pytest.mark.usefixtures("small_chunks")


# --- saving and loading -----------------------------------------------------------------------------------------


def test_shards_come_back_as_they_were_saved_with_the_replays_state(store_name: Any, tmp_path: Path) -> None:
    state = {"seed": 3, "step": 42, "state": [{"after/0": 5, "after/1": 7}], "exponents": [1.0]}
    with stores_of(store_name, [30, 0, 13]) as stores:
        saved = save_all(stores, tmp_path, state=state)
        assert saved[0].path == tmp_path / "step-00000042" and saved[0].rows == sum(map(len, stores))
        assert sorted(path.name for path in saved[0].path.iterdir()) == [
            "replay.json",
            "shard-00000-of-00003",
            "shard-00001-of-00003",
            "shard-00002-of-00003",
        ]
        loaded = load_all(store_name, tmp_path, 3)
        for (store, found, report), before in zip(loaded, stores, strict=True):
            assert store.keys() == before.keys() and records(store) == records(before) and store.audit() == []
            assert found == state
            assert (report.step, report.rows, report.adopted, report.saved_shards) == (42, len(before), 0, 3)
        close(loaded)


def test_ranks_that_share_a_store_save_it_once_and_share_it_again(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [30, 12]) as stores:
        names = [stores[0].name, stores[0].name, stores[1].name, stores[1].name]

        def save(ranks: ThreadRankGroup) -> Any:
            with gt.Store.open(names[ranks.rank]) as store:
                return save_checkpoint(store, tmp_path, ranks, step=1)

        saved = run_ranks(4, save)
        assert len({(each.rows, each.bytes_written) for each in saved}) == 1
        (step,) = describe_steps(tmp_path)
        assert [shard["ranks"] for shard in step["shards"]] == [[0, 1], [2, 3]]
        fresh = [store_name(), store_name()]

        def load(ranks: ThreadRankGroup) -> Any:
            return load_checkpoint(tmp_path, fresh[ranks.rank // 2], ranks, shard=(ranks.rank // 2, 2))

        loaded = run_ranks(4, load)
        ids = [store.native.describe()["store_id"] for store, _, _ in loaded]
        assert ids[0] == ids[1] and ids[2] == ids[3] and ids[0] != ids[2]
        assert records(loaded[1][0]) == records(stores[0]) and records(loaded[2][0]) == records(stores[1])
        close(loaded)


def test_a_process_alone_needs_no_ranks(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as (store,):
        save_checkpoint(store, tmp_path, step=7)
        loaded, state, report = load_checkpoint(tmp_path, store_name())
        assert state is None and report.shard == (0, 1) and records(loaded) == records(store)
        loaded.close()


def test_a_later_step_writes_what_is_new_and_old_steps_go(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [50, 50]) as stores:
        first = save_all(stores, tmp_path, step=10)[0]
        again = save_all(stores, tmp_path, step=20)[0]
        assert first.bytes_linked == 0 and again.bytes_linked > 0 and again.not_linked is None
        assert again.bytes_linked + again.bytes_written == pytest.approx(first.bytes_written, rel=0.01)
        for store in stores:
            put(store, 7000, 1)
        third = save_all(stores, tmp_path, step=30)[0]
        row = sum(field.block_nbytes(4) for field in FIELDS.values())
        assert third.bytes_written - again.bytes_written == pytest.approx(2 * row, abs=700), "two rows, two entries"
        assert [step["step"] for step in describe_steps(tmp_path)] == [30, 20]
        save_all(stores, tmp_path, step=31, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000031"]
        loaded = load_all(store_name, tmp_path, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        # And what was loaded goes on incrementally.
        onward = save_all([store for store, _, _ in loaded], tmp_path, step=40)[0]
        assert onward.bytes_linked == third.bytes_linked + 2 * row
        close(loaded)


def test_every_host_may_have_its_own_disk(store_name: Any, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    with stores_of(store_name, [20, 30]) as stores:
        for step in (1, 2, 3):
            save_all(stores, disks, step=step)
        for number, disk in enumerate(disks):
            assert [step["step"] for step in describe_steps(disk)] == [3, 2]
            assert [path.name for path in disk.glob("step-00000003/shard-*")] == [f"shard-0000{number}-of-00002"]
        assert (disks[0] / "step-00000003/replay.json").read_bytes() == (
            disks[1] / "step-00000003/replay.json"
        ).read_bytes()
        loaded = load_all(store_name, disks, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        close(loaded)
        with pytest.raises(CheckpointError, match=r"shard-0000\d-of-00002 is missing: shard \d of 2 of step 3"):
            load_all(store_name, [disks[1], disks[0]], 2)  # the hosts have changed places


def test_the_newest_step_is_the_newest_that_is_complete_everywhere(store_name: Any, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    with stores_of(store_name, [20, 30]) as stores:
        for step in (1, 2):
            save_all(stores, disks, step=step)
        (disks[1] / "step-00000002/replay.json").unlink()  # its host died before it wrote it
        assert newest_step(disks[0]) == 2 and newest_step(disks[1]) == 1 and newest_step(tmp_path / "none") is None
        assert run_ranks(2, lambda r: newest_step(disks[r.rank], r)) == [1, 1]
        loaded = load_all(store_name, disks, 2)
        assert [report.step for _, _, report in loaded] == [1, 1]
        with pytest.raises(CheckpointError, match=r"step 2 is not complete on all ranks .* rank 1 has 1"):
            load_all(store_name, disks, 2, step=2)
        save_all([store for store, _, _ in loaded], disks, step=2)  # the same step, once more
        assert [[s["step"] for s in describe_steps(disk)] for disk in disks] == [[2, 1], [2, 1]]
        close(loaded)
        loaded = load_all(store_name, disks, 2)
        assert [report.step for _, _, report in loaded] == [2, 2]
        close(loaded)


def test_a_step_can_be_saved_again(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        put(stores[0], 4000, 3)
        for _ in range(3):
            saved = save_all(stores, tmp_path, step=5)[0]
            assert saved.bytes_linked > 0
        assert len(list((tmp_path / "step-00000005").iterdir())) == 3
        loaded = load_all(store_name, tmp_path, 2)
        assert population([store for store, _, _ in loaded]) == population(stores)
        close(loaded)


def test_a_companion_that_no_rank_has_is_an_error_before_the_step_is_complete(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        with pytest.raises(CheckpointError, match=r"companion .*step-00000001/model does not exist .* save it before"):
            save_all(stores, tmp_path, step=1, companions=["model"])
        assert newest_step(tmp_path) is None
        (tmp_path / "step-00000001").mkdir(exist_ok=True)
        (tmp_path / "step-00000001" / "model").touch()
        save_all(stores, tmp_path, step=1, companions=["model"])
        assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("name", [".", "../other", "/tmp", "a/b", "replay.json", "shard-00000-of-00001"])
def test_a_companion_that_is_no_entry_of_its_own_is_refused(store_name: Any, tmp_path: Path, name: str) -> None:
    with stores_of(store_name, [20]) as stores, pytest.raises(ArgumentError, match="a companion is the name of an"):
        save_all(stores, tmp_path, step=1, companions=[name])


def test_going_back_behind_a_complete_step_has_to_be_said(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        with pytest.raises(CheckpointError, match=r"step 5 .* is newer than step 4 and complete"):
            save_all(stores, tmp_path, step=4)


def test_only_what_belongs_to_a_step_is_removed_with_it(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as stores:
        for step in (1, 2, 3):
            place = tmp_path / f"step-{step:08d}"
            (place / "model").mkdir(parents=True)
            if step == 1:
                (place / "notes.txt").write_text("mine")
            save_all(stores, tmp_path, step=step, keep=1, companions=["model"])
        (tmp_path / "step-00000009").mkdir()  # somebody's, not ours
        save_all(stores, tmp_path, step=4, keep=1)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/[mn]*")) == [
        "step-00000001/notes.txt",
        "step-00000003/model",  # nobody said that it should go
    ]
    assert (tmp_path / "step-00000009").exists() and not (tmp_path / "step-00000002").exists()


# --- what is refused --------------------------------------------------------------------------------------------


def test_another_number_of_shards_must_be_asked_for(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        with pytest.raises(CheckpointError, match="has 2 shards, but 3 were requested: reshard=True"):
            load_all(store_name, tmp_path, 3)


def test_a_failure_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    store_name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=5)
        (chunk, *_) = sorted((tmp_path / "step-00000005" / "shard-00001-of-00002").glob("chunk-*.bin"))
        data = bytearray(chunk.read_bytes())
        data[300] ^= 1
        chunk.write_bytes(data)
        names = [store_name(), store_name()]
        errors: dict[int, Exception] = {}

        def load(ranks: ThreadRankGroup) -> None:
            with pytest.raises(CheckpointError) as caught:
                load_checkpoint(tmp_path, names[ranks.rank], ranks, shard=(ranks.rank, 2))
            errors[ranks.rank] = caught.value

        run_ranks(2, load)
        assert f"{chunk.name} is damaged: block 1 " in str(errors[1])
        assert "failed on rank 1: CheckpointError" in str(errors[0])
        for name in names:
            assert not Path(f"/dev/shm/geartrain.{name}").exists()

        real = shards.save
        others = stores[0].native

        def failing(store: Any, *args: Any, **options: Any) -> Any:
            if store is not others:
                raise OSError(28, "No space left on device")
            return real(store, *args, **options)

        monkeypatch.setattr(shards, "save", failing)

        def save(ranks: ThreadRankGroup) -> None:
            with pytest.raises((CheckpointError, OSError)) as caught:
                save_checkpoint(stores[ranks.rank], tmp_path, ranks, step=6)
            errors[ranks.rank] = caught.value

        run_ranks(2, save)
        assert "No space left" in str(errors[1]) and "failed on rank 1" in str(errors[0])
        assert [step["step"] for step in describe_steps(tmp_path) if step["complete"]] == [5]
        assert not list(tmp_path.glob("step-00000006/*"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"step": 6}, "ranks 0 and 1 differ in step: 5 and 6"),
        ({"state": {"seed": 1}}, "ranks 0 and 1 differ in state"),
        ({"shard": (0, 2)}, "says shard=None|shards must be numbered"),
    ],
)
def test_ranks_that_disagree_are_told_apart(store_name: Any, tmp_path: Path, other: Any, said: str) -> None:
    options = [{"step": 5, "state": {"seed": 0}}, {"step": 5, "state": {"seed": 0}, **other}]
    with stores_of(store_name, [20, 30]) as stores, pytest.raises(RanksDisagreeError, match=said):
        run_ranks(2, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, **options[r.rank]))


def test_another_schema_is_named_by_field_and_ranks(store_name: Any, tmp_path: Path) -> None:
    other = {**FIELDS, "x": gt.Field((2,), "float32")}
    with (
        gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4) as one,
        gt.Store.create(store_name(), other, max_length=4, capacity=4) as two,
    ):
        with pytest.raises(
            RanksDisagreeError, match=r"ranks 0 and 1 have different schemas: field 'x' is Field\(\(2,\)"
        ):
            save_all([one, two], tmp_path, step=1)
    with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4) as one:
        with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=4, remover="lifo") as two:
            with pytest.raises(RanksDisagreeError, match="remover is fifo and lifo"):
                save_all([one, two], tmp_path, step=1)


def test_bad_arguments_are_refused_on_every_rank(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20]) as (store,):
        for options, said in (
            ({}, "a step is a whole number"),
            ({"step": -1}, "a step is a whole number"),
            ({"step": 1, "keep": 0}, "at least one step must be kept"),
            ({"state": {"step": 1, "x": object()}}, "must be JSON"),
        ):
            with pytest.raises(CheckpointError, match=said):
                save_checkpoint(store, tmp_path, **options)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"no step complete on all ranks .* rank 0 has none"):
            load_checkpoint(tmp_path, store_name())
        save_checkpoint(store, tmp_path, step=1)
        name = store_name()
        for options, said in (
            ({"shard": (2, 2)}, "a shard is"),
            ({"shard": (1, 2)}, "no rank loads shard 0"),
            ({"capacity": 5}, "need reshard"),
            ({"max_rows": 5}, "limits come from the checkpoint"),
            ({"reshard": True, "shard": (0, 1), "step": 3}, "step 3 is not complete"),
        ):
            with pytest.raises((CheckpointError, RanksDisagreeError), match=said):
                load_checkpoint(tmp_path, name, **options)  # type: ignore[arg-type]
        with pytest.raises(StoreExistsError):
            load_checkpoint(tmp_path, store.name)
        record = tmp_path / "step-00000001" / "replay.json"
        text = record.read_text()
        record.write_text(text.replace('"step": 1', '"step": 2'))
        with pytest.raises(CheckpointError, match=r"replay\.json is damaged: its checksum"):
            load_checkpoint(tmp_path, name)
        record.write_text(text[:50])
        with pytest.raises(CheckpointError, match=r"replay\.json is damaged: it is not the JSON"):
            load_checkpoint(tmp_path, name)
        record.write_text(text)
        shard = record.parent / "shard-00000-of-00001"
        store.save(shard)  # by hand, so that it is not the one that the step was completed with
        with pytest.raises(CheckpointError, match="is not the checkpoint that step 1 was completed with"):
            load_checkpoint(tmp_path, name)


def test_torchrun_says_which_shard_is_this_hosts() -> None:
    of = torchrun_shard
    assert of({}) == (0, 1)
    assert of({"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "3", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "2"}) == (2, 3)
    assert of({"GROUP_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == (1, 2)
    with pytest.raises(CheckpointError, match="give shard="):
        of({"GROUP_RANK": "1", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4"})


# --- what survived in shared memory -----------------------------------------------------------------------------


def test_steps_are_described_for_people(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, [tmp_path / "a", tmp_path / "b"], state={"seed": 4, "step": 9})
    (tmp_path / "a" / "step-00000012" / "shard-00000-of-00002").mkdir(parents=True)
    newest, complete = describe_steps(tmp_path / "a")
    assert (newest["step"], newest["complete"], newest["shards"]) == (12, False, [])
    assert (complete["step"], complete["complete"], complete["world"]) == (9, True, 2)
    assert complete["state"] == {"seed": 4, "step": 9}
    assert [shard["here"] for shard in complete["shards"]] == [True, False]
    assert json.dumps(complete)


def test_inspect_shows_steps_and_shards(store_name: Any, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    import geartrain.tools.cli.app as app

    with stores_of(store_name, [20, 30]) as stores:
        for step in (8, 9):
            save_all(stores, [tmp_path / "a", tmp_path / "b"], state={"seed": 4, "step": step})
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "a")], env={"COLUMNS": "120"}).stdout
    assert "shard-00000-of-00002" in shown and "step 9, the newest" in shown and "seed 4" in shown
    steps = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--json"]).stdout)
    assert [step["step"] for step in steps] == [9, 8]
    shard = tmp_path / "a" / "step-00000009" / "shard-00000-of-00002"
    assert "of them shared with" in CliRunner().invoke(app, ["inspect", str(shard)]).stdout


# --- processes --------------------------------------------------------------------------------------------------


def test_a_process_group_saves_in_parallel_and_one_of_other_size_loads(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    dist = pytest.importorskip("torch.distributed")
    from geartrain.ranks.torch_rank_group import TorchRankGroup

    def job(number: int, size: int, body: Callable[[Any, int], object]) -> list[int]:
        def run(rank: int) -> None:
            meeting = dist.FileStore(str(tmp_path / f"meeting-{number}"), size)
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size)
            body(dist.group.WORLD, rank)
            dist.destroy_process_group()

        children = [fork(lambda rank=rank: run(rank)) for rank in range(size)]
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    names = [store_name() for _ in range(3)]
    with stores_of(store_name, [20, 30]) as stores:
        rows = population(stores)

        def save(world: Any, rank: int) -> None:
            own = TorchRankGroup(range(4), timeout_s=patience(20.0))
            with gt.Store.open(stores[rank // 2].name) as store:  # two processes a host
                for step, group in enumerate((world, own, world)):
                    assert save_checkpoint(store, tmp_path, group, step=step).rows == len(rows)
            assert newest_step(tmp_path, own) == 2  # it was not closed
            own.close()

        def load(world: Any, rank: int) -> None:
            assert newest_step(tmp_path, group=world) == 2
            some = dist.new_group([0, 1])
            if rank < 2:
                assert newest_step(tmp_path, some) == 2
            else:
                with pytest.raises(ArgumentError, match="this rank is not a member of the group"):
                    newest_step(tmp_path, some)
            store, _, report = load_checkpoint(tmp_path, names[rank], world, shard=(rank, 3), reshard=True)
            assert report.step == 2
            store.close(keep=True)

        assert job(1, 4, save) == [0] * 4
        assert job(2, 3, load) == [0] * 3
        loaded = [gt.Store.open(name, adopt=True) for name in names]
        assert population(loaded) == rows
        for store in loaded:
            store.close()
