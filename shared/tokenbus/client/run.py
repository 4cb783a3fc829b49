"""The handle of a published run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokenbus.client.response import Response
from tokenbus.events.public import Completed, PublicEvent
from tokenbus.events.requests import Message
from tokenbus.shaping.json_elements import ANY, RunElement, RunElements

if TYPE_CHECKING:
    from tokenbus.client.client import Client

T = TypeVar("T")

PUBLISHED_WAIT_S = 60.0
"""How long a published request may wait for intake before its reader raises RunNotFound."""


class AnyRun(Protocol):
    """A handle of a run, of this client or of the synchronous one."""

    @property
    def id(self) -> str:
        """The run's id."""
        ...


class Run:
    """A run, as returned by `Client.publish`: its id and its operations. Usable while the client is open."""

    def __init__(self, run: str, client: Client) -> None:
        self.id = run
        self._client = client

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def events(self, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S) -> AsyncGenerator[PublicEvent]:
        """Yield the run's events after seq ``after``, first the stored ones, then live: none missing, none twice.

        ``wait_s``: seconds to wait for a run that is still unknown. Raises the same errors as `Client.follow`.
        """
        return self._client.follow(self, after=after, wait_s=wait_s)

    async def elements(
        self,
        path: str | Sequence[str] = ANY,
        as_type: type[T] | type[object] = object,
        *,
        after: int = -1,
        wait_s: float | None = PUBLISHED_WAIT_S,
        **bounds: int,
    ) -> AsyncGenerator[RunElement[T]]:
        """Yield the values of the answer's JSON at ``path``, each once and in order, as soon as it is complete.

        ``path``, ``as_type``, ``bounds``: as of `tokenbus.shaping.JsonElements`. ``after``: the number of the last
        element that was handled; only later ones are yielded.

        Raises Malformed or TooLarge if the answer is no such JSON, and the errors of `result` if the run does not
        complete.
        """
        reader = RunElements(path, as_type, **bounds)
        ended = False
        async with aclosing(self.events(wait_s=wait_s)) as events:
            async for event in events:
                for element in reader.add(event):
                    if element.number > after:
                        yield element
                ended = isinstance(event, Completed)
        if not ended:
            await self.result(wait_s=wait_s)

    async def result(self, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its events folded into a response.

        Raises RunFailed, RunIncomplete, RunCancelled, Malformed, and the errors of `Client.follow`.
        """
        return await self._client.result(self, wait_s=wait_s)

    async def messages(
        self,
        *,
        wait_s: float | None = PUBLISHED_WAIT_S,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> list[Message]:
        """Wait for the run to end, however it ends, and return its output as ``messages`` for the next request.

        ``heard_through``, ``heard_characters``: as in `Client.messages`. Raises the same errors.
        """
        return await self._client.messages(
            self, wait_s=wait_s, heard_through=heard_through, heard_characters=heard_characters
        )

    async def cancel(
        self, reason: str | None = None, *, heard_through: int | None = None, heard_characters: int | None = None
    ) -> None:
        """Ask for the run to be stopped, also at the provider. Returns once the server has the request.

        ``heard_through``, ``heard_characters``: as in `Client.cancel`. Raises RequestInvalid, ServerUnavailable,
        ServerFull.
        """
        await self._client.cancel(self, reason, heard_through=heard_through, heard_characters=heard_characters)
