"""Sampling and adding transitions, compared with the replay buffers of DQN and SAC libraries."""
