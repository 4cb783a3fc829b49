"""Servers that die, stand still, lose writes or are full."""
