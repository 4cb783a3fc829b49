"""Bring a partition into memory: load it, replay its unread input, roll back what was not committed."""
