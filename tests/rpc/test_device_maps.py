"""Which GPU of a peer a tensor goes to: what was given is checked at the door, what was not is chosen."""

from __future__ import annotations

import pytest

from geartrain.errors import DeviceError
from geartrain.rpc.tensors.device_map import CPU, DeviceMap, automatic, maps_of, of_peer, parse


def test_text_and_mappings_say_the_same() -> None:
    expected = {"1": {0: 0, 1: 3}, "actor_2": {0: 5}}
    assert parse("1_0_0, 1_1_3,actor_2_0_5,") == expected
    assert maps_of(expected, 2) == expected
    assert maps_of({1: {"cuda:0": 0, "1": "cuda:3"}, "actor_2": {"cuda": 5}}, 2) == expected
    assert maps_of(None, 0) == maps_of("", 0) == {}
    assert parse("1_0_0,1_0_0") == {"1": {0: 0}}  # twice the same is the same


def test_a_device_of_torchs_is_an_index() -> None:
    torch = pytest.importorskip("torch")
    assert maps_of({"a": {torch.device("cuda", 1): torch.device("cuda:0")}}, 2) == {"a": {1: 0}}


@pytest.mark.parametrize("text", ["0", "1_0", "_0_0", "1_x_0", "1_0_-1", "1__0", "1_0_²"])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="such as 1_0_0"):
        parse(text)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": {0: "cpu"}}, "names GPUs"),
        ({"a": {True: 0}}, "names GPUs"),
        ({"a": {-1: 0}}, "names GPUs"),
        ({"a": 0}, "found 0 for 'a'"),
        ({"a": {2: 0}}, "names cuda:2, and here are 2 GPUs"),
        ({"a": {0: 1, 1: 1}}, r"sends GPUs \[0, 1\] to one, cuda:1"),
        ("a_0_0,a_0_1", "sends cuda:0 to two GPUs of 'a': 0 and 1"),
    ],
)
def test_maps_that_cannot_be_meant_are_refused(given: object, why: str) -> None:
    with pytest.raises(DeviceError, match=why):
        maps_of(given, 2)  # type: ignore[arg-type]


def test_results_come_back_the_way_arguments_went() -> None:
    given = DeviceMap("a", {0: 2, 1: 0})
    for here in (0, 1):
        assert given.back(given.there(here, 3), 2) == here
    with pytest.raises(DeviceError, match=r"on cuda:1 of 'a', but .* no GPU here for it: 0->2, 1->0"):
        given.back(1, 2)
    with pytest.raises(DeviceError, match="on cuda:5, but the device map to 'a' does not name that GPU"):
        given.there(5, 3)
    with pytest.raises(DeviceError, match="sends cuda:0 to cuda:2 of 'a', which has 1 GPU"):
        given.there(0, 1)


def test_without_a_map_it_is_the_same_index_then_in_turn_then_the_cpu() -> None:
    assert [automatic(i, 4) for i in range(4)] == [0, 1, 2, 3]
    assert [automatic(i, 3) for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert automatic(0, 0) == CPU
    auto = DeviceMap("a")
    assert [auto.there(i, 2) for i in range(3)] == [0, 1, 0]
    assert auto.back(3, 2) == 1
    assert auto.back(0, 0) == CPU


def test_a_peer_is_found_by_name_or_by_rank() -> None:
    maps = maps_of("1_0_1,learner_0_0", 1)
    assert of_peer(maps, ("learner", "0")).given == {0: 0}
    assert of_peer(maps, ("actor", "1")).given == {0: 1}
    assert of_peer(maps, ("actor", "1")).peer == "actor"
    assert of_peer(maps, ("other", "7")).given is None
