"""Hostile callers: every public class used after close, closed twice or beside calls, forked, dropped, alive at exit.

`public` lists the classes of the API, `subject` and the factories beside it say how to make and call each, `scenarios`
misuse them, `server` runs a scenario in a process of its own, and `open_defects` lists what is not mended yet.
`doors_*` say how to make public calls, and `values` makes them with values of wrong types and ranges.
"""
