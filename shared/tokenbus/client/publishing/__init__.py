"""Publish requests: the run's id, the encoded request, and the queue in front of the connections."""
