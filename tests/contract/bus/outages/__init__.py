"""Servers that die, stall, lose writes or are full."""
