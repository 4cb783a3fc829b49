"""`tokenbus worker`: one service under uvicorn, from loading its settings to an orderly stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib.util
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import structlog
import uvicorn
from redis.exceptions import RedisError

from tokenbus.bus.server.server import parse_url
from tokenbus.errors import ServerUnavailable, SettingsError
from tokenbus_services import settings as configuration
from tokenbus_services.blobs.auth import check_exposed, secret_of, token_of
from tokenbus_services.cli import service_registry as services
from tokenbus_services.cli.connect import with_server
from tokenbus_services.cli.http_probe import probe
from tokenbus_services.cli.mock import with_mock
from tokenbus_services.cli.service_registry import ServiceName
from tokenbus_services.cli.signals import stop_on_signal
from tokenbus_services.net.http_server import ENDLESS, HttpBounds, server_config
from tokenbus_services.net.web_socket import BoundedSocket
from tokenbus_services.redaction.known_secrets import secrets_of
from tokenbus_services.runtime import logs
from tokenbus_services.runtime.app.service_app import EMBEDDED
from tokenbus_services.runtime.supervision import LoopWatch
from tokenbus_services.settings import ConsoleSettings, Settings

_HTTP_GRACE_S = 3
"""How long HTTP requests in progress may take at shutdown."""
_LAST_WORDS_S = 1.0
"""Before the end of that time: when what is left gets its end by name."""
_FILES_BESIDE = 256
_IDLE_S = 5
_KEPT_S = 75.0
"""How long the gateway keeps an idle connection: longer than proxies do, so that they meet no closed one."""
_FIRST_ASK_S, _LONGEST_ASK_S = 0.02, 0.5
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def run(
    service: ServiceName,
    *,
    host: str | None = None,
    port: int | None = None,
    mock_url: str | None = None,
    console: bool = False,
) -> None:
    """Run the service until a signal. ``console``: a gateway serves it, also if the settings do not say so.

    Raises SettingsError, and ServerError if it cannot work with the server.
    """
    settings = with_server(configuration.load())
    if mock_url:
        settings = with_mock(settings, mock_url)
    if console and settings.console is None:
        settings = msgspec.structs.replace(settings, console=ConsoleSettings())
    secrets = secrets_of(settings, os.environ) | {token_of(settings.blobs, os.environ)}
    if service == "gateway" and settings.gateway and settings.gateway.admin:
        secrets |= {secret_of(settings.gateway.admin.token_env, os.environ).value}
    logs.configure(settings.log_level, service=service, secrets=secrets)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # at lower levels it logs sentences, not events
    assert settings.redis_url
    wanted = getattr(settings.http, service) if port is None else port
    raise_open_files(_files_needed(service, settings))
    with LoopWatch() as watch, listening(service, host or settings.http.host, wanted) as listener:
        if service == "blobs":
            check_exposed(settings.blobs, os.environ, listener.getsockname()[0])
        if service == "gateway":
            from tokenbus_services.gateway.callers import check_exposed as check_gateway_exposed

            check_gateway_exposed(settings, listener.getsockname()[0])
        app = services.create(service, settings)
        collect_less_often()
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                watch.follow(runner.get_loop())
                grace_s, leave_s = times_to_stop(service, settings)
                bounds = http_bounds(service, settings)
                runner.run(serve(service, app, listener, bounds, grace_s=grace_s, leave_s=leave_s))
        except (RedisError, ConnectionError, TimeoutError) as e:
            raise ServerUnavailable(parse_url(settings.redis_url).safe, str(e) or type(e).__name__) from e


@contextmanager
def listening(service: ServiceName, host: str, port: int) -> Generator[socket.socket]:
    """Open the socket of the HTTP pages. Raises SettingsError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as e:
        problem = getattr(e, "strerror", None) or str(e)
        in_use = getattr(e, "errno", None) == errno.EADDRINUSE
        cause = "another `tokenbus up` may be running on this machine: stop it, or " if in_use else ""
        raise SettingsError(
            "settings",
            f"http.{service}",
            f"{host}:{port}: {problem}; {cause}set another port in the settings (0: any free one); "
            f"`tokenbus worker {service}` has --port, too",
        ) from None
    with listener:
        yield listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of the pages, as seen from this machine."""
    address: tuple[str, int] = listener.getsockname()[:2]
    host, port = _ANY_HOST.get(address[0], address[0]), address[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    service: ServiceName,
    app: AsgiApp,
    listener: socket.socket,
    bounds: HttpBounds,
    *,
    grace_s: int = _HTTP_GRACE_S,
    leave_s: float = 0.0,
) -> None:
    """Start the app, announce when it is ready, and stop it after a signal. Raises any other error that stopped it.

    From the signal on `/ready` says no. A service whose work comes by HTTP accepts connections for ``leave_s`` more and
    lets requests in progress finish for ``grace_s``, or until a second signal; then they are cancelled, and the app
    stops. Of the others the app stops first, so that their pages show how they drain.
    """
    by_http, hurry = service in services.SERVES_HTTP, asyncio.Event()
    stop = stop_on_signal(hurry) if by_http else stop_on_signal()
    lifespan = Lifespan(app)
    await lifespan.start()
    front = _Front(app)
    server = _Server(config_of(service, front, bounds, grace_s=grace_s), hurry)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    over = asyncio.create_task(lifespan.ended())
    announcing = asyncio.create_task(_announce(service, url_of(listener)))
    await asyncio.wait({asyncio.create_task(stop.wait()), over, serving}, return_when=asyncio.FIRST_COMPLETED)
    announcing.cancel()
    await asyncio.wait({announcing})
    front.leaving = True
    try:
        if by_http:
            await server.leave(leave_s, over)
        else:
            await lifespan.stop()
    finally:
        server.should_exit = True
        await asyncio.wait({serving})
    if by_http:
        await lifespan.stop()
    serving.result()


def http_bounds(service: ServiceName, settings: Settings) -> HttpBounds:
    """The limits of a service's connections. Clients of the gateway keep theirs for long, and proxies reuse them."""
    if service == "gateway" and settings.gateway:
        return HttpBounds(
            connections=settings.gateway.connections,
            head_s=_KEPT_S,
            answer_s=settings.gateway.send_timeout_s,
            message_bytes=settings.gateway.body_bytes,
            unfinished_bytes=settings.gateway.inbound_bytes,
        )
    return HttpBounds(connections=settings.http.connections)


