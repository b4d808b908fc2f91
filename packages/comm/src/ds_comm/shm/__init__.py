"""Collectives over memory that the ranks of one host share: the process group, its segments, windows for reading what peers wrote."""
