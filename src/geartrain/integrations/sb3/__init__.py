"""Stable-Baselines3: replay buffers for `replay_buffer_class=`, over a store in shared memory.

    from geartrain.integrations.sb3 import ReplayBuffer

Observations are stored once. Other processes of the host can add to the buffer and sample from it. A next observation
is always the one that was added, so an interrupted episode never leads into the next one.
"""

from geartrain.errors import MissingDependencyError

try:
    import stable_baselines3 as _stable_baselines3  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        f"the replay buffers need Stable-Baselines3: pip install 'geartrain[sb3]' ({error})"
    ) from None

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
