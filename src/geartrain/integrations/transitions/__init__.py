"""Transitions in a store, for the replay buffers of other libraries: their layout, writer, index and draws.

docs/decisions/library-buffers.md explains the layout. Each library's own package, next to this one, has its class names
and call conventions.
"""
