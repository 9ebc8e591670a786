"""Vocabulary of all rooms: fields and dtypes, row keys, checks of arguments, shared counters, file locks, futexes, progress."""
