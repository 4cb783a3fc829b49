"""Subscriptions of every kind, and handlers over them."""