def config_of(service: ServiceName, app: AsgiApp, bounds: HttpBounds, *, grace_s: int) -> uvicorn.Config:
    """uvicorn's options for a service. Only the gateway has WebSocket routes."""
    is_gateway = service == "gateway"
    kept_s = round(bounds.head_s) if is_gateway else _IDLE_S
    return server_config(app, bounds, web_sockets=is_gateway, grace_s=grace_s, kept_s=kept_s)


def times_to_stop(service: ServiceName, settings: Settings) -> tuple[int, float]:
    """How long HTTP requests in progress may take once the service stops, and how long it accepts more before."""
    if service == "gateway" and settings.gateway:
        return max(_HTTP_GRACE_S, round(settings.stages.drain_s)), settings.gateway.leave_s
    return _HTTP_GRACE_S, 0.0


def _files_needed(service: ServiceName, settings: Settings) -> int:
    """Count connections to the pages, a fetcher's provider calls with a blob each, also beyond its slots
    (`wait_queue.RESERVE`), and files that are always open.
    """
    calls = 4 * settings.limits.runs_per_fetcher if service in services.CALLS_PROVIDERS else 0
    connections = http_bounds(service, settings).connections
    return connections + calls + _FILES_BESIDE


class _Front:
    """The app, whose `/ready` says no once its server leaves: load balancers then look elsewhere."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self.leaving = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if not (self.leaving and scope.get("path") == "/ready"):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"status":"stopping"}'})


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process by the signal that asked for an orderly stop."""

    def __init__(self, config: uvicorn.Config, hurry: asyncio.Event) -> None:
        """``hurry``: ends every answer at once when it is set."""
        super().__init__(config)
        self._hurry = hurry

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def leave(self, seconds: float, over: asyncio.Task[None]) -> None:
        """Go on accepting, each connection for one answer, until ``over``, a second signal, or the time has passed."""
        if seconds:
            self.config.encoded_headers.append((b"connection", b"close"))
            hurry = asyncio.create_task(self._hurry.wait())
            await asyncio.wait({over, hurry}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel what has no end of its own, and after the grace what is left. That is no error, as uvicorn says: such
        an answer ends in words.
        """
        for task in [task for task in self.server_state.tasks if task.get_name() == ENDLESS]:
            task.cancel()
        hurrying = asyncio.create_task(self._cancel_all())
        said = logging.getLogger("uvicorn.error")
        said.addFilter(_is_no_grace)
        try:
            await super().shutdown(sockets)
        finally:
            said.removeFilter(_is_no_grace)
            hurrying.cancel()

    async def _cancel_all(self) -> None:
        """End every answer by name: when told to hurry, or in time before uvicorn cancels it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, (self.config.timeout_graceful_shutdown or 0) - _LAST_WORDS_S)):
                await self._hurry.wait()
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedSocket):
                connection.close_now()
        await asyncio.sleep(0.1)  # the apps of these sockets end by themselves
        for task in list(self.server_state.tasks):
            task.cancel()


