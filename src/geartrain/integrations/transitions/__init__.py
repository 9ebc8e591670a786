"""Transitions in a store, for the replay buffers of other libraries: their layout, writer, index and draws.

Decision 037 explains the layout. Each library's own package, next to this one, has its class names and call
conventions.
"""
