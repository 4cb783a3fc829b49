"""Media in requests and results: locating it in a body, placeholders, limits, and a cache of blobs.

No provider calls and no uploads here; the fetcher makes those.
"""
