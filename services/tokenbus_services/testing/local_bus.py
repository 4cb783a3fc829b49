"""A server process, plus the mock provider and every service in a thread of this process."""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import structlog
import uvicorn
from redis import Redis

from tokenbus import Client
from tokenbus.bus.keys import DEFAULT_PREFIX
from tokenbus.errors import SettingsError
from tokenbus.sync import Client as SyncClient
from tokenbus_services.cli import service_registry as services
from tokenbus_services.cli.mock import API_PATHS
from tokenbus_services.cli.service_registry import ServiceName, services_of
from tokenbus_services.cli.worker import AsgiApp, Lifespan, config_of, http_bounds, listening, url_of
from tokenbus_services.mock_provider import Exchange, MockProvider, ModelRequest, Reply, Script, Turn
from tokenbus_services.mock_provider.request import HttpError
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.settings import Settings, load

START_S = 60.0
THREAD = "tokenbus local bus"
_HTTP_GRACE_S = 1


_END_S = 30.0
"""Longest time that open runs may take to end at a reset."""
_FORGOTTEN = re.compile(
    r":(?:run|log|tape|index|session):|:(?:lease|members):(?:visible|chunks|blocks|runs|decisions|sessions)"
    r"|:\{(?:limits|activity|records|gateway)\}:|:dead\}:rejected$|:(?:dead|visible|chunks|blocks|runs|decisions|sessions)$"
)
"""Keys of runs, sessions, topics, subscribers and the gateway. Those of the stages stay: the workers use them."""
_UNUSED = re.compile(
    r"redis_url|data_dir|log_level|http\.(?!gateway$|hosts$|connections$).*|blobs\.service_url"
    r"|limits\.(?:policy|tool)_executors|stages\.drain_s"
    rf"|providers\.(?:mock-)?(?:{'|'.join(API_PATHS)})\.(?:api|base_url|path|path_whole|auth|api_key_env|api_key_file)"
)
"""Settings that have no effect here, with dots: the bus has a server, ports, models and processes of its own."""

Says = str | Reply | Turn
"""What a model answers in a turn."""


class NoSuchModel(LookupError):
    """A request named a model without a script. Its run failed with `not_found` and the model's name; this is raised at
    the end of the ``with`` block, or at `LocalBus.reset`.
    """


