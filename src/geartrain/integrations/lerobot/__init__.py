"""LeRobot: its `ReplayBuffer`, over a store in shared memory.

    from geartrain.integrations.lerobot import ReplayBuffer

    buffer = ReplayBuffer(100_000, device="cuda:0", state_keys=["observation.state", "observation.image"])

Observations are stored once, other processes of the host can add to the buffer and sample from it, and a next state is
what was added: an episode that was cut off never leads into the next one. It needs torch; LeRobot itself only where a
`LeRobotDataset` is written.
"""

from geartrain.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"the replay buffer needs torch: pip install 'geartrain[torch]' ({error})") from None

from geartrain.integrations.lerobot.augmentation import random_crop_vectorized, random_shift
from geartrain.integrations.lerobot.batches import BatchTransition, concatenate_batch_transitions
from geartrain.integrations.lerobot.positions import PositionColumn
from geartrain.integrations.lerobot.replay_buffer import LeRobotReplayBuffer
from geartrain.integrations.lerobot.replay_buffer import LeRobotReplayBuffer as ReplayBuffer

__all__ = [
    "BatchTransition",
    "LeRobotReplayBuffer",
    "PositionColumn",
    "ReplayBuffer",
    "concatenate_batch_transitions",
    "random_crop_vectorized",
    "random_shift",
]
