"""Policies over tokenbus's own public events."""