class LocalBus:
    """A private bus for a test: ``with LocalBus() as bus``. Starts in about a second and leaves nothing behind.

    One bus may serve many tests: `reset` between them takes some tens of milliseconds.

    Has the providers `anthropic`, `openai-chat`, `openai-responses`, `gemini` and `gemini-interactions`, also under the
    names that they have with `tokenbus up --mock`; each answers as scripted by `model_says`. The services run in their
    own thread, so a test may block. Thread-safe. The bus never ends the test's process: if a service cannot continue,
    the bus stops, and `stop` raises the service's error.
    """

    def __init__(self, settings: str = "") -> None:
        """``settings``: the text of a `tokenbus.toml`: tools, policies, limits. Callables that it names (``call =
        "tests.my_tools:weather"``) run in this process, and so do policies. Settings that have no effect here (the
        server's address, say) are named by a warning at the start.
        """
        self._settings_text = settings
        self._scripts: dict[str, Script | Callable[[ModelRequest], Says]] = {}
        self._unknown: list[str] = []
        self._first_exchange = 0
        """Those before it are of tests before the last reset."""
        self._directory = tempfile.TemporaryDirectory(prefix="tokenbus-test-", ignore_cleanup_errors=True)
        self._server = EmbeddedServer(Path(self._directory.name, "server"))
        self._provider = MockProvider(choose=self._script_of)
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._gateway = ""
        self._gateway_port = 0
        self._blobs = ""
        self._prefix = DEFAULT_PREFIX
        self._resetting: tuple[Any, SyncClient] | None = None
        """What `reset` works with: opening it anew would take longer than a reset."""
        self._open = ExitStack()

    @property
    def url(self) -> str:
        """The server's URL for `Client`. Known while the bus is running."""
        return self._server.url

    @property
    def gateway(self) -> str:
        """The gateway's URL, if the settings have a table `[gateway]`; else empty. Known while the bus is running. Its
        port is any free one, unless `[http] gateway` sets it.
        """
        return self._gateway

    @property
    def blobs(self) -> str:
        """The blob service's URL for `Client`'s ``blobs``. Known while the bus is running."""
        return self._blobs

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which ``Client()`` in another process finds this bus."""
        return {"TOKENBUS_REDIS_URL": self.url}

    @property
    def requests(self) -> list[dict[str, Any]]:
        """The JSON bodies of the requests to the provider, oldest first."""
        return [msgspec.json.decode(exchange.http_request.body) for exchange in self.exchanges]

    @property
    def exchanges(self) -> list[Exchange]:
        """The requests to the provider and the outcome of each answer (``state``, ``status``), oldest first."""
        return list(self._provider.requests[self._first_exchange :])

    def model_says(self, model: str, *turns: Says | Callable[[ModelRequest], Says], repeat_last: bool = True) -> None:
        """Script a model: turn n of a conversation is answered with ``turns[n]``, later turns with the last one.

        A `Reply` has thinking, text and tool calls; a `Turn` also sets delivery and faults. In place of turns, one
        function may be given: it gets each request, in the services' thread, and returns what is answered; what it
        raises fails the call, and is raised again by `stop`. Replaces the model's earlier script. ``repeat_last``: if
        False, a turn beyond the script is an error. Raises ValueError for no turns, or a function among several.
        """
        fixed = [turn for turn in turns if not callable(turn)]
        if len(turns) == 1 and callable(turns[0]):
            self._scripts[model] = turns[0]
        elif fixed and len(fixed) == len(turns):
            scripted = tuple(map(_turn, fixed))
            self._scripts[model] = Script(name=model, turns=scripted, repeat_last=repeat_last)
        else:
            raise ValueError(f"model_says({model!r}, …): takes one or more turns, or a single function")

    def request(self, model: str, text: str = "Go on.", **fields: object) -> dict[str, object]:
        """Build a request for ``Client.publish``: one user message to this model, at provider `anthropic` by
        default.
        """
        return {"provider": "anthropic", "model": model, "messages": [{"role": "user", "content": text}], **fields}

    def client(self, **options: Any) -> Client:
        """Create a client of this bus; open it with ``async with``."""
        options = {"prefix": self._prefix, "blobs": self._blobs, **options}
        return Client(self.url, **options)

    def sync_client(self, **options: Any) -> SyncClient:
        """Create a synchronous client of this bus; open it with ``with``."""
        options = {"prefix": self._prefix, "blobs": self._blobs, **options}
        return SyncClient(self.url, **options)

    def resume(self, exchange: Exchange) -> None:
        """Resume an answer that a `Stall` holds."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._provider.resume, exchange)

    def start(self) -> None:
        """Start everything. Raises SettingsError, ServerError, and any other startup error of a service."""
        if not structlog.is_configured():  # else the test's own configuration decides
            structlog.configure(processors=[_quiet, *structlog.get_config()["processors"]])
        self._server.start()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            self.stop()
            raise TimeoutError(f"the services did not start within {START_S:.0f} s")
        if self._error:
            self.stop()

    def stop(self) -> None:
        """Stop everything, including open runs. Raises the error that ended a service meanwhile."""
        self._resetting = None
        self._open.close()
        if self._loop and self._stop:
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread:
            self._thread.join(START_S)
        self._server.stop()
        self._directory.cleanup()
        error, self._error = self._error, None
        if isinstance(error, SettingsError):
            raise error.with_traceback(None) from None  # where in the services it was found tells a test nothing
        if error:
            raise error

    def __enter__(self) -> Self:
        self.start()
        return self

    def reset(self) -> None:
        """Make the bus as new: open runs are cancelled, and all runs, events, scripts and exchanges are forgotten.

        Tools, policies and other settings stay. Close subscriptions before. Raises NoSuchModel if a request named a
        model without a script; TimeoutError if a run did not end within 30 s.
        """
        if self._resetting is None:
            server: Any = Redis.from_url(self.url)  # pyright: ignore[reportUnknownMemberType]
            self._open.enter_context(closing(server))
            self._resetting = server, self._open.enter_context(self.sync_client())
        server, bus = self._resetting
        _until(lambda: not server.xlen(f"{self._prefix}:requests"), "requests were not taken in")
        for run in bus.runs(state="open"):
            bus.cancel(run.run, "the test has ended")
        _until(lambda: not list(bus.runs(state="open", limit=1)), "runs did not end")
        if keys := [key for key in server.scan_iter(count=1000) if _FORGOTTEN.search(key.decode())]:
            server.unlink(*keys)
        self._scripts.clear()
        self._provider.forget_tries()
        self._first_exchange = len(self._provider.requests)
        self._raise_for_unknown()

    def _raise_for_unknown(self) -> None:
        unknown, self._unknown = self._unknown, []
        if unknown:
            raise NoSuchModel(_no_script(unknown[0]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self._raise_for_unknown()

    def _script_of(self, request: ModelRequest) -> Script | Turn:
        script = self._scripts.get(request.model)
        if script is None:
            self._unknown.append(request.model)
            raise HttpError(404, _no_script(request.model))
        return script if isinstance(script, Script) else _turn(script(request))

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self._error = e
            if self._started.is_set():
                self._server.stop()  # what waits for a run of this bus gets an error instead of waiting for ever
        finally:
            self._loop = None
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._provider)
            listener = stack.enter_context(listening("blobs", "127.0.0.1", 0))
            self._blobs = url_of(listener)
            settings = self._settings(self._blobs)
            # Settings of its own for each: their `keys` belong to one deployment of one worker.
            apps: dict[ServiceName, AsgiApp] = {
                name: services.create(name, msgspec.structs.replace(settings)) for name in services_of(settings)
            }
            await stack.enter_async_context(_served("blobs", apps["blobs"], listener, settings))
            if "gateway" in apps:
                listener = stack.enter_context(listening("gateway", "127.0.0.1", self._gateway_port))
                self._gateway = url_of(listener)
                await stack.enter_async_context(_served("gateway", apps["gateway"], listener, settings))
            running: dict[ServiceName, Lifespan] = {}
            try:
                for name, app in apps.items():
                    running[name] = Lifespan(app, embedded=True)
                    await running[name].start()
                self._started.set()
                waits = [asyncio.create_task(self._stop.wait())]
                waits += [asyncio.create_task(one.ended()) for one in running.values()]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            finally:
                ended = await asyncio.gather(*(one.stop() for one in running.values()), return_exceptions=True)
                for error in filter(None, ended):
                    raise error

    def _settings(self, blobs_url: str) -> Settings:
        given: dict[str, Any] = {}
        with suppress(msgspec.DecodeError):  # `load` says what is wrong
            given = msgspec.toml.decode(self._settings_text, type=dict[str, Any])
        models = {name: (api, path) for api, path in API_PATHS.items() for name in (api, f"mock-{api}")}
        tables = "".join(
            f'[providers.{name}]\napi = "{api}"\nbase_url = "{self._provider.url}{path}"\n'
            for name, (api, path) in models.items()
            if name not in given.get("providers", {})
        )
        file = Path(self._directory.name, "tokenbus.toml")
        file.write_text(f"{self._settings_text}\n{tables}", encoding="utf-8")
        settings = load({"TOKENBUS_CONFIG": str(file)})
        if unused := sorted(key for key in _keys_of(given) if _UNUSED.fullmatch(key)):
            warnings.warn(f"LocalBus does not use these settings: {', '.join(unused)}", stacklevel=1)
        scripted = {
            name: msgspec.structs.replace(
                settings.providers[name], base_url=self._provider.url + path, api_key_env="", api_key_file=None
            )
            for name, (_, path) in models.items()
        }
        self._prefix = settings.prefix
        self._gateway_port = given.get("http", {}).get("gateway", 0)
        return msgspec.structs.replace(
            settings,
            redis_url=self.url,
            data_dir=self._directory.name,
            log_level="warning",
            providers=settings.providers | scripted,
            blobs=msgspec.structs.replace(settings.blobs, service_url=blobs_url),
            # Policies and tools may be the test's own.
            limits=msgspec.structs.replace(settings.limits, policy_executors=0, tool_executors=False),
            # Nobody waits for what a test leaves open.
            stages=msgspec.structs.replace(settings.stages, drain_s=0.0),
        )


def _keys_of(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _keys_of(cast("dict[str, Any]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}"


def _quiet(_logger: object, level: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Drop what the services say of each run: it is noise in a test's failure. Other threads log as before."""
    if level in ("debug", "info") and threading.current_thread().name == THREAD:
        raise structlog.DropEvent
    return line


def _turn(says: Says) -> Turn:
    if isinstance(says, str):
        says = Reply(text=says)
    return says if isinstance(says, Turn) else Turn(says=says)


def _no_script(model: str) -> str:
    return f"no script for model {model!r}: call model_says({model!r}, …)"


def _until(done: Callable[[], bool], problem: str) -> None:
    give_up = time.monotonic() + _END_S
    while not done():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{problem} within {_END_S:.0f} s")
        time.sleep(0.005)


@asynccontextmanager
async def _served(service: ServiceName, app: AsgiApp, listener: Any, settings: Settings) -> AsyncGenerator[None]:
    server = uvicorn.Server(config_of(service, app, http_bounds(service, settings), grace_s=_HTTP_GRACE_S))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
