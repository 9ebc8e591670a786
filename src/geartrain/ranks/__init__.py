"""Ranks of a job: their groups, their positions in the mesh, and the carriers of their messages."""
