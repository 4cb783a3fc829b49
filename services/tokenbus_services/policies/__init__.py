"""Shipped policies that need more than the library does. Those that do not are in `tokenbus.policy`."""
