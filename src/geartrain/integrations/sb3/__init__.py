"""Stable-Baselines3: replay buffers for `replay_buffer_class=`, over a store in shared memory.

    from geartrain.integrations.sb3 import ReplayBuffer

Observations are stored once. Other processes of the host can add to the buffer and sample from it. A next observation
is always the one that was added, so an interrupted episode never leads into the next one.
"""

from geartrain.core.extras import require

require("stable_baselines3", "geartrain[sb3]", "A replay buffer")

from geartrain.integrations.sb3.dqn import PrioritizedDQN
from geartrain.integrations.sb3.her import HerReplayBuffer
from geartrain.integrations.sb3.n_step import NStepReplayBuffer
from geartrain.integrations.sb3.prioritized import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples
from geartrain.integrations.sb3.replay_buffer import DictReplayBuffer, ReplayBuffer

__all__ = [
    "DictReplayBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedDQN",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "ReplayBuffer",
]
