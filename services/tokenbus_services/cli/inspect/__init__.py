"""Reads the current state of a deployment from its server, without changing it.

Used by `top`, `doctor` and `demo`.
"""