def _is_no_grace(record: logging.LogRecord) -> bool:
    said = record.getMessage()
    return "timeout graceful shutdown exceeded" not in said and "returned without completing response" not in said


async def _announce(service: ServiceName, url: str) -> None:
    pause_s = _FIRST_ASK_S
    while True:
        try:
            if await probe(f"{url}/ready") == 200:
                break
        except (OSError, ValueError):
            pass  # not yet
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_ASK_S)
    print(f"ready {service} {url}", flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


MAX_OPEN_FILES = 65_536
"""More than any worker needs. Some systems report an infinite limit but reject numbers that are too large."""

_log = structlog.stdlib.get_logger()


def raise_open_files(needed: int) -> int | None:
    """Raise this process's soft limit of open files as far as allowed. Return the resulting limit; None: unlimited.

    Systems start programs with 1,024 for the sake of ``select``, which no worker uses. Logs a warning if the limit
    stays below ``needed``.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_OPEN_FILES if hard == unlimited else min(hard, MAX_OPEN_FILES)
    if soft != unlimited and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited:
        return None
    if soft < needed:
        _log.warning("open_files_low", limit=soft, needed=needed)
    return soft


YOUNG = 10_000
"""New objects before the youngest generation is looked at. Python's default of 700 (2,000 from 3.13 on) is reached
several times in one batch, and what a batch makes is freed by its reference counts."""
MIDDLE, OLD = 10, 10
"""Python's defaults: old objects are looked at once in a hundred looks at the youngest."""


def collect_less_often() -> None:
    """Keep all that a service imported and built out of every later collection, and look at the rest less often.

    A worker under full load spends 5 % of its time in the collector otherwise. Call it once, before the service runs.
    The collector is on after that; the command's entry has turned it off for the imports.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


# Drives an ASGI app's lifespan, so that the error that stops an app keeps its type.
#
# uvicorn would log it with its traceback and end the process itself, and it would not notice an app that fails while it
# runs. Messages: https://asgi.readthedocs.io/en/latest/specs/lifespan.html

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Lifespan:
    """One app, from its start to its stop."""

    def __init__(self, app: AsgiApp, *, embedded: bool = False) -> None:
        """``embedded``: the process belongs to another program, which the app must not end."""
        self._app = app
        self._extensions: dict[str, Any] = {EMBEDDED: {}} if embedded else {}
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the app; returns when it has started. Raises the error that stopped it."""
        self._messages.put_nowait({"type": "lifespan.startup"})
        self._task = asyncio.create_task(self._run(), name="lifespan")
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not self._started.is_set():
            await self._task

    async def ended(self) -> None:
        """Wait until the app has ended, asked or not; `stop` then raises its error."""
        assert self._task
        await asyncio.wait({self._task})

    async def stop(self) -> None:
        """Stop the app; returns when it has stopped. Raises the error that stopped it."""
        assert self._task
        self._messages.put_nowait({"type": "lifespan.shutdown"})
        await self._task

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}, "extensions": self._extensions}
        await self._app(scope, self._messages.get, self._on_app_message)

    async def _on_app_message(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            self._started.set()
