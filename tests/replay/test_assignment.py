"""Draws are assigned to replicas and readers as a slow reference in Python says, for any job and any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.errors import ArgumentError
from geartrain.replay.distributed.assignment import Assigned, Assigner, Replica, assign, balanced

Job = tuple[list[Replica], list[list[int]]]


def reference(job: Job, shards: list[int], sizes: list[int], in_order: bool) -> list[tuple[int, int, int]]:
    """For each draw its replica, reader and place, by search."""
    replicas, shard_ranks = job
    n, starts = len(shards), [sum(sizes[:at]) for at in range(len(sizes))]
    room = {each: n // len(replicas) + (each < n % len(replicas)) for each in range(len(replicas))}
    of_draw = [each for each in room for _ in range(room[each])]
    of_atom = {at: of_draw[start] for at, start in enumerate(starts)} if in_order else {}

    def has(replica: int, shard: int, preference: int) -> bool:
        local = replicas[replica].local_shards
        return preference < len(local) and shard in local[preference]

    def deal(atoms: list[int], among: list[int]) -> None:
        """One atom to each replica in turn, while there is room."""
        turn = 0
        for atom in atoms:
            if turn == 0:
                takers = [each for each in among if room[each] >= sizes[atom]]
            if not takers:
                return
            of_atom[atom] = takers[turn]
            room[takers[turn]] -= sizes[atom]
            turn = (turn + 1) % len(takers)

    together = len(shard_ranks) == 1 and set(sizes) <= {1} and all(any(each.local_shards) for each in replicas)
    for size in () if in_order else sorted(set(sizes), reverse=True):
        for preference in () if together else range(max(len(each.ranks) for each in replicas)):
            for shard in range(len(shard_ranks)):
                left = [at for at, start in enumerate(starts) if shards[start] == shard and sizes[at] == size]
                among = [each for each in room if has(each, shard, preference)]
                deal([at for at in left if at not in of_atom], among)
        deal([at for at in range(len(sizes)) if sizes[at] == size and at not in of_atom], list(room))

    found: list[tuple[int, int, int]] = []
    turns = dict.fromkeys(range(len(shard_ranks)), 0)
    for at, start in enumerate(starts):
        shard, owner = shards[start], replicas[of_atom[at]]
        own = [rank for rank, local in zip(owner.ranks, owner.local_shards, strict=True) if shard in local]
        if not own:
            own = [shard_ranks[shard][turns[shard] % len(shard_ranks[shard])]]
            turns[shard] += 1
        for draw in range(start, start + sizes[at]):
            replica = of_draw[draw] if in_order else of_atom[at]
            found.append((replica, own[0], sum(other == replica for other, _, _ in found)))
    return found


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Replicas of one to three ranks, on hosts with one shard or more, or with none in reach."""
    hosts = draw(st.integers(1, 4))
    shard_hosts = draw(st.lists(st.integers(0, hosts - 1), min_size=1, max_size=5))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    rank_hosts = draw(st.lists(st.integers(0, hosts - 1), min_size=sum(counts), max_size=sum(counts)))
    ranks = iter(range(sum(counts)))
    replicas = []
    for count in counts:
        mine = tuple(next(ranks) for _ in range(count))
        local = (frozenset(at for at, of in enumerate(shard_hosts) if of == rank_hosts[rank]) for rank in mine)
        replicas.append(Replica(mine, tuple(local)))
    # A shard that no replica's rank has is read by ranks beyond them.
    shard_ranks = [[rank for rank, of in enumerate(rank_hosts) if of == host] or [90, 91] for host in shard_hosts]
    return replicas, shard_ranks


@st.composite
def owners(draw: st.DrawFn) -> Job:
    """Replicas of one to three ranks with at most one shard each, which no other replica has."""
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    has_shard = draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts)))
    ranks, replicas, shard_ranks = iter(range(sum(counts))), [], [[90, 91]]
    for count, has in zip(counts, has_shard, strict=True):
        mine = tuple(next(ranks) for _ in range(count))
        holder = draw(st.sampled_from(mine)) if has else -1
        replicas.append(Replica(mine, tuple(frozenset({len(shard_ranks)} if r == holder else ()) for r in mine)))
        if has:
            shard_ranks.append([holder, 92][: draw(st.integers(1, 2))])
    return replicas, shard_ranks


def as_tuples(assigned: Assigned) -> list[tuple[int, int, int]]:
    arrays = assigned.replica, assigned.reader, assigned.place
    return list(zip(*(array.tolist() for array in arrays), strict=True))


@settings(deadline=None)
@given(jobs() | owners(), st.data(), st.booleans())
def test_single_draws_go_where_the_reference_says(job: Job, data: st.DataObject, in_order: bool) -> None:
    shards = data.draw(st.lists(st.integers(0, len(job[1]) - 1), max_size=40))
    found = Assigner(*job).assign(np.array(shards, np.int64), "ordered" if in_order else "local_first")
    assert as_tuples(found) == reference(job, shards, [1] * len(shards), in_order or len(job[0]) == 1)


@settings(deadline=None, max_examples=40)
@given(jobs(), st.data(), st.booleans())
def test_groups_of_draws_go_where_the_reference_says(job: Job, data: st.DataObject, in_order: bool) -> None:
    n = 4 * len(job[0]) * data.draw(st.integers(1, 3))
    sizes: list[int] = []
    while sum(sizes) < n:
        sizes.append(data.draw(st.sampled_from([size for size in (1, 2, 4) if size <= n - sum(sizes)])))
    of_atom = data.draw(st.lists(st.integers(0, len(job[1]) - 1), min_size=len(sizes), max_size=len(sizes)))
    shards = np.repeat(np.array(of_atom, np.int64), sizes)
    found = Assigner(*job).assign(shards, "ordered" if in_order else "local_first", np.array(sizes, np.int64))
    assert as_tuples(found) == reference(job, shards.tolist(), sizes, in_order or len(job[0]) == 1)


