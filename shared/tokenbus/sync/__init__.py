"""A synchronous client for scripts, notebooks and prefork servers: plain calls over an event loop in its own thread.

    from tokenbus.sync import Client

    with Client("redis://localhost:6379") as bus:
        for event in bus.stream({"provider": "anthropic", "model": "…", "messages": […]}):
            ...

Each method takes the arguments, and has the guarantee and the errors, of its namesake in `tokenbus.Client`; what is an
asynchronous iterator there is a generator here. Calls are thread-safe; Ctrl-C ends the waiting call, and leaving
``with`` ends everything. A call costs about 0.1 ms more than the asynchronous one.

A client that is open when the process forks opens connections of its own in the child, at the child's first call.
"""

from tokenbus.sync.client import Blobs, Client, Run, Session, Subscription

__all__ = ["Blobs", "Client", "Run", "Session", "Subscription"]
