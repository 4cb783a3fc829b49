"""Uploads of large media to a provider's file API, and the registry of what is already there.

The shapes of each file API live with its provider in `tokenbus.providers`.
"""
