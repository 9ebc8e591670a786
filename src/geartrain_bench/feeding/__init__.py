"""Feeding a learner's store from another host, over a link of a given rate."""
