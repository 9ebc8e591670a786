"""A scripted team for SMAX's battles, which shoots together and lets its hurt shooters step back.

It reads the global state, so it knows more than its agents see. Whoever reaches an enemy attacks the one with the
least health left, less what it is worth that others reach it too. Whoever reaches none goes to the one enemy that is
weak and near to all; before the armies meet, those in front wait for the others. A shooter with less than half of its
health walks away from what is near.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Of marine, marauder, stalker, zealot, zergling and hydralisk: health points, and whether they shoot from afar.
HEALTH = np.array([45.0, 125.0, 160.0, 150.0, 35.0, 80.0])
SHOOTS = np.array([True, True, True, False, False, True])
FEATURES = 10  # of a unit in the global state: health, two of its position, cooldown, type
SIDE, STRIDE = 32.0, 2.1  # of the map, whose walls kill, and how far a step takes at most
WAYS = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])  # north, east, south, west: actions 0 to 3; 4 stops
STOP = 4

TOGETHER = 30.0  # health points that another attacker in reach is worth
NEAR = 20.0  # health points that a distance of 1 is worth, on the way to a target
LEAD, MEET = 2.0, 8.0  # how far ahead of the last one somebody may be while no enemy is nearer than MEET
HURT, AFRAID = 0.5, 4.0  # a shooter with less of its health steps back from an enemy that is nearer than this


def focus_fire(state: NDArray[np.float32], available: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(battles, agents) actions for (battles, size) global states and (battles, agents, actions) possible actions."""
    agents, actions = available.shape[1:]
    units = agents + actions - len(WAYS) - 1
    unit = state[:, : units * FEATURES].reshape(len(state), units, FEATURES)
    share, place, kind = unit[..., 0], unit[..., 1:3], unit[..., 4:].argmax(-1)
    lives, points = share > 0, share * HEALTH[kind]
    apart = place[:, None, agents:] - place[:, :agents, None]
    distance = np.where(lives[:, None, agents:], np.linalg.norm(apart, axis=-1), 1e3)
    reach = available[..., STOP + 1 :]

    weak = points[:, agents:] - TOGETHER * reach.sum(1)
    shot = STOP + 1 + np.where(reach, weak[:, None] + 0.01 * distance, 1e6).argmin(-1)

    living = lives[:, :agents]
    mean = np.where(living[..., None], distance, 0).sum(1) / living.sum(1, keepdims=True).clip(1)
    target = np.where(lives[:, agents:], points[:, agents:] + NEAR * mean, 1e6).argmin(-1)
    way = np.take_along_axis(apart, target[:, None, None, None], 2)[:, :, 0]
    action = np.where(reach.any(-1), shot, _step(way, available))

    along = np.abs(place[:, :agents, 0] - place[:, agents:, 0].mean(1)[:, None])  # to the enemy's side, on the x axis
    ahead = along.max(1, keepdims=True) - along
    early = distance.min((1, 2))[:, None] > MEET
    action = np.where((ahead > LEAD) & early & ~reach.any(-1), STOP, action)

    nearest = distance.argmin(-1)
    away = -np.take_along_axis(apart, nearest[..., None, None], 2)[:, :, 0]
    goes_to = place[:, :agents, None] + STRIDE * WAYS
    inside = ((goes_to > 1.5) & (goes_to < SIDE - 1.5)).all(-1)
    alone = living.sum(1, keepdims=True) == 1
    back = (share[:, :agents] < HURT) & SHOOTS[kind[:, :agents]] & (distance.min(-1) < AFRAID) & ~alone
    action = np.where(back, _step(away, available & _moves(inside, actions)), action)
    possible = np.take_along_axis(available, action[..., None], -1)[..., 0]
    return np.where(possible, action, STOP).astype(np.int64)


def _step(way: NDArray[np.float32], available: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The possible direction that is most along `way`."""
    return np.where(available[..., :STOP], way @ WAYS.T, -1e9).argmax(-1)


def _moves(inside: NDArray[np.bool_], actions: int) -> NDArray[np.bool_]:
    return np.pad(inside, ((0, 0), (0, 0), (0, actions - STOP)), constant_values=True)
