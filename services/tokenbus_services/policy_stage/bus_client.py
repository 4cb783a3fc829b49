"""The client with which policies ask the bus.

What a policy asks is a run like any other, and a route that any run meets gives it policies too: the one that asks
would judge its own question, and ask again, without an end; and any other could wait for the very worker that waits for
it. So these runs have none. That they are such runs is noted on the server before they are published, by whom may write
there; a request cannot say it of itself. And nothing of them is visible, or a listener would hear what a judge says.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.bus.scripts.runs import ask
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client import publish as publishing
from tokenbus.client.client import Client
from tokenbus.client.run import Run
from tokenbus.client.run_id import new_run_id
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate
from tokenbus_services.settings import Settings


class AskingClient(Client):
    """A client whose runs no policy judges and nobody hears."""

    def __init__(self, settings: Settings) -> None:
        """Does no IO. Raises SettingsError."""
        super().__init__(settings.redis_url, prefix=settings.prefix, partitions=settings.partitions)
        self._keys = settings.keys
        self._ttl_ms = round(settings.retention.open_run_s * 1000)
        self.server: Server | None = None
        """Where it notes what it asks; to be set before the first."""

    async def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """See `Client.publish`. Raises RequestInvalid also for a request that names policies."""
        assert self.server
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
            named = request.policies if isinstance(request, Generate) else request.get("policies")
            if named:
                raise RequestInvalid("policies", "what a policy asks is judged by none: it would wait for itself")
            if isinstance(request, Generate):
                request = msgspec.structs.replace(request, visible=False)
            else:
                request = {**request, "visible": False}
        server, note = self.server, ask(self._keys.run(run), ttl_ms=self._ttl_ms)
        await retry_until_available(server, lambda: run_script(server, note), what="note of a policy's question")
        return await super().publish(request, wait=wait)
