"""Checkpoints of any content: reading one ends in an error of geartrain, or in a store that adds up."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from json_damage import mutate
from tasked_stores import in_all_states

import geartrain as gt
from geartrain.errors import CheckpointError, GeartrainError
from geartrain.store.checkpoint_format import json_checksum
from geartrain.store.checkpoint_reader import Checkpoint

FIELDS = {"x": gt.Field((2,), "float32"), "id": gt.Field((), "int64", per_row=True)}


def refit(directory: Path, manifest: dict[str, Any]) -> None:
    """Makes sizes and checksums of the files right again, as somebody who knows the format would."""
    for name, about in manifest["files"].items():
        data = (directory / name).read_bytes()
        size = about["piece_bytes"]
        about["bytes"] = len(data)
        about["crc32"] = [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]


def damage(directory: Path, chance: random.Random) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    kind = chance.randrange(6)
    if kind == 0:  # of bytes
        path = directory / chance.choice(("manifest.json", *manifest["files"]))
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randint(0, len(data))] if chance.random() < 0.3 else data)
        return
    if kind == 1:  # of a table, with checksums that fit
        tables = [name for name in ("rows.bin", "parts.bin", *manifest["files"]) if name in manifest["files"]]
        table = chance.choice(tables) if "parts.bin" in tables else "rows.bin"
        data = bytearray((directory / table).read_bytes())
        for _ in range(chance.randint(1, 3)):
            at = 4 * chance.randrange(len(data) // 4)
            data[at : at + 4] = chance.choice((0, 1, 5, 7, 8, 2**31, 2**32 - 1)).to_bytes(4, "little")
        if chance.random() < 0.2:
            data = data[:-48]
        (directory / table).write_bytes(data)
        refit(directory, manifest)
    else:
        mutate(manifest, chance)
        if chance.random() < 0.3:
            with contextlib.suppress(KeyError, TypeError, AttributeError, OSError, ValueError):
                refit(directory, manifest)
    manifest.pop("checksum", None)
    text = json.dumps({**manifest, "checksum": json_checksum(manifest)})
    (directory / "manifest.json").write_text(text)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> list[Path]:
    """A checkpoint of this version, one of two chunks, and two of a store with tasks."""
    root = tmp_path_factory.mktemp("checkpoints")
    with gt.Store.create(FIELDS, max_length=3, capacity=8, remover="lowest_priority", max_age_s=1e8) as store:
        store.insert({"x": np.ones((5, 3, 2), "float32"), "id": np.arange(5)})
        store.save(root / "one")
        store.insert({"x": np.ones((5, 3, 2), "float32"), "id": np.arange(5)})
        store.save(root / "two", base=root / "one")
    with in_all_states() as store:
        store.save(root / "tasks")
    return [
        root / "one",
        root / "two",
        root / "tasks",
        root / "tasks",
    ]


@pytest.mark.parametrize(
    ("seed", "runs"), [(1, 400), pytest.param(2, 20_000, marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_a_checkpoint_of_any_content_is_an_error_or_a_store(names, originals, tmp_path, seed, runs):
    ended: collections.Counter[str] = collections.Counter()
    for number in range(runs):
        chance = random.Random(f"{seed} {number}")
        directory = tmp_path / "damaged"
        shutil.copytree(chance.choice(originals), directory)
        damage(directory, chance)
        try:
            with gt.Store.load(directory, names()) as store:
                assert store.audit() == [], number
                keys = store.keys()
                assert len(store.status(keys)["length"]) == len(keys)
                for task in list(store.tasks)[:-1]:
                    with store.claim(task, 100) as claim:
                        for name in store.plan.fields_of(0) if claim else ():
                            claim[name]
                if store.plan is not None and len(keys):
                    gt.fetch(store, keys)
                store.save(tmp_path / "again", base=directory)
                shutil.rmtree(tmp_path / "again")
            ended["loaded"] += 1
        except GeartrainError as error:
            ended[type(error).__name__] += 1
        except Exception as error:
            raise AssertionError(f"run {number} of seed {seed}") from error
        with contextlib.suppress(GeartrainError):
            found = Checkpoint(directory)
            if found.plan is None:
                records = found.records()
                for _ in found.blocks(records):
                    pass
        shutil.rmtree(directory)
    assert ended["CheckpointError"] > runs // 2 and ended["loaded"] > runs // 50, ended


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["options"].update(capacity="8"), "capacity is '8'"),
        (lambda m: m["options"].update(capacity=2**40), "capacity is 1099511627776"),
        (lambda m: m["options"].update(colour="red"), "options has 'colour'"),
        (lambda m: m.update(rows=9), "rows is 9"),
        (lambda m: m.pop("files"), "files is None"),
        (lambda m: m["files"].update({"../secret": m["files"]["rows.bin"]}), "'../secret', which is not the name"),
        (lambda m: m["files"]["rows.bin"].update(piece_bytes=0), "piece_bytes is 0"),
        (lambda m: m["files"]["rows.bin"].update(bytes=57), "checksums for 57|must have 448 bytes"),
        (lambda m: m["fields"][0].update(shape=[3, 2**20]), "which are no whole rows of"),
        (lambda m: m["fields"][0].update(dtype="object"), "dtype 'object' cannot be stored"),
        (lambda m: m["chunks"][0].update(file="absent"), "'absent' must have"),
        (lambda m: m.update(fields=[]), "at least one field"),
    ],
)
def test_an_entry_that_cannot_be_is_named(names, originals, tmp_path, change, message):
    directory = tmp_path / "damaged"
    shutil.copytree(originals[0], directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("checksum")
    change(manifest)
    (directory / "manifest.json").write_text(json.dumps({**manifest, "checksum": json_checksum(manifest)}))
    with pytest.raises(CheckpointError, match=message) as raised:
        gt.Store.load(directory, names())
    assert str(directory / "manifest.json") in str(raised.value)
