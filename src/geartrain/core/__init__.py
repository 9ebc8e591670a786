"""Basics that all packages of geartrain use: dtypes, fields, row keys, argument checks, counters, locks, progress."""
