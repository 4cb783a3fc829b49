"""The bus runtime over Redis Streams: keys, scripts, leases, ordered stages, work queues.

Knows no provider and no service.
"""
