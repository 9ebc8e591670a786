"""Vocabulary of all rooms: dtypes, fields, row keys, argument checks, shared counters, file locks, futexes, progress."""
