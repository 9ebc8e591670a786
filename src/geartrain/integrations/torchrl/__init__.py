"""torchrl: storage, samplers and writer for its `ReplayBuffer`, over a store in shared memory.

    from torchrl.data import ReplayBuffer
    from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage

    storage = SharedStorage(1_000_000, store="run-7")
    buffer = ReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(alpha=0.6, beta=0.4), writer=RoundRobinWriter(), batch_size=256
    )

Every process of the host that makes the same buffer can add to it and sample from it, also by priority. Items, cursor,
length and priorities are in the shared segment.
"""

from geartrain.core.extras import require

require("torchrl", "geartrain[torchrl]", "A shared storage")

from geartrain.integrations.torchrl.samplers import PrioritizedSampler, UniformSampler
from geartrain.integrations.torchrl.slices import PrioritizedSliceSampler, SliceSampler
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.integrations.torchrl.writer import RoundRobinWriter

__all__ = [
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RoundRobinWriter",
    "SharedStorage",
    "SliceSampler",
    "UniformSampler",
]
