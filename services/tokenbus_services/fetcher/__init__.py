"""The fetcher: takes requests in, calls providers, and writes what they send to `raw`. It understands none of it."""
