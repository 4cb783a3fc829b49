"""Bring a partition into memory, and keep it while it is owned: load, replay unread input, roll back, drop."""
