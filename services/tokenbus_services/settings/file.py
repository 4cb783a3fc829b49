"""The complete `tokenbus.toml`, and how it is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tokenbus.blob_wire import URL_ENV
from tokenbus.bus.keys import DEFAULT_PARTITIONS, DEFAULT_PREFIX, MAX_PARTITIONS, Keys
from tokenbus.bus.server.url import url_in_env, with_password
from tokenbus.bus.topology import RECORDER, WEBHOOKS, Queue
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Tool
from tokenbus_services.settings.errors import problems_of, unknown_value
from tokenbus_services.settings.tables.gateway import ConsoleSettings, GatewaySettings
from tokenbus_services.settings.tables.limits import (
    ArchiveSettings,
    BlobSettings,
    DurabilitySettings,
    LimitSettings,
    RecordSettings,
    RetentionSettings,
)
from tokenbus_services.settings.tables.providers import DEFAULT_PROVIDERS, FallbackRoute, ProviderSettings
from tokenbus_services.settings.tables.workers import (
    HttpSettings,
    McpSettings,
    OtelSettings,
    PolicyRoute,
    PolicySettings,
    RetrySettings,
    StageSettings,
    ToolSettings,
    WebhookSettings,
)
from tokenbus_services.settings.types import HttpUrl, Table

LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(Table, frozen=True, kw_only=True, dict=True):  # dict: for `keys`
    """The complete `tokenbus.toml`."""

    redis_url: str | None = None
    """None: the embedded server of `tokenbus up` and `tokenbus demo`."""
    data_dir: str = ".tokenbus"
    """Directory of the embedded server and the blob store (TOKENBUS_DATA)."""
    prefix: str = DEFAULT_PREFIX
    partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = DEFAULT_PARTITIONS
    topics: tuple[Literal["visible", "chunks", "blocks"], ...] = ("visible", "chunks", "blocks")
    """Public topics to write; `runs` and the logs are always written."""
    log_level: LogLevel = "info"
    """Log level (TOKENBUS_LOG_LEVEL)."""
    providers: dict[str, ProviderSettings] = {}
    tools: dict[str, ToolSettings] = {}
    mcp: dict[str, McpSettings] = {}
    """MCP servers whose tools may be called."""
    retry: RetrySettings = RetrySettings()
    limits: LimitSettings = LimitSettings()
    retention: RetentionSettings = RetentionSettings()
    blobs: BlobSettings = BlobSettings()
    archive: ArchiveSettings | None = None
    """None: logs are not archived."""
    records: RecordSettings | None = None
    """None: nothing is recorded, and requests for recording are rejected."""
    durability: DurabilitySettings | None = None
    """None: nothing waits for replicas or the disk, and requests for it are rejected."""
    webhooks: dict[str, WebhookSettings] = {}
    """Who is told by webhook how runs end."""
    policies: dict[str, PolicySettings] = {}
    """If there are any, the policy stage is enabled."""
    policy_routes: tuple[PolicyRoute, ...] = ()
    fallback_routes: tuple[FallbackRoute, ...] = ()
    gateway: GatewaySettings | None = None
    """If the table is there, even empty, the gateway is enabled."""
    otel: OtelSettings | None = None
    """If the table is there, even empty, workers send traces and metrics."""
    console: ConsoleSettings | None = None
    """If the table is there, even empty, the gateway serves the console. `tokenbus up` serves it on loopback anyway."""
    stages: StageSettings = StageSettings()
    http: HttpSettings = HttpSettings()

    @cached_property
    def keys(self) -> Keys:
        """The key names of this deployment: one object, which follows a change of the number of partitions."""
        return Keys(self.prefix, self.partitions)

    @property
    def needs_recorder(self) -> bool:
        """Whether ended runs are recorded, or archived."""
        return self.records is not None or self.archive is not None

    @property
    def further_queues(self) -> tuple[Queue, ...]:
        """The queues of this deployment besides those that each has."""
        wanted = ((RECORDER, self.needs_recorder), (WEBHOOKS, bool(self.webhooks)))
        return tuple(queue for queue, there in wanted if there)

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names under which the services' pages are known, besides addresses and `localhost`."""
        return (*self.http.hosts, urlsplit(self.blobs.address).hostname or "")

    @property
    def tool_definitions(self) -> list[Tool]:
        """The declared tools in the form of a request."""
        return [
            Tool(name=name, description=tool.description or None, parameters=tool.parameters, format=tool.format)
            for name, tool in self.tools.items()
        ]

    @property
    def mcp_prefixes(self) -> dict[str, str]:
        """The name prefix of each MCP server's tools."""
        return {name: f"{name}__" if server.prefix is None else server.prefix for name, server in self.mcp.items()}


