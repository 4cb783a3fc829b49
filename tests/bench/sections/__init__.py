"""Sections that run processes of their own, one module each."""
