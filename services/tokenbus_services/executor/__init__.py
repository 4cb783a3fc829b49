"""Processes that run a deployment's own code, its policies and Python tools, watched and bounded from outside.

A worker starts one fork server, which imports that code once, and forks executors from it. So an executor starts in
milliseconds and inherits no lock or connection of the worker.
"""
