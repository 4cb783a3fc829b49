"""The light client: publish requests, follow runs, cancel them, fetch their results; and the topics, by inheritance."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

from tokenbus.bus.keys import DEFAULT_PREFIX
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.run_record import newest_seq
from tokenbus.bus.server.server import Server, translated
from tokenbus.client import publishing
from tokenbus.client.archive import Archive
from tokenbus.client.blobs import Blobs
from tokenbus.client.deployment import Deployment, partitions_in, url_in
from tokenbus.client.log_reader import follow
from tokenbus.client.publishing import AnyRun, PublishQueue, new_run_id, run_id_of
from tokenbus.client.rerun import How, request_again
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.client.run_list import StateFilter, describe_runs, list_runs, run_filter
from tokenbus.client.sessions.listing import list_sessions, session_filter
from tokenbus.client.sessions.session import Session
from tokenbus.client.subscriptions.subscriber import TopicSubscriber
from tokenbus.client.tree_reader import TreeCursor, TreeStep, follow_tree
from tokenbus.client.waits import RunWaits
from tokenbus.core.request.parse import MAX_REQUEST_BYTES
from tokenbus.core.request.validate import check_heard
from tokenbus.errors import Malformed
from tokenbus.events.public import Completed, PublicEvent
from tokenbus.events.requests import Append, Cancel, DurabilityLevel, Generate, Message, WaitDecision
from tokenbus.events.run_info import RunInfo
from tokenbus.events.sessions import SessionInfo
from tokenbus.shaping.json_elements import ANY, RunElement, RunElements

T = TypeVar("T")

PUBLISHED_WAIT_S = 60.0
"""How long a published request may wait for intake before its reader raises RunNotFound."""
MAX_WAITING = 100_000
"""Maximum requests on the inbound stream."""
MAX_QUEUED = 1_000
"""Maximum requests in flight from one client if `publish` is called with ``wait=False``."""
MORE_FOR_CANCELS = 1_000
"""Extra room on a full inbound stream, for cancels and decisions only."""


def watch_readers(client: Client, liveness: Liveness) -> None:
    """Let a worker's liveness watch the task through which all `follow` calls of this client read."""
    client._deployment.hub.liveness = liveness  # pyright: ignore[reportPrivateUsage]


def read_archive(client: Client, make: Callable[[], Archive]) -> None:
    """Let a client of the deployment itself find the archive as its settings say."""
    client._deployment.make_archive = make  # pyright: ignore[reportPrivateUsage]


