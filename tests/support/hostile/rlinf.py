"""Factory of RLinf's replay buffer over a store."""

from __future__ import annotations

from hostile.subject import Subject, Tools, factory


@factory("TrajectoryReplayBuffer")
def trajectory_replay_buffer(tools: Tools) -> Subject:
    from rlinf_trajectories import trajectory

    from geartrain.integrations.rlinf import TrajectoryReplayBuffer

    buffer = TrajectoryReplayBuffer(sample_window_size=4, store=tools.name(), timeout_s=5)
    given = trajectory(0)
    buffer.add_trajectories([given])
    return Subject(
        {
            "add_trajectories": lambda: buffer.add_trajectories([given]),
            "sample": lambda: buffer.sample(8),
            "size": lambda: buffer.size,
            "get_stats": buffer.get_stats,
        },
        buffer.close,
    )
