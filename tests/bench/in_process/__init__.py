"""Sections without a process or a server: one function, timed."""
