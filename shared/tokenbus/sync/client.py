"""The synchronous client. Its methods are those of the asynchronous one, each called in the client's event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, BlobRef
from tokenbus.bus.keys import DEFAULT_PREFIX
from tokenbus.client import client as asynchronous
from tokenbus.client.blobs import Blobs as AsyncBlobs
from tokenbus.client.client import PUBLISHED_WAIT_S
from tokenbus.client.client import Run as AsyncRun
from tokenbus.client.publishing import AnyRun
from tokenbus.client.response import Response
from tokenbus.client.sessions.session import ACCEPTED_WAIT_S
from tokenbus.client.sessions.session import Session as AsyncSession
from tokenbus.client.subscriptions.cursor import Cursor
from tokenbus.client.subscriptions.group import SharedSubscription
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.client.subscriptions.sentences import Sentence, SentenceSubscription
from tokenbus.core.request.parse import MAX_REQUEST_BYTES
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Generate
from tokenbus.events.topics import TopicEvent
from tokenbus.sync.loop_thread import LoopThread

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=TopicEvent)
E = TypeVar("E", bound=TopicEvent | Sentence)


class _Synchronous(Protocol):
    """What the methods of an asynchronous object are called through."""

    def _connected(self) -> tuple[LoopThread, Any]:
        """Return the loop, and the asynchronous object in it."""
        ...


def _connected(synchronous: _Synchronous) -> tuple[LoopThread, Any]:
    return synchronous._connected()  # pyright: ignore[reportPrivateUsage]


def _call(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    @wraps(method)
    def call(synchronous: _Synchronous, /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop, target = _connected(synchronous)
        return loop.call(method(target, *args, **kwargs))

    return call


def _generator(
    method: Callable[Concatenate[Any, P], AsyncGenerator[R]],
) -> Callable[Concatenate[Any, P], Generator[R]]:
    @wraps(method)
    def call(synchronous: _Synchronous, /, *args: P.args, **kwargs: P.kwargs) -> Generator[R]:
        loop, target = _connected(synchronous)
        return loop.each(method(target, *args, **kwargs))

    return call


def _new_run(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncRun]],
) -> Callable[Concatenate[Client, P], Run]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Run:
        loop, target = _connected(client)
        return Run(loop.call(method(target, *args, **kwargs)).id, client)

    return call


def _subscription(
    method: Callable[Concatenate[Any, P], OrderedSubscription[T] | SharedSubscription[T]],
) -> Callable[Concatenate[Client, P], Subscription[T]]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Subscription[T]:
        loop, target = _connected(client)
        return Subscription(loop, method(target, *args, **kwargs))

    return call


def _sentences(
    method: Callable[Concatenate[Any, P], SentenceSubscription],
) -> Callable[Concatenate[Client, P], Subscription[Sentence]]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Subscription[Sentence]:
        loop, target = _connected(client)
        return Subscription(loop, method(target, *args, **kwargs))

    return call


class Client:
    """A connection to a tokenbus deployment. Use as ``with Client() as bus``; arguments as in `tokenbus.Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str = DEFAULT_PREFIX,
        partitions: int | None = None,
        reconnect_s: float = 30.0,
        max_waiting: int = asynchronous.MAX_WAITING,
        max_queued: int = asynchronous.MAX_QUEUED,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        blobs: str | None = None,
        blob_token: str | None = None,
    ) -> None:
        """Configure the client; does not connect yet. Raises SettingsError for an invalid address or setting."""

        def make() -> asynchronous.Client:
            return asynchronous.Client(
                url,
                prefix=prefix,
                partitions=partitions,
                reconnect_s=reconnect_s,
                max_waiting=max_waiting,
                max_queued=max_queued,
                max_request_bytes=max_request_bytes,
                blobs=blobs,
                blob_token=blob_token,
            )

        self._make = make
        self._bus = make()
        self._loop = LoopThread()

    def open(self) -> Self:
        """Connect, and return the client; `close` it in the end. ``with`` does both.

        Raises ServerUnavailable, ServerTooOld and DeploymentMismatch, as `tokenbus.Client` does when it is entered.
        """
        self._loop.start()
        try:
            self._loop.call(self._bus.__aenter__())
        except BaseException:
            self._loop.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and stop the thread; runs continue. Generators still in use raise RuntimeError.

        In a child process it closes what the child itself opened.
        """
        if self._loop.was_started and not self._loop.forked:
            try:
                self._loop.call(self._bus.aclose())
            finally:
                self._loop.close()

    def _connected(self) -> tuple[LoopThread, asynchronous.Client]:
        """Return the loop, and the asynchronous client in it: new ones in a process that was forked since `open`."""
        if self._loop.forked:
            with _reopening:
                if self._loop.forked:
                    self._bus, self._loop = self._make(), LoopThread()
                    self.open()
        return self._loop, self._bus

    @property
    def blobs(self) -> Blobs:
        """The deployment's blob store. Raises SettingsError like `tokenbus.Client.blobs`."""
        return Blobs(self)

    publish = _new_run(asynchronous.Client.publish)
    retry = _new_run(asynchronous.Client.retry)
    resume = _new_run(asynchronous.Client.resume)
    follow = _generator(asynchronous.Client.follow)
    follow_tree = _generator(asynchronous.Client.follow_tree)
    runs = _generator(asynchronous.Client.runs)
    sessions = _generator(asynchronous.Client.sessions)
    describe = _call(asynchronous.Client.describe)
    cancel = _call(asynchronous.Client.cancel)
    waiting = _generator(asynchronous.Client.waiting)
    approve = _call(asynchronous.Client.approve)
    deny = _call(asynchronous.Client.deny)
    answer = _call(asynchronous.Client.answer)
    tool_result = _call(asynchronous.Client.tool_result)
    decide = _call(asynchronous.Client.decide)
    messages = _call(asynchronous.Client.messages)
    subscribe = _subscription(asynchronous.Client.subscribe)
    sentences = _sentences(asynchronous.Client.sentences)

    def session(self, name: str, *, tenant: str = "") -> Session:
        """The session of this name. Raises RequestInvalid like `tokenbus.Client.session`."""
        return Session(name, self, tenant=tenant)

    def stream(
        self, request: Generate | Mapping[str, object], *, wait_s: float | None = PUBLISHED_WAIT_S
    ) -> Generator[PublicEvent]:
        """Publish a request, at once, and yield all its events, the terminal event last.

        Raises like `publish` and `follow`. See `tokenbus.Client.stream`.
        """
        return self.follow(self.publish(request), wait_s=wait_s, new=True)

    def result(
        self, run: AnyRun | str, *, wait_s: float | None = PUBLISHED_WAIT_S, timeout: float | None = None
    ) -> Response:
        """Wait for the run to end and return its events folded into a response.

        ``wait_s``: seconds to wait for a run that is still unknown. ``timeout``: seconds to wait for its end; the run
        continues after a TimeoutError. Raises RunFailed, RunIncomplete and RunCancelled, each with the partial response
        as ``error.result``; Malformed; TimeoutError; and the errors of `follow`.
        """
        loop, bus = self._connected()
        return loop.call(bus.result(run, wait_s=wait_s), timeout)


class Run:
    """One published run: its id and its operations. Usable while the client is open."""

    def __init__(self, run: str, client: Client) -> None:
        self.id = run
        self._client = client

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    def _connected(self) -> tuple[LoopThread, AsyncRun]:
        """Return the loop, and the asynchronous run in it."""
        loop, bus = _connected(self._client)
        return loop, AsyncRun(self.id, bus)

    events = _generator(AsyncRun.events)
    elements = _generator(AsyncRun.elements)
    messages = _call(AsyncRun.messages)
    cancel = _call(AsyncRun.cancel)

    def result(self, *, wait_s: float | None = PUBLISHED_WAIT_S, timeout: float | None = None) -> Response:
        """Wait for the run to end and return its response. Takes the arguments, and raises the errors, of
        `Client.result`.
        """
        return self._client.result(self, wait_s=wait_s, timeout=timeout)


class Session:
    """A conversation that any number of clients append to and follow; see `tokenbus.Session`."""

    def __init__(self, name: str, client: Client, *, tenant: str = "") -> None:
        self.name = name
        self.tenant = tenant
        self._client = client
        self._connected()

    def __repr__(self) -> str:
        return f"Session({self.name!r})" if not self.tenant else f"Session({self.name!r}, tenant={self.tenant!r})"

    def _connected(self) -> tuple[LoopThread, AsyncSession]:
        """Return the loop, and the asynchronous session in it."""
        loop, bus = _connected(self._client)
        return loop, bus.session(self.name, tenant=self.tenant)

    configure = _call(AsyncSession.configure)
    send = _call(AsyncSession.send)
    interrupt = _call(AsyncSession.interrupt)
    withdraw = _call(AsyncSession.withdraw)
    delete = _call(AsyncSession.delete)
    append = _call(AsyncSession.append)
    fate = _call(AsyncSession.fate)
    check = _call(AsyncSession.check)
    configuration = _call(AsyncSession.configuration)
    follow = _generator(AsyncSession.follow)
    messages = _call(AsyncSession.messages)

    def fork(
        self, name: str, *, through: str | None = None, append: str | None = None, wait_s: float = ACCEPTED_WAIT_S
    ) -> Session:
        """Begin a new session with the history through a run; see `tokenbus.Session.fork`, which raises the same."""
        loop, session = self._connected()
        forked = loop.call(session.fork(name, through=through, append=append, wait_s=wait_s))
        return Session(forked.name, self._client, tenant=self.tenant)


class Blobs:
    """The deployment's blob store; see `tokenbus.Client.blobs`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def _connected(self) -> tuple[LoopThread, AsyncBlobs]:
        """Return the loop, and the asynchronous client of the store."""
        loop, bus = _connected(self._client)
        return loop, bus.blobs

    get = _call(AsyncBlobs.get)
    chunks = _generator(AsyncBlobs.chunks)

    def put(self, content: bytes | Iterable[bytes], media_type: str = DEFAULT_MEDIA_TYPE) -> BlobRef:
        """Store content, whole or in pieces that are read as they are sent. Raises like `tokenbus.Client.blobs.put`."""
        loop, blobs = self._connected()
        return loop.call(blobs.put(content if isinstance(content, bytes) else _pieces(content), media_type))


class Subscription(Generic[E]):
    """The events of a topic, or sentences. Enter it with ``with`` and iterate over it."""

    def __init__(self, loop: LoopThread, events: Any) -> None:
        self._loop = loop
        self._events = events

    def _connected(self) -> tuple[LoopThread, Any]:
        """Return the loop, and the asynchronous subscription in it. After a fork it is the parent's, and raises."""
        return self._loop, self._events

    @property
    def cursor(self) -> Cursor:
        """The position from which another subscription can continue; see `tokenbus.OrderedSubscription.cursor`.

        Raises RuntimeError if the subscription has not started.
        """
        return self._events.cursor

    def __enter__(self) -> Self:
        self._loop.call(self._events.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call(self._events.__aexit__(kind, error, trace))

    def close(self) -> None:
        """End the subscription: iteration ends and the connection is released."""
        self._loop.call(self._events.aclose())

    def ack(self, event: E) -> None:
        """Mark the event as done (``ack="explicit"``). Does nothing if it is not in flight."""

        async def ack() -> None:
            self._events.ack(event)

        self._loop.call(ack())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        try:
            return self._loop.call(self._events.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


async def _pieces(content: Iterable[bytes]) -> AsyncGenerator[bytes]:
    pieces = iter(content)
    # In a thread, because it may read a file.
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


_reopening = threading.Lock()


def _after_fork() -> None:
    global _reopening  # noqa: PLW0603 - another thread of the parent may have held it
    _reopening = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
