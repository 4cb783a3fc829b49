"""The blob store: media and large results by content address. The store, its HTTP routes, and the client that
other services use. What a blob id is stands in `tokenbus.blobs`."""
