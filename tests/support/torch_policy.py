"""A policy whose module imports torch before an actor's process can say how many threads it may use."""

from __future__ import annotations

import torch
from counting import Numbers


class Threads(Numbers):
    def act(self, obs):
        return super().act(obs)[0] * 0 + torch.get_num_threads(), {}


def policy(context):
    return Threads()
