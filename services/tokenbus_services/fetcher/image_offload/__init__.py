"""Moves images out of a provider's answer into the blob store while the answer is read.

For media of requests, see `tokenbus_services.fetcher.request_media`.
"""
