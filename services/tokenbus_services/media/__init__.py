"""Media of requests and results: where they stand in a body, placeholders, limits and a cache of blobs.

No provider call and no upload here: those are the fetcher's.
"""
