"""Moves images out of a provider's answer into the blob store while the answer is read.

Requests' media live in `tokenbus_services.fetcher.request_media`.
"""
