"""Sections that start their own processes, one module each."""
