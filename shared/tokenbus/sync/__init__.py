"""A synchronous client for scripts and notebooks: plain calls and generators over an event loop in its own thread.

    from tokenbus.sync import Client

    with Client("redis://localhost:6379") as bus:
        for event in bus.stream({"provider": "anthropic", "model": "…", "messages": […]}):
            ...

Each method behaves like its namesake in `tokenbus.Client`. Calls are thread-safe; Ctrl-C ends the waiting call, and
leaving ``with`` ends everything. A call costs about 0.1 ms more than the asynchronous one.
"""

from tokenbus.sync.blobs import Blobs
from tokenbus.sync.client import Client
from tokenbus.sync.run import Run
from tokenbus.sync.subscription import Subscription

__all__ = ["Blobs", "Client", "Run", "Subscription"]
