"""The client with which policies use the bus.

A request from a policy is a normal run, and a matching route would put it under policies too: the policy would judge
its own question and ask again, endlessly, or wait for the very worker that waits for it. So these runs have no
policies. A note on the server, written before publishing, marks them; a request cannot set that mark itself. They are
not visible either, so that listeners do not get the judge's text.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.runs.accept import mark_asked
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client.client import Client, Run
from tokenbus.client.publishing import publish as publishing
from tokenbus.client.publishing.publish import new_run_id
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate


class PolicyClient(Client):
    """A client whose runs have no policies and are not visible."""

    def __init__(self, redis_url: str, keys: Keys, *, run_ttl_ms: int) -> None:
        """Does no IO; connects with the first request. Raises SettingsError."""
        super().__init__(redis_url, prefix=keys.prefix, partitions=keys.partitions)
        self._keys = keys
        self._run_ttl_ms = run_ttl_ms
        self._server = Server(redis_url)

    async def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """See `Client.publish`. Raises RequestInvalid also if the request names policies."""
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
            named = request.policies if isinstance(request, Generate) else request.get("policies")
            if named:
                raise RequestInvalid(
                    "policies", "a run that a policy starts cannot have policies: it would wait for itself"
                )
            if isinstance(request, Generate):
                request = msgspec.structs.replace(request, visible=False)
            else:
                request = {**request, "visible": False}
        # Whichever number of partitions is known here: intake looks the run up by all of them.
        server, note = self._server, mark_asked(self._keys.run(run), ttl_ms=self._run_ttl_ms)
        await retry_until_available(server, lambda: run_script(server, note), what="note of a policy's question")
        return await super().publish(request, wait=wait)

    async def aclose(self) -> None:
        """See `Client.aclose`."""
        try:
            await super().aclose()
        finally:
            await self._server.aclose()
