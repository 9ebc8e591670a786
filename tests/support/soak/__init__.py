"""Soak: a small job that runs for an hour while its processes are killed; what grows meanwhile is a leak.

    python -m soak --minutes 60        # make soak; MINUTES=1 for a short one

A learner with a store and its journal, a prioritized replay, an RPC node that serves a policy, and an all-reduce with a
second rank; actors that call the policy and write episodes. An actor or the second rank is killed every few seconds and
started again. The learner is never killed: its memory, threads and descriptors, and the segments of all, are looked at
once a second. What they were at most between a tenth and a third of the time is compared with the last quarter.
"""
