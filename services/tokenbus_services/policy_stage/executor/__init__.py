"""Executors: the processes in which policies run, and the worker's side of them."""
