"""RLinf: its `TrajectoryReplayBuffer`, over a store in shared memory.

    from geartrain.integrations.rlinf import TrajectoryReplayBuffer

Trajectories are rows, and observations are stored once. Other processes of the host can add to the buffer and sample
from it. The package needs torch, but not RLinf.
"""

from geartrain.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"the replay buffer needs torch: pip install 'geartrain[torch]' ({error})") from None

from geartrain.integrations.rlinf.replay_buffer import TrajectoryReplayBuffer

__all__ = ["TrajectoryReplayBuffer"]
