"""A whole bus inside a test's process: what `tokenbus.testing` offers.

The services here are the real ones, on a real server; the model alone is scripted.
"""
