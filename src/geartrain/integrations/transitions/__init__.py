"""Transitions in a store, for the replay buffers of other projects: their layout, writer, index and draws.

Decision 037 says why they lie as they do. What a project calls them, and when, is in its own package beside this one.
"""