def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Load settings from the file in TOKENBUS_CONFIG (if unset: defaults) and the environment.

    Raises SettingsError with the file or variable, and the key.
    """
    path = env.get("TOKENBUS_CONFIG")
    settings = read_file(Path(path)) if path else Settings()
    if url := url_in_env(env):
        settings = msgspec.structs.replace(settings, redis_url=url)
    elif settings.redis_url:
        settings = msgspec.structs.replace(settings, redis_url=with_password(settings.redis_url, env))
    if data := env.get("TOKENBUS_DATA"):
        settings = msgspec.structs.replace(settings, data_dir=data)
    settings = msgspec.structs.replace(settings, blobs=_with_address(settings, env))
    if partitions := env.get("TOKENBUS_PARTITIONS"):
        if not (partitions.isascii() and partitions.isdigit() and 1 <= int(partitions) <= MAX_PARTITIONS):
            raise SettingsError("environment", "TOKENBUS_PARTITIONS", f"{partitions!r} is not 1 to {MAX_PARTITIONS}")
        settings = msgspec.structs.replace(settings, partitions=int(partitions))
    if level := env.get("TOKENBUS_LOG_LEVEL"):
        try:
            settings = msgspec.structs.replace(settings, log_level=msgspec.convert(level.lower(), LogLevel))
        except msgspec.ValidationError:
            problem = unknown_value(level, get_args(LogLevel))
            raise SettingsError("environment", "TOKENBUS_LOG_LEVEL", problem) from None
    try:
        _ = settings.keys
    except ValueError as e:
        raise SettingsError(path or "settings", "prefix", str(e)) from None
    settings = msgspec.structs.replace(settings, providers={**DEFAULT_PROVIDERS, **settings.providers})
    for name in settings.limits.providers:
        if name not in settings.providers:
            problem = unknown_value(name, sorted(settings.providers), what="provider")
            raise SettingsError(path or "settings", f"limits.providers.{name}", problem)
    if settings.console and settings.console.enabled and settings.gateway is None:
        problem = "the gateway serves the console: add a table [gateway]; an empty one is enough"
        raise SettingsError(path or "settings", "console", problem)
    for name, key in (settings.gateway.keys if settings.gateway else {}).items():
        for webhook in key.webhooks:
            if webhook not in settings.webhooks:
                problem = unknown_value(webhook, sorted(settings.webhooks), what="webhook")
                raise SettingsError(path or "settings", f"gateway.keys.{name}.webhooks", problem)
    for i, route in enumerate(settings.policy_routes):
        if not route.policies and not route.input_policies:
            problem = "needs `policies` or `input_policies`"
            raise SettingsError(path or "settings", f"policy_routes[{i}]", problem)
        for field, names in (("policies", route.policies), ("input_policies", route.input_policies)):
            for name in names:
                if name not in settings.policies:
                    problem = unknown_value(name, sorted(settings.policies), what="policy")
                    raise SettingsError(path or "settings", f"policy_routes[{i}].{field}", problem)
    for i, route in enumerate(settings.fallback_routes):
        for j, choice in enumerate(route.fallback):
            if choice.provider not in settings.providers:
                where = f"fallback_routes[{i}].fallback[{j}].provider"
                problem = unknown_value(choice.provider, sorted(settings.providers), what="provider")
                raise SettingsError(path or "settings", where, problem)
    return settings


def _with_address(settings: Settings, env: Mapping[str, str]) -> BlobSettings:
    """The blob settings with the address of the service: of the environment, the file, or the port of this machine."""
    url = env.get(URL_ENV) or settings.blobs.service_url
    if url is None and settings.http.blobs != HttpSettings().blobs and settings.http.blobs:
        url = f"http://127.0.0.1:{settings.http.blobs}"
    try:
        return msgspec.structs.replace(settings.blobs, service_url=msgspec.convert(url, HttpUrl | None))
    except msgspec.ValidationError:
        raise SettingsError("environment", URL_ENV, "must be http://HOST:PORT or https://HOST:PORT") from None


def read_file(path: Path) -> Settings:
    """Read one `tokenbus.toml`. Raises SettingsError, about the first wrong key or value."""
    raw = _read(path)
    try:
        return msgspec.convert(raw, Settings)
    except msgspec.ValidationError as e:
        where, problem = next(iter(problems_of(raw, Settings)), ("file", str(e)))
        raise SettingsError(str(path), where, problem) from None


def wrong_values(path: Path) -> list[SettingsError]:
    """An error for each wrong key and value of the file. Raises SettingsError if the file cannot be read."""
    return [SettingsError(str(path), where, problem) for where, problem in problems_of(_read(path), Settings)]


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as e:
        raise SettingsError(str(path), "file", e.strerror or str(e)) from None
    except msgspec.DecodeError as e:
        raise SettingsError(str(path), "syntax", str(e)) from None
    if isinstance(raw.get("providers"), dict):
        raw["providers"] = {name: _with_api(name, table) for name, table in raw["providers"].items()}
    return raw


def _with_api(name: str, table: Any) -> object:
    """A table of a provider that is there by default may leave out the API that it has."""
    default = DEFAULT_PROVIDERS.get(name)
    if default is None or not isinstance(table, dict):
        return cast("object", table)
    return {"api": default.api, **cast("dict[str, Any]", table)}


NAME = "tokenbus.toml"


def use_file_here(env: MutableMapping[str, str]) -> Path | None:
    """If TOKENBUS_CONFIG is not set, set it to the `tokenbus.toml` of the working directory; return that file, if there
    is one.

    Processes that the command starts then read the same file. An empty TOKENBUS_CONFIG means: no file.
    """
    if "TOKENBUS_CONFIG" in env:
        return None
    file = Path.cwd() / NAME
    if not file.is_file():
        return None
    env["TOKENBUS_CONFIG"] = str(file)
    return file


def add_settings_directory_to_path(env: Mapping[str, str] = os.environ) -> None:
    """Modules in the directory of the settings file can be imported; without a file, those in the working directory."""
    config = env.get("TOKENBUS_CONFIG")
    directory = str(Path(config).resolve().parent if config else Path.cwd())
    if directory not in sys.path:
        sys.path.append(directory)
