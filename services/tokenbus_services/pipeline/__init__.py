"""Pipeline worker: intake, fetcher, normalizer and parser in one process."""
