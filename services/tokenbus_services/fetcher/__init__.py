"""The fetcher: accepts requests, calls providers, and writes their responses to `raw` without interpreting them."""
