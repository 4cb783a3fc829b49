"""`tokenbus demo`: runs the whole bus on this machine for one request, then removes every trace."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec

from tokenbus import Client
from tokenbus.blob_wire import DEPLOYMENT_ENV, URL_ENV
from tokenbus.bus.server.url import URL_ENV as REDIS_URL_ENV
from tokenbus.bus.server.url import URL_FILE_ENV
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Generate, Message, Thinking, Tool
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.output import showing
from tokenbus_services.cli.runs.send import show_run
from tokenbus_services.cli.service_registry import services_of
from tokenbus_services.cli.signals import stop_on_signal
from tokenbus_services.cli.up.command import StartTable
from tokenbus_services.cli.up.supervisor import Child, ChildGone, ChildrenSlow, Supervisor, Watcher, WorkerSlot
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port
from tokenbus_services.settings import Settings, StageSettings
from tokenbus_services.weather import WEATHER_CALL, WEATHER_DESCRIPTION, WEATHER_PARAMETERS, WEATHER_TOOL

START_S = 60.0
STOP_GRACE_S = StageSettings().drain_s + 10.0
SERVER, PROVIDER = "server", "provider"
SERVICES = services_of(Settings())


def run(*, provider: str | None, model: str | None, keep: bool) -> int:
    """Run the demo; return the exit code: 0 if the run completed.

    Raises SettingsError, ServerError, RunError; ChildGone and ChildrenSlow for a child that ended or is slow.
    """
    plan = plan_for(provider, model, os.environ)
    directory = Path(tempfile.mkdtemp(prefix="tokenbus-demo-"))
    names = [SERVER, *([PROVIDER] if plan.replayed else []), *SERVICES]
    try:
        with demo_watcher(directory, names) as watcher:
            return asyncio.run(_until_signal(plan, directory, watcher))
    finally:
        if keep:
            print(f"[kept] {directory}", flush=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def _until_signal(plan: DemoPlan, directory: Path, watcher: DemoWatcher) -> int:
    stop = stop_on_signal()
    demo = asyncio.create_task(_demo(plan, directory, watcher))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({demo, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not demo.done():
        demo.cancel()
        await asyncio.wait({demo})
        return ending.INTERRUPTED
    return demo.result()


async def _demo(plan: DemoPlan, directory: Path, watcher: DemoWatcher) -> int:
    async with _server(directory, watcher) as url, _provider(plan, watcher) as base_url:
        config = directory / "tokenbus.toml"
        config.write_text(
            settings_text(plan, redis_url=url, base_url=base_url, directory=directory, blobs_port=free_port()),
            encoding="utf-8",
        )
        supervisor = Supervisor(
            [
                WorkerSlot(
                    name=service,
                    service=service,
                    withheld=frozenset() if service == "fetcher" else KEY_VARIABLES,
                )
                for service in SERVICES
            ],
            env=environment(os.environ, config),
            watcher=watcher,
            grace_s=STOP_GRACE_S,
            restart=False,
        )
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:  # if a service ends, the demo ends, and vice versa
                group.create_task(supervisor.run(stop))
                await supervisor.all_ready(timeout_s=START_S)
                watcher.on_request(request_of(plan))
                status = await _one_run(plan, url)
                stop.set()
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        return status


async def _one_run(plan: DemoPlan, url: str) -> int:
    async with Client(url) as bus:
        run = await bus.publish(request_of(plan))
        with showing() as show:
            status = await show_run(bus, run.id, show, wait_s=START_S)
        if status:
            await run.result()  # raises the run's error
        return status


@asynccontextmanager
async def _server(directory: Path, watcher: DemoWatcher) -> AsyncGenerator[str]:
    server = EmbeddedServer(directory / SERVER)
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        await asyncio.shield(starting)
        watcher.ready(SERVER, server.url)
        yield server.url
    finally:
        await asyncio.wait({starting})  # a start continues in its thread, even if this call is cancelled
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def _provider(plan: DemoPlan, watcher: DemoWatcher) -> AsyncGenerator[str | None]:
    """The base URL of the mock provider, or the plan's URL of the real one."""
    if not plan.replayed:
        yield plan.base_url
        return
    first_line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if first_line.done():
            watcher.on_line(PROVIDER, line)
        else:
            first_line.set_result(line)  # its first line is its URL

    env = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    child = await Child.start([sys.executable, "-P", "-m", "tokenbus_services.mock_provider"], env, on_line)
    try:
        ended = asyncio.create_task(child.ended())
        await asyncio.wait({first_line, ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ChildGone(PROVIDER, ended.result(), first_line.result() if first_line.done() else "")
        if not first_line.done():
            raise ChildrenSlow([PROVIDER], START_S)
        watcher.ready(PROVIDER, first_line.result())
        yield first_line.result()
    finally:
        await child.stop(STOP_GRACE_S)


# The output of `tokenbus demo` around its run: service startup and the request. Service logs go to files.


class DemoWatcher(Watcher, Protocol):
    """Receives the demo's events, besides those of its services."""

    def on_request(self, request: Generate) -> None: ...


@contextmanager
def demo_watcher(directory: Path, names: Sequence[str]) -> Generator[DemoWatcher]:
    """Return the watcher that suits stdout; services log to files in the directory."""
    console = output.console()
    if console is None:
        yield PlainDemo(directory)
    else:
        with StartTable(console, names, transient=True) as table:
            yield ShownDemo(directory, table)


class _Logs:
    """One log file per child."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_line(self, name: str, line: str) -> None:
        with (self._directory / f"{name}.log").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def stopping(self) -> None:
        """Show nothing: the answer has been shown."""


class PlainDemo(_Logs):
    """Marked lines, in the format of `plain_text.PlainText`."""

    def ready(self, name: str, url: str) -> None:
        print(f"[ready] {name} {url}", flush=True)

    def died(self, name: str, how: str, pause_s: float) -> None:
        print(f"[died] {name} {how}", flush=True)

    def all_ready(self) -> None:
        """Show nothing: each service already has its own line."""

    def on_request(self, request: Generate) -> None:
        print(f"[user] {_question(request)}", flush=True)


class ShownDemo(_Logs):
    """A live table while services start, then the question in a panel."""

    def __init__(self, directory: Path, table: StartTable) -> None:
        super().__init__(directory)
        self._table = table

    def ready(self, name: str, url: str) -> None:
        self._table.ready(name, url)

    def died(self, name: str, how: str, pause_s: float) -> None:
        self._table.died(name, how, pause_s)

    def all_ready(self) -> None:
        self._table.stop()

    def on_request(self, request: Generate) -> None:
        from rich.panel import Panel

        self._table.console.print(Panel(_question(request), title="user", title_align="left", border_style="yellow"))


def _question(request: Generate) -> str:
    content = request.messages[-1].content
    assert isinstance(content, str)
    return content


# Plans the demo: its request, its provider, and the settings of its services. Pure.

MODELS: Final[dict[ApiName, str]] = {
    "anthropic": "claude-haiku-4-5",
    "openai-chat": "gpt-5-mini",
    "openai-responses": "gpt-5-mini",
    "gemini": "gemini-flash-latest",
}
"""The default model per API, for a real provider."""
BASE_URL_ENV: Final[dict[ApiName, str]] = {
    "anthropic": "ANTHROPIC_BASE_URL",
    "openai-chat": "OPENAI_BASE_URL",
    "openai-responses": "OPENAI_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
}
"""Named as in the vendors' own SDKs."""
_VERSION: Final[dict[ApiName, str]] = {"gemini": "/v1beta"}
"""Appended to a URL from the environment: Google's has no version, but `base_url` includes it."""
REPLAYED: Final[ApiName] = "anthropic"
_API: Final[dict[str, ApiName]] = {api: api for api in MODELS}
KEY_VARIABLES: Final = frozenset(
    name for api in MODELS for key in [registry.get(api).default_key_env] for name in (key, f"{key}_FILE")
)
"""Variables that may hold provider keys; only the fetcher gets them."""
_OURS = (REDIS_URL_ENV, URL_FILE_ENV, "TOKENBUS_DATA", "TOKENBUS_PARTITIONS", URL_ENV, DEPLOYMENT_ENV)


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which provider and model the demo calls."""

    api: ApiName
    model: str
    replayed: bool
    """Whether the mock provider answers; no key is needed then."""
    base_url: str | None = None
    """The real provider's address; None for its default."""
    thinking: bool = True


def plan_for(provider: str | None, model: str | None, env: Mapping[str, str]) -> DemoPlan:
    """Return the plan for these options. Raises SettingsError if the API is unknown or its key is missing."""
    if provider is None:
        if model is not None:
            raise SettingsError("options", "--model", "needs --provider: the mock provider has one model")
        return DemoPlan(api=REPLAYED, model=DEMO_MODEL, replayed=True)
    api = _API.get(provider)
    if api is None:
        raise SettingsError("options", "--provider", f"{provider!r} is not built; there are {', '.join(MODELS)}")
    variable = registry.get(api).default_key_env
    if not env.get(variable):
        raise SettingsError("environment", variable, f"holds no key; without --provider {api} the demo needs none")
    return DemoPlan(
        api=api,
        model=model or MODELS[api],
        replayed=False,
        base_url=f"{url.rstrip('/')}{_VERSION.get(api, '')}" if (url := env.get(BASE_URL_ENV[api])) else None,
        thinking=api in ("anthropic", "gemini"),  # OpenAI shows thinking only for some models and accounts
    )


def request_of(plan: DemoPlan) -> Generate:
    """Return the demo's request. The tool is declared in the settings, so its name is enough."""
    return Generate(
        provider=plan.api,
        model=plan.model,
        messages=[Message(role="user", content=DEMO_PROMPT)],
        tools=[Tool(name=WEATHER_TOOL)],
        thinking=Thinking(budget_tokens=1024) if plan.thinking else None,
    )


def settings_text(plan: DemoPlan, *, redis_url: str, base_url: str | None, directory: Path, blobs_port: int) -> str:
    """Return the `tokenbus.toml` of the demo's services: free ports, and the tool."""
    provider: dict[str, object] = {"api": plan.api}
    if base_url:
        provider["base_url"] = base_url
    if plan.replayed:
        provider["api_key_env"] = ""
    tool = {
        "kind": "python",
        "call": WEATHER_CALL,
        "description": WEATHER_DESCRIPTION,
        "parameters": WEATHER_PARAMETERS,
    }
    settings: dict[str, object] = {
        "redis_url": redis_url,
        "data_dir": str(directory),
        "http": {"fetcher": 0, "normalizer": 0, "parser": 0, "tools": 0, "blobs": blobs_port},
        "blobs": {"service_url": f"http://127.0.0.1:{blobs_port}"},
        "providers": {plan.api: provider},
        "tools": {WEATHER_TOOL: tool},
    }
    return "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items())


def environment(env: Mapping[str, str], config: Path) -> dict[str, str]:
    """Return the services' environment: the demo's settings, nothing of the user's own deployment."""
    kept = {name: value for name, value in env.items() if name not in _OURS}
    direct = ",".join(part for part in (env.get("NO_PROXY") or env.get("no_proxy"), "127.0.0.1") if part)
    return {**kept, "TOKENBUS_CONFIG": str(config), "NO_PROXY": direct, "no_proxy": direct}


def _toml(value: object) -> str:
    """Format a value as TOML, with inline tables. JSON strings, numbers and booleans are valid TOML."""
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in cast("list[object]", value)) + "]"
    return json.dumps(value, ensure_ascii=False)
