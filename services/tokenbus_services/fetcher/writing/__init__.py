"""The way to `raw`: the frames of each attempt, and the flushes that carry those of all of them.
What a provider answers is read in `tokenbus_services.fetcher.calls`.
"""