class Client(TopicSubscriber, RunWaits):
    """A connection to a tokenbus deployment. Belongs to one event loop; use as ``async with Client() as bus``.

    Any number of tasks may use it at once. Up to a thousand `follow` calls share one connection while they wait for new
    events (in a Cluster: one per partition); each subscription has its own connection. Errors are those of
    `tokenbus.errors`. If the server goes away, readers retry for ``reconnect_s`` seconds; `publish` and `cancel` fail
    at once.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
        reconnect_s: float = 30.0,
        max_waiting: int = MAX_WAITING,
        max_queued: int = MAX_QUEUED,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        blobs: str | None = None,
        blob_token: str | None = None,
    ) -> None:
        """Configure the client; does not connect yet. Raises SettingsError for an invalid address or setting.

        - ``url``: ``redis://…``, ``redis+sentinel://…``, ``redis+cluster://…`` or ``unix://…``. None:
          `TOKENBUS_REDIS_URL`, or else the server of the `tokenbus up` running in this directory (data directory
          `TOKENBUS_DATA`, default ``.tokenbus``).
        - ``partitions``: None for `TOKENBUS_PARTITIONS`, or else the deployment's own number.
        - ``max_waiting``: maximum requests on the inbound stream.
        - ``max_queued``: maximum requests in flight from this client if `publish` is called with ``wait=False``.
        - ``blobs``, ``blob_token``: address and token of the blob service, see `Blobs`.
        """
        env = os.environ
        server = Server(url_in(env) if url is None else url)
        deployment = Deployment(server, prefix, partitions_in(env) if partitions is None else partitions)
        super().__init__(deployment, reconnect_s=reconnect_s)
        self._outbound = PublishQueue(server, most_queued=max_queued)
        self._max_waiting = max_waiting
        self._max_request_bytes = max_request_bytes
        self._blob_service = blobs, blob_token
        self._blobs: Blobs | None = None
        deployment.make_archive = lambda: Archive(blobs, token=blob_token)

    async def __aenter__(self) -> Self:
        """Connect. Raises ServerUnavailable, ServerTooOld, and DeploymentMismatch if ``partitions`` differs from the
        deployment's.
        """
        try:
            await self._deployment.server.check()
            await self._deployment.keys()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all subscriptions and close all connections. Runs continue. Iterators still in use raise RuntimeError."""
        try:
            await self._close_subscriptions()
            await self._outbound.close()
        finally:  # also if this is cancelled
            await self._deployment.aclose()

    @property
    def blobs(self) -> Blobs:
        """The deployment's blob store: ``put``, ``get`` and ``chunks``; also the loader for `sanitize_for_storage`.

        Raises SettingsError if the address or the token is invalid.
        """
        if self._blobs is None:
            url, token = self._blob_service
            self._blobs = Blobs(url, token=token)
        return self._blobs

    # --- runs -------------------------------------------------------------------------------------------------

    async def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """Publish a request and return its run once the server has stored it. With the ``durability`` `replicated`,
        replicas or the disk have it then, too.

        A request without an id gets a new one, a UUIDv7.

        Any number of tasks may publish at once; they share a few connections and queue for them. ``wait``: if False,
        raise PublishQueueFull when ``max_queued`` requests of this client are already in flight.

        Raises RequestInvalid and RequestTooLarge for requests that no deployment would accept. After ServerUnavailable
        (WriteNotReplicated is one) and ServerFull the same request may be published again. Each error carries the
        request with its id as ``error.request``: publishing that again is the same run, even if the first attempt
        arrived.
        """
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
            request = publishing.with_trace_context(request)
        with publishing.carrying(request):
            async with self._outbound.turn(wait=wait):
                data = publishing.encoded(request, limit=self._max_request_bytes)
                tenant = publishing.tenant_in(request)
                stream = (await self._deployment.keys()).requests
                durable = self._is_durable(publishing.durability_in(request))
                await self._outbound.put(stream, data, tenant=tenant, most=self._max_waiting, durable=durable)
        return Run(run, self)

    async def stream(
        self, request: Generate | Mapping[str, object], *, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> AsyncGenerator[PublicEvent]:
        """Publish a request and yield all its events, the terminal event last. Publishes on the first iteration.

        The iteration ends normally however the run ended: check the type of the last event (`Completed`, `Incomplete`,
        `RunFailedEvent`, `Cancelled`), or use `result`, which raises. Leaving the iteration does not stop the run;
        `cancel` does. Raises the same errors as `publish` and `follow`.
        """
        run = await self.publish(request)
        async with aclosing(self.follow(run, wait_s=wait_s, new=True)) as events:
            async for event in events:
                yield event

    def follow(
        self, run: AnyRun | str, *, after: int = -1, wait_s: float | None = PUBLISHED_WAIT_S, new: bool = False
    ) -> AsyncGenerator[PublicEvent]:
        """Yield a run's events after seq ``after``, first the stored ones, then live: none missing, none twice.

        ``new``: the run was published just now, so the reader waits for its first event and does not look for stored
        ones first: one read less, the same events.

        Ends after the terminal event, whatever its type; see `stream`. Reconnects after lost connections. Raises

        - RunNotFound if the run stays unknown for ``wait_s`` seconds (None: wait forever), or its records have expired;
        - RunLost if the run was open and the server has nothing of it any more: it was flushed, say;
        - CursorTrimmed if events after ``after`` were trimmed;
        - CursorAhead if the run has no event with seq ``after``: the cursor belongs to another run;
        - ValueError if ``after`` is not a seq;
        - ServerUnavailable if the server is unavailable for longer than ``reconnect_s``.
        """
        if type(after) is not int or after < -1:
            raise ValueError(f"after: {after!r} is not a seq: a whole number from 0, or -1 for all events")
        return follow(
            self._deployment, run_id_of(run), after=after, wait_s=wait_s, reconnect_s=self._reconnect_s, new=new
        )

    def follow_tree(
        self,
        run: AnyRun | str,
        *,
        after: TreeCursor | str | None = None,
        wait_s: float | None = PUBLISHED_WAIT_S,
    ) -> AsyncGenerator[TreeStep]:
        """Yield the events of a run and of all child runs below it after a cursor, first the stored ones, then live:
        none missing, none twice, in an order that is the same for every reader.

        A run's own events are in the order of its log. Ends when all of these runs have ended. ``after``: the cursor of
        the last step that is known, or its text. If the log of a child has expired, which may be before its parent
        ends, its events are left out.

        Raises as `follow`, and ValueError for a text that is no cursor.
        """
        cursor = TreeCursor.parse(after) if isinstance(after, str) else after
        return follow_tree(self._deployment, run_id_of(run), after=cursor, wait_s=wait_s, reconnect_s=self._reconnect_s)

    async def result(self, run: AnyRun | str, *, wait_s: float | None = PUBLISHED_WAIT_S) -> Response:
        """Wait for the run to end and return its events folded into a response.

        ``wait_s``: seconds to wait for a run that is still unknown, not for its end; None: forever.

        Raises RunFailed, RunIncomplete and RunCancelled, each with the partial response as ``error.result``; Malformed
        if a newer version wrote a terminal event that this version does not know; and the errors of `follow`.
        """
        return (await self._ended(run, wait_s)).or_raise()

    async def messages(
        self,
        run: AnyRun | str,
        *,
        wait_s: float | None = PUBLISHED_WAIT_S,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> list[Message]:
        """Wait for the run to end, however it ends, and return its output as ``messages`` for the next request.

        ``[*messages, *await bus.messages(run), {"role": "user", "content": "…"}]`` continues the conversation, at the
        same provider or another one: see docs/guides/conversations.md.

        ``heard_through``, ``heard_characters``: how far a listener heard a run that was not cancelled, because it ended
        before the speech did; as in `cancel`. What was not heard is left out.

        Raises the errors of `follow`; Malformed like `result`; RequestInvalid if the run has no such event.
        """
        builder = ResponseBuilder(heard_through=heard_through, heard_characters=heard_characters)
        response = await self._ended(run, wait_s, builder)
        heard = Cancel(run=response.run, heard_through=heard_through, heard_characters=heard_characters)
        check_heard(heard, response.events - 1)
        return response.messages

    def session(self, name: str, *, tenant: str = "") -> Session:
        """The session of this name, a name within the tenant, whether or not it exists yet.

        Raises RequestInvalid for a name that no session can have.
        """
        return Session(name, self._deployment, self._put, tenant=tenant, reconnect_s=self._reconnect_s)

    async def sessions(
        self,
        *,
        tenant: str | None = None,
        metadata: Mapping[str, object] | None = None,
        words: str | None = None,
        older_than: float | timedelta | None = None,
        limit: int | None = None,
        oldest_first: bool = False,
    ) -> AsyncGenerator[SessionInfo]:
        """Yield the deployment's sessions by the time of their last event, the newest first. Read in pages: stop when
        you have enough. Not a snapshot: a session that is written to meanwhile may come twice or not at all.

        - ``tenant``: only sessions of this tenant; None: of all, and those without one.
        - ``metadata``: only sessions whose configuration has these values in its metadata.
        - ``words``: only sessions that have each of these words in their name, their first message or their metadata.
        - ``older_than``: seconds, or a timedelta; only sessions without an event since then.

        A session whose run has been open for more than `retention.session_s` and `retention.open_run_s` without an
        event of the session may be missing until the next one. Raises ValueError, ServerUnavailable.
        """
        wanted = session_filter(tenant=tenant, metadata=metadata, words=words, older_than=older_than)
        listed = list_sessions(self._deployment, wanted, newest_first=not oldest_first, limit=limit)
        async with aclosing(listed):
            async for _, info in listed:
                if info is not None:
                    yield info

    async def _put_decision(self, decision: WaitDecision) -> None:
        data = publishing.encoded(decision, limit=self._max_request_bytes)
        stream = (await self._deployment.keys()).requests
        await self._outbound.put(stream, data, most=self._max_waiting + MORE_FOR_CANCELS, first=True)

    async def _put(self, request: Append, tenant: str) -> None:
        """Put an append on the inbound stream."""
        data = publishing.encoded(request, limit=self._max_request_bytes)
        stream = (await self._deployment.keys()).requests
        await self._outbound.put(stream, data, tenant=tenant, most=self._max_waiting, durable=self._is_durable(None))

    def _is_durable(self, named: DurabilityLevel | None) -> bool:
        kept = self._deployment.durability
        return kept is not None and (named or kept.default) == "replicated"

    async def _ended(self, run: AnyRun | str, wait_s: float | None, builder: ResponseBuilder | None = None) -> Response:
        builder = builder or ResponseBuilder()
        async with aclosing(self.follow(run, wait_s=wait_s)) as events:
            async for event in events:
                builder.add(event)
        response = builder.response
        if response.status == "open":
            raise Malformed(f"run {response.run}", "it ended in a way that this version of tokenbus does not know")
        return response

    async def cancel(
        self,
        run: AnyRun | str,
        reason: str | None = None,
        *,
        heard_through: int | None = None,
        heard_characters: int | None = None,
    ) -> None:
        """Ask for the run to be stopped, also at the provider.

        ``heard_through``: seq of the last event that a listener heard, -1 for nothing; ``heard_characters``: how many
        characters of its text, None for all. What was not heard is left out of the run's `messages`. The run's
        `Cancelled` event carries both.

        Returns once the server has the request. The run's `Cancelled` event follows, unless the run ends first. May be
        repeated. Raises RequestInvalid, also if ``heard_through`` is beyond the run's newest event; ServerUnavailable,
        ServerFull.
        """
        request = Cancel(
            run=run_id_of(run), reason=reason, heard_through=heard_through, heard_characters=heard_characters
        )
        if heard_through is not None and heard_through >= 0:
            keys = await self._deployment.keys_of(request.run)
            with translated(self._deployment.server):
                newest = await newest_seq(self._deployment.server.client, keys.run(request.run))
            check_heard(request, newest)
        data = publishing.encoded(request, limit=self._max_request_bytes)
        stream = (await self._deployment.keys()).requests
        await self._outbound.put(stream, data, most=self._max_waiting + MORE_FOR_CANCELS, first=True)

    async def retry(self, run: AnyRun | str, *, again: int = 1) -> Run:
        """Publish the request of an incomplete, failed or cancelled run again, as a new run.

        The new id is derived from the old one, so repeating the call gives the same new run; ``again``, from 1 to 1000,
        selects further ones. The new run's metadata, which `Started` carries, names the old run as ``retry_of``. Raises
        RunOpen; RunNotFound, also if the records have expired; RunNotRepeatable; ValueError for an invalid ``again``;
        and the errors of `publish`.
        """
        return await self._publish_again(run, "retry", again)

    async def resume(self, run: AnyRun | str, *, again: int = 1) -> Run:
        """Continue from the visible text of the last turn of an incomplete, failed or cancelled run, as a new run.

        The partial text is sent as the beginning of the model's answer; the new run's text is the continuation. Id and
        metadata (``resume_of``) work as with `retry`. Raises the same errors as `retry`; RunNotRepeatable also if
        provider and model cannot continue a partial answer to this request (see docs/guides/providers.md), if the run
        produced no text, or if it ended among its tool calls.
        """
        return await self._publish_again(run, "resume", again)

    async def _publish_again(self, run: AnyRun | str, how: How, again: int) -> Run:
        events = self.follow(run)
        return await self.publish(
            await request_again(self._deployment, run_id_of(run), how, again=again, events=events)
        )

    def runs(
        self,
        *,
        state: StateFilter | Collection[StateFilter] | None = None,
        tenant: str | None = None,
        provider: str | None = None,
        older_than: float | timedelta | None = None,
        prefix: str | None = None,
        limit: int | None = None,
        oldest_first: bool = False,
        archived: bool = False,
    ) -> AsyncGenerator[RunInfo]:
        """Yield the deployment's runs, open and ended, the newest first. Read in pages: stop when you have enough.

        An open run is listed by the time of its acceptance, an ended one by that of its end, for as long as its records
        are kept (`retention.finished_run_s`). Not a snapshot: a run that ends meanwhile may be left out.

        - ``state``: ``queued``, ``running``, ``completed``, ``incomplete``, ``failed``, ``cancelled``; ``open`` for the
          first two, ``ended`` for the others; or several of them.
        - ``tenant``, ``provider``: only runs of this tenant, or whose last provider was this one.
        - ``older_than``: seconds, or a timedelta; only runs that were accepted (or, if they have ended, ended) before.
        - ``prefix``: only runs whose ids begin with it.
        - ``archived``: also those that the archive alone has, if the deployment has one.

        Without ``tenant``, ``provider``, ``prefix`` and single states, the cost depends on how many runs are yielded
        alone; with them, on how many are read. Raises ValueError for invalid arguments; ServerUnavailable, BlobError.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ValueError(f"limit: {limit!r} is not a whole number from 0")
        wanted = run_filter(state=state, tenant=tenant, provider=provider, older_than=older_than, prefix=prefix)
        return list_runs(self._deployment, wanted, newest_first=not oldest_first, limit=limit, archived=archived)

    async def describe(self, runs: Iterable[AnyRun | str]) -> dict[str, RunInfo]:
        """Return a `RunInfo` for each of these runs, by run id.

        Runs that are unknown or have expired are left out. All are read in one pipeline; the cost is one small read a
        run. Raises RequestInvalid for a value that is not a run id; ServerUnavailable.
        """
        return await describe_runs(self._deployment, [run_id_of(run) for run in runs])


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
