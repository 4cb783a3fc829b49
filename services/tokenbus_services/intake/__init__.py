"""Accepts requests from the inbound stream: validates them, stores large media, and opens runs.

Runs in the fetcher's process; the fetcher makes the provider calls.
"""
