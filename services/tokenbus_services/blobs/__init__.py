"""The blob store: content-addressed media and large results. Contains the store, its HTTP routes, and the client for
other services. `tokenbus.blobs` defines blob ids.
"""
