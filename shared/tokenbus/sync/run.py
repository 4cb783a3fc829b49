"""The handle of a published run, from a synchronous client."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

from tokenbus.client.response import Response
from tokenbus.client.run import PUBLISHED_WAIT_S
from tokenbus.client.run import Run as AsyncRun
from tokenbus.events.public import Completed, PublicEvent
from tokenbus.events.requests import Message
from tokenbus.shaping.json_elements import ANY, RunElement, RunElements

T = TypeVar("T")


class RunClient(Protocol):
    """What a run handle needs from its client; see `Client`."""

    def follow(
        self, run: Run | str, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> Generator[PublicEvent]: ...
    def result(self, run: Run | str, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response: ...
    def messages(
        self,
        run: Run | str,
        *,
        wait_s: float | None = PUBLISHED_WAIT_S,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> list[Message]: ...
    def cancel(
        self,
        run: Run | str,
        reason: str | None = None,
        *,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> None: ...


class Run:
    """One published run; see `tokenbus.Run`."""

    def __init__(self, run: AsyncRun, client: RunClient) -> None:
        self.id = run.id
        self._client = client

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def events(self, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S) -> Generator[PublicEvent]:
        """Yield the run's events after seq ``after``, then live. Raises the same errors as `Client.follow`."""
        return self._client.follow(self, after=after, wait_s=wait_s)

    def elements(
        self,
        path: str | Sequence[str] = ANY,
        as_type: type[T] | type[object] = object,
        *,
        after: int = -1,
        wait_s: float | None = PUBLISHED_WAIT_S,
        **bounds: int,
    ) -> Generator[RunElement[T]]:
        """Yield the values of the answer's JSON at ``path``; see `tokenbus.Run.elements`."""
        reader = RunElements(path, as_type, **bounds)
        ended = False
        with closing(self.events(wait_s=wait_s)) as events:
            for event in events:
                yield from (element for element in reader.add(event) if element.number > after)
                ended = isinstance(event, Completed)
        if not ended:
            self.result(wait_s=wait_s)

    def result(self, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its response. Raises the same errors as `Client.result`."""
        return self._client.result(self, wait_s=wait_s)

    def messages(
        self,
        *,
        wait_s: float | None = PUBLISHED_WAIT_S,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> list[Message]:
        """Wait for the run to end and return its output as messages. Raises the same errors as `Client.messages`."""
        return self._client.messages(
            self, wait_s=wait_s, heard_through=heard_through, heard_characters=heard_characters
        )

    def cancel(
        self, reason: str | None = None, *, heard_through: int | None = None, heard_characters: int | None = None
    ) -> None:
        """Ask for the run to be stopped, also at the provider. Raises the same errors as `Client.cancel`."""
        self._client.cancel(self, reason, heard_through=heard_through, heard_characters=heard_characters)
