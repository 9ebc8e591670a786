"""Storm: writers, readers and learners of one store under seeded faults, with an audit and a proof after each round.

    PYTHONPATH=tests/support python -m storm --seconds 600 --seed 1

`roles` are the processes, `faults` what befalls them, `rounds` a round of both, `proof` what must be true afterwards:
by the journals in which each process writes what it is about to do (`journal`), and by rows whose every byte follows
from their tag (`rows`). `clock` is a wall clock that jumps.
"""
