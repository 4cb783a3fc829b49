"""Processes around a worker: an embedded server, and the guard that ends a child with its parent.

Starting the services is the job of `tokenbus_services.cli.up.command`.
"""
