"""Vocabulary of all rooms: dtypes, fields, row keys, argument checks, shared counters, locks, futexes, progress."""
