"""LeRobot's replay buffer over a store: what was added is what is sampled, by whichever process."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from lerobot_transitions import IMAGE, STATE, check, fill, make, state

from geartrain.errors import (
    ArgumentError,
    EmptyBufferError,
    IncompatibleStoreError,
    SchemaError,
    StaleKeyError,
    StoreClosedError,
)
from geartrain.integrations.lerobot import (
    ReplayBuffer,
    concatenate_batch_transitions,
    random_crop_vectorized,
    random_shift,
)


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Draws are seeded from torch's global generator."""
    torch.manual_seed(0)


@pytest.mark.parametrize("optimize_memory", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_transitions_are_those_that_were_added(optimize_memory, cut):
    with make(optimize_memory=optimize_memory) as buffer:
        fill(buffer, 400, cut=cut)
        batch = buffer.sample(256)
        t = check(batch)
        over = t % 56 == 6  # 7 steps, and the next episode begins 50 after the last one
        assert over.any()
        assert torch.equal(batch["truncated" if cut else "done"], over.float())
        assert not batch["done" if cut else "truncated"].any()
        assert batch["complementary_info"] is None
        assert torch.equal(batch["next_state"][IMAGE][:, 0, 0, 0], ((t + 1) % 200) / 255)
        assert len(buffer) == buffer.size == 300
        assert buffer.position == 100


def test_every_transition_is_equally_likely():
    with make(64) as buffer:
        fill(buffer, 200, length=9)
        drawn = torch.cat([buffer.sample(50)["state"][STATE][:, 0] for _ in range(400)])
        values, counts = torch.unique(drawn, return_counts=True)
        assert 64 <= len(values) <= 64 + 64 // 8 + 3 * 16
        expected = len(drawn) / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < len(values) + 6 * (2 * len(values)) ** 0.5


def test_the_same_seed_draws_the_same():
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        with make() as buffer:
            fill(buffer, 100)
            found.append([buffer.sample(200)["reward"], buffer.sample(32)["reward"]])
    assert all(map(torch.equal, *found))


def test_a_batch_is_as_large_as_the_buffer_at_most():
    with make() as buffer:
        with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
            buffer.sample(1)
        for steps in range(1, 20):
            fill(buffer, 1, first=steps * 100)
            assert len(check(buffer.sample(1000))) == steps == len(buffer)
        assert buffer._draws._replays == {}, "a replay for every size that there was"


def test_columns_are_what_was_added_at_a_position():
    with make(20) as buffer:
        fill(buffer, 30, length=100)
        newest = torch.tensor([*range(20, 30), *range(10, 20)], dtype=torch.float32)
        assert torch.equal(buffer.states[STATE][:, 0], newest)
        assert torch.equal(buffer.next_states[STATE][:][:, 0], newest + 1)
        assert torch.equal(buffer.rewards[5:15], newest[5:15] / 2)
        assert torch.equal(buffer.actions[torch.tensor([3, -1])][:, 0], newest[[3, -1]])
        assert buffer.actions[4, 0] == 24
        assert (buffer.actions.shape, len(buffer.actions)) == ((20, 2), 20)
        assert buffer.dones[3].dtype == torch.bool
        assert not np.asarray(buffer.truncateds).any()
    with make(20) as buffer:
        fill(buffer, 3, length=100)
        assert torch.equal(buffer.rewards[:5], torch.tensor([0, 0.5, 1, 0, 0]))
    with make(20) as buffer:
        fill(buffer, 30, length=100)
        buffer.store.delete(buffer.store.keys()[:1])  # the first 16
        assert buffer.rewards[20 - 1] == 19 / 2
        with pytest.raises(StaleKeyError):
            buffer.rewards[10]


def test_infos_are_kept_as_the_first_transition_has_them():
    with make() as buffer:
        for t in range(30):
            infos = {"penalty": torch.tensor([float(t)]), "intervention": t % 2 == 0}
            given = (state(t), torch.tensor([[t, 1.0]]), t / 2, state(t + 1), False, False)
            if t == 10:
                with pytest.warns(UserWarning, match=r"dropped.*complementary_info\[new\]"):
                    buffer.add(*given, {**infos, "new": 1.0})
            elif t == 20:
                buffer.add(*given, None)
            else:
                buffer.add(*given, infos)
        batch = buffer.sample(500)
        t, infos = check(batch), batch["complementary_info"]
        there = t != 20
        assert torch.equal(infos["penalty"], torch.where(there, t, 0))
        assert torch.equal(infos["intervention"], ((t % 2 == 0) & there).float())
        assert buffer.complementary_info_keys == ["penalty", "intervention"]
        assert torch.equal(buffer.complementary_info["penalty"][:3], torch.arange(3.0))
        with pytest.raises(ArgumentError, match="Unsupported type"):
            buffer.add(*given, {"penalty": "much", "intervention": 0})


def test_bytes_stay_bytes_in_the_store_and_are_floats_in_batches():
    image = torch.arange(48, dtype=torch.uint8).reshape(1, 3, 4, 4)
    with ReplayBuffer(100, "cpu", use_drq=False) as buffer:
        for t in range(10):
            here, there = {IMAGE: image + t}, {IMAGE: image + t + 1}
            buffer.add(here, torch.tensor([0.5], dtype=torch.float64), 1.0, there, False, False)
        assert buffer.store.fields[f"obs.{IMAGE}"].dtype == "uint8"
        batch = buffer.sample(40)
        assert batch["state"][IMAGE].dtype == torch.float32
        assert torch.equal(batch["next_state"][IMAGE], batch["state"][IMAGE] + 1)
        assert batch["action"].dtype == torch.float32
        with pytest.raises(SchemaError, match="uint8"):
            buffer.add({IMAGE: image / 255}, torch.zeros(1), 1.0, {IMAGE: image / 255}, False, False)


def test_tensors_of_any_kind_are_taken():
    base = torch.arange(6.0)
    with ReplayBuffer(100, "cpu") as buffer:
        for given in (base, base.double(), base.bfloat16(), base.requires_grad_(), torch.arange(12.0)[::2] / 2):
            buffer.add({"a": given}, given.long(), torch.tensor([1.0]), {"a": given}, torch.tensor(False), False)
        assert len(torch.unique(buffer.sample(50)["state"]["a"], dim=0)) == 1


def test_images_are_augmented_and_what_is_none_is_not():
    def brightened(images: torch.Tensor) -> torch.Tensor:
        assert images.shape[1:] == (3, 4, 4)
        return images + 10

    with make(use_drq=True, image_augmentation_function=brightened) as buffer:
        fill(buffer, 50)
        batch = buffer.sample(32)
        t = check(batch)
        for name, step in (("state", 0), ("next_state", 1)):
            assert torch.allclose(batch[name][IMAGE][:, 2, 3, 3], 10 + (t + step) % 200 / 255)


def test_shifts_repeat_the_border_and_differ_between_images():
    images = torch.arange(36.0).reshape(1, 1, 6, 6).repeat(200, 2, 1, 1)
    shifted = random_shift(images, pad=np.int64(1))
    assert shifted.shape == images.shape
    rows, columns = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    possible = {
        tuple(images[0, 0][(rows + dy).clamp(0, 5), (columns + dx).clamp(0, 5)].reshape(-1).tolist())
        for dy in (-1, 0, 1)
        for dx in (-1, 0, 1)
    }
    assert {tuple(each[0].reshape(-1).tolist()) for each in shifted} == possible
    assert torch.equal(shifted[:, 0], shifted[:, 1]), "channels of an image go together"
    assert random_crop_vectorized(images, (2, 3)).shape == (200, 2, 2, 3)
    with pytest.raises(ValueError, match=r"Requested crop size .* is bigger than the image size"):
        random_crop_vectorized(images, (7, 3))
    for wrong in (images[0], np.zeros((1, 1, 6, 6))):
        with pytest.raises(ArgumentError, match="B, C, H, W"):
            random_shift(wrong)
    with pytest.raises(ArgumentError, match="pad"):
        random_shift(images, -1)


def test_no_array_of_the_buffers_size_is_outside_the_store():
    image, steps = (3, 32, 32), 600
    tracemalloc.start()
    try:
        buffer = ReplayBuffer(steps, "cpu", optimize_memory=True)
        here = torch.zeros(image)
        for t in range(steps):
            there = torch.full(image, (t + 1) % 250 / 255)
            buffer.add({IMAGE: here}, torch.zeros(4), 0.0, {IMAGE: there}, t % 100 == 99, False)
            here = there
        buffer.sample(4)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    frames = steps * 4 * 3 * 32 * 32
    assert most < frames / 4
    assert kept < 500_000
    assert buffer.store.nbytes < 1.4 * frames, "frames are stored more than once"
    tensors = [each for each in vars(buffer).values() if isinstance(each, (torch.Tensor, np.ndarray))]
    assert tensors == []  # tracemalloc does not see those of torch
    buffer.close()


OTHER = """
import sys
import torch
from geartrain.integrations.lerobot import ReplayBuffer
buffer = ReplayBuffer(500, "cpu", ["a"], store=sys.argv[1], writers=2)
assert len(buffer) == 100
batch = buffer.sample(3000)
assert len(batch["reward"]) == 100
assert torch.equal(batch["next_state"]["a"], batch["state"]["a"] + 1)
assert set(batch["reward"].tolist()) <= set(range(100)), "not what the other process added"
assert torch.equal(batch["done"], (batch["reward"] == 99).float())
for t in range(5000, 5100):
    buffer.add({"a": torch.full((3,), float(t))}, torch.zeros(2), t, {"a": torch.full((3,), t + 1.0)}, False, False)
assert (buffer.position, len(buffer)) == (100, 200)
"""


def test_two_processes_add_to_one_buffer_and_read_the_same_transitions(tmp_path):
    name = f"lerobot-{tmp_path.name}-{id(tmp_path)}"
    with ReplayBuffer(500, "cpu", ["a"], store=name, writers=2) as reader:
        assert len(reader) == 0
        with pytest.raises(EmptyBufferError):
            reader.sample(2)
        with ReplayBuffer(500, "cpu", ["a"], store=name, writers=2) as buffer:
            for t in range(100):
                here, there = {"a": torch.full((3,), float(t))}, {"a": torch.full((3,), t + 1.0)}
                buffer.add(here, torch.zeros(2), t, there, t == 99, False)
            script = tmp_path / "other.py"
            script.write_text(OTHER)
            other = preloaded.run([sys.executable, str(script), name], timeout=patience(100))
            assert other.returncode == 0, other.stderr
            assert len(reader) == len(buffer) == 200
            batch = reader.sample(200)
            assert torch.equal(batch["next_state"]["a"], batch["state"]["a"] + 1)
            assert buffer.position == 100
            assert reader.position == 0
            assert torch.equal(buffer.rewards[:100], torch.arange(100.0))
            with ReplayBuffer(30, "cpu", store=name) as other_capacity:
                with pytest.raises(IncompatibleStoreError, match="capacity"):
                    len(other_capacity)
            with ReplayBuffer(500, "cpu", store=name) as other_shapes:
                with pytest.raises(SchemaError, match="shape"):
                    other_shapes.add({"a": torch.zeros(4)}, torch.zeros(2), 0, {"a": torch.zeros(4)}, False, False)
            beside = ReplayBuffer(500, "cpu", store=buffer.store)
            assert len(beside.sample(64)["reward"]) == 64
            beside.close()
            assert len(buffer) == 200, "a store that was given is its owner's"
        path = reader.store.path
    assert not path.exists()


def wait_for_threads(count):
    """Waits until so many threads sample ahead."""
    until_s = time.monotonic() + patience(20)
    while sum(each.name.startswith("geartrain-lerobot-prefetch") for each in threading.enumerate()) != count:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_iterators_go_on_for_ever_and_their_threads_end():
    with make() as buffer:
        for async_prefetch in (True, False):
            with pytest.raises(EmptyBufferError):
                next(buffer.get_iterator(8, async_prefetch))
        fill(buffer, 50)
        wait_for_threads(0)
        iterator, waiting = buffer.get_iterator(8, queue_size=1), buffer.get_iterator(8)
        for _ in range(7):
            assert len(check(next(iterator))) == 8
        wait_for_threads(2)
        iterator.close()
        iterator.close()
        with pytest.raises(StopIteration):
            next(iterator)
        del waiting  # which waits for nothing
        wait_for_threads(0)
        plain = buffer.get_iterator(8, async_prefetch=False)
        assert sum(len(check(next(plain))) for _ in range(3)) == 24
        plain.close()
        with pytest.raises(StopIteration):
            next(plain)
        last = buffer.get_iterator(8)
    with pytest.raises(StoreClosedError):
        for _ in range(5):
            next(last)
    with pytest.raises(ArgumentError, match="queue_size"):
        buffer.get_iterator(8, queue_size=0)


def test_batches_are_appended_in_place():
    with make() as first, make() as second:
        fill(first, 20, p=1.0)
        fill(second, 20, first=900)
        left, right = first.sample(8), second.sample(4)
        found = concatenate_batch_transitions(left, right)
        assert found is left
        assert len(check(found)) == 12
        assert len(found["complementary_info"]["p"]) == 8
        both = concatenate_batch_transitions(second.sample(4), first.sample(8))
        assert len(both["complementary_info"]["p"]) == 8
        both = concatenate_batch_transitions(both, first.sample(8))
        assert (len(check(both)), len(both["complementary_info"]["p"])) == (20, 16)
        del right["state"][IMAGE]
        with pytest.raises(ArgumentError, match=f"lacks {IMAGE}"):
            concatenate_batch_transitions(first.sample(2), right)


def test_what_means_nothing_is_refused_and_nothing_is_added():
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        ReplayBuffer(0, "cpu")
    for options in ({"writers": 0}, {"storage_device": "cuda:0"}):
        with pytest.raises(ArgumentError):
            ReplayBuffer(10, "cpu", **options)
    buffer = make()
    for wrong in (None, {}, torch.zeros(3)):
        with pytest.raises(ArgumentError, match="dict of tensors"):
            buffer.add(wrong, torch.zeros(2), 0.0, state(1), False, False)
    with pytest.raises(ArgumentError, match="Unsupported type"):
        buffer.add({STATE: "x"}, torch.zeros(2), 0.0, {STATE: "x"}, False, False)
    with pytest.raises(EmptyBufferError):
        buffer.actions[0]
    fill(buffer, 5)
    given = {"state": state(0), "action": torch.zeros(1, 2), "reward": 0.0, "next_state": state(1)}
    for change in (
        {"state": {STATE: torch.zeros(2)}},
        {"state": state(0) | {STATE: torch.zeros(3)}},
        {"next_state": state(0) | {STATE: torch.zeros(2, 2)}},
        {"action": torch.zeros(3)},
        {"action": [0.0, 0.0]},
        {"next_state": None},
        {"next_state": {}},
        {"complementary_info": 3},
        {"reward": "much"},
        {"done": torch.zeros(2)},
    ):
        with pytest.raises(ArgumentError):
            buffer.add(**{**given, "done": False, "truncated": True, **change})
    assert buffer.position == len(buffer) == 5
    for wrong in (0, -1, 2.5, None):
        with pytest.raises(ArgumentError):
            buffer.sample(wrong)
    buffer.add(**{**given, "next_state": None}, done=True, truncated=False)
    assert torch.equal(buffer.next_states[STATE][5], buffer.states[STATE][5])
    with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
        buffer.__reduce_ex__(4)
    buffer.close()
    buffer.close()
    for call in (lambda: buffer.sample(2), lambda: fill(buffer, 1), lambda: len(buffer), lambda: buffer.actions):
        with pytest.raises(StoreClosedError):
            call()


@pytest.mark.slow
def test_the_example_runs():
    script = Path(__file__).parents[2] / "examples" / "lerobot_replay.py"
    done = preloaded.run([sys.executable, str(script), "--steps", "130"], timeout=patience(100))
    assert done.returncode == 0, done.stderr
    assert "mean reward" in done.stdout
