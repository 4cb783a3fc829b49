"""Uploads of large media to a provider's file API, and the registry of existing files.

The formats of each file API are with its provider in `tokenbus.providers`.
"""
