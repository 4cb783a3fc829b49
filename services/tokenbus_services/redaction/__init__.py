"""Keeps secrets out of all that leaves a process."""
