"""RLinf: its `TrajectoryReplayBuffer`, over a store in shared memory.

    from geartrain.integrations.rlinf import TrajectoryReplayBuffer

Trajectories are rows, and observations are stored once. Other processes of the host can add to the buffer and sample
from it. The package needs torch, but not RLinf.
"""

from geartrain.core.extras import require

require("torch", "geartrain[torch]", "A replay buffer")

from geartrain.integrations.rlinf.replay_buffer import TrajectoryReplayBuffer

__all__ = ["TrajectoryReplayBuffer"]
