"""LeRobot: its `ReplayBuffer`, over a store in shared memory.

    from geartrain.integrations.lerobot import ReplayBuffer

Observations are stored once. Other processes of the host can add to the buffer and sample from it. A next state is
always the one that was added, so an interrupted episode never leads into the next one. The package needs torch. It
needs LeRobot only to write a `LeRobotDataset`.
"""

from geartrain.core.extras import require

require("torch", "geartrain[torch]", "A replay buffer")

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
