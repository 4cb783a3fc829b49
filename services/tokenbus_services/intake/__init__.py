"""Takes requests from the inbound stream: checks them, stores large media, and opens runs.

It runs in the fetcher's process; a provider call is the fetcher's own.
"""