@pytest.mark.parametrize(
    ("shards", "sizes", "complaint"),
    [
        ([0, 2], None, "there is no shard 2"),
        ([0, -1], None, "there is no shard -1"),
        ([0, 1], [3], "atoms hold other draws"),
        ([0, 1], [1], "atoms hold other draws"),
        ([0, 1], [2, 0], "atoms hold other draws"),
        ([0, 0], [2], "fit into no replica"),
    ],
)
def test_draws_that_cannot_be_assigned_are_refused(shards: list[int], sizes: list[int] | None, complaint: str) -> None:
    replicas = [Replica((rank,), (frozenset({rank}),)) for rank in range(2)]
    of_atoms = None if sizes is None else np.array(sizes, np.int64)
    with pytest.raises(ArgumentError, match=complaint):
        Assigner(replicas, [[0], [1]]).assign(np.array(shards, np.int64), "local_first", of_atoms)


@pytest.mark.parametrize(("draws", "replicas"), [(1, 1), (2, 3), (16, 4), (17, 4), (48, 5)])
def test_draws_of_one_shard_go_to_replicas_as_those_of_many_do(draws: int, replicas: int) -> None:
    stages = [Replica((2 * r, 2 * r + 1), (frozenset(), frozenset({0}))) for r in range(replicas)]
    shard, ranks = np.zeros(draws, np.int64), [[1, 2]]
    taken_turns = assign(shard, stages, ranks, "local_first")
    by_size = Assigner(stages, ranks).assign(shard, "local_first", np.ones(draws, np.int64))  # atoms of one draw each
    assert taken_turns.replica.tolist() == by_size.replica.tolist()
    assert taken_turns.reader.tolist() == by_size.reader.tolist()


# --- by cost -----------------------------------------------------------------------------------------------------


@st.composite
def hosts(draw: st.DrawFn) -> tuple[int, int]:
    """Replicas of each host, and hosts."""
    return draw(st.integers(1, 4)), draw(st.integers(1, 4))


@settings(deadline=None, max_examples=60)
@given(hosts(), st.integers(8, 40), st.floats(0.2, 1.0), st.integers(0, 2**32 - 1))
def test_replicas_get_the_same_cost_and_rows_stay_on_their_host(
    hosts: tuple[int, int], each: int, sigma: float, seed: int
) -> None:
    """Rows of 16 answers of lognormal lengths, at least 8 a replica, on hosts by chance."""
    random = np.random.default_rng(seed)
    replicas = hosts[0] * hosts[1]
    n = each * replicas
    cost = (200 * np.exp(random.normal(0, sigma, (n, 16)))).astype(np.int64).sum(1)
    host = random.integers(0, hosts[1], n)
    has = np.arange(replicas)[:, None] // hosts[0] == host
    found = balanced(cost.tolist(), has)
    load = np.bincount(found, cost, replicas)
    assert load.max() <= 1.02 * load.mean()
    if each >= 32:  # what leaves its host is what the host has beyond its part, and a little for rows being whole
        of_host = np.bincount(host, cost, hosts[1])
        beyond = np.maximum(of_host - of_host.mean(), 0).sum()
        assert cost[~has[found, np.arange(n)]].sum() <= beyond + 0.05 * cost.sum()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 2**40)), max_size=40),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_any_costs_are_divided_alike_everywhere_and_no_replica_is_left_out(
    cost: list[int], replicas: int, seed: int
) -> None:
    has = np.random.default_rng(seed).integers(0, 2, (replicas, len(cost))).astype(bool)
    found = balanced(cost, has)
    assert found.tolist() == balanced(list(cost), has.copy()).tolist()
    assert len(found) == len(cost) and all(0 <= each < replicas for each in found)
    if len(cost) >= replicas:
        assert len(set(found.tolist())) == replicas
    load = np.bincount(found, cost, replicas) if cost else np.zeros(replicas)
    # No greedy division is worse than a mean and the largest row (Graham, 1969), but for the slack of local rows.
    assert load.max() <= 1.01 * sum(cost) / replicas + max(cost, default=0)


@settings(deadline=None, max_examples=40)
@given(jobs(), st.data())
def test_rows_that_are_divided_by_cost_are_read_by_a_rank_that_has_them(job: Job, data: st.DataObject) -> None:
    atom = data.draw(st.sampled_from([1, 2]))
    groups = data.draw(st.lists(st.integers(0, len(job[1]) - 1), max_size=20))
    shards = np.repeat(np.array(groups, np.int64), atom)
    cost = data.draw(st.lists(st.integers(0, 100), min_size=len(shards), max_size=len(shards)))
    found = Assigner(*job).assign_by_cost(shards, cost, atom)
    for replica, reader, shard in zip(found.replica, found.reader, shards.tolist(), strict=True):
        own = [
            rank
            for rank, local in zip(job[0][replica].ranks, job[0][replica].local_shards, strict=True)
            if shard in local
        ]
        assert reader in (own[:1] or job[1][shard])
    assert (found.replica[::atom] == found.replica[atom - 1 :: atom]).all()
    for replica in range(len(job[0])):
        assert found.place[found.replica == replica].tolist() == list(range((found.replica == replica).sum()))
