"""All settings as one typed object, read once at the edge: `tokenbus.toml`, then the environment.

Keys of providers stay in the environment: a file names the variable (`api_key_env`), never the key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from tokenbus.bus.keys import DEFAULT_PARTITIONS, DEFAULT_PREFIX, MAX_PARTITIONS, Keys
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Tool
from tokenbus.providers.api import ApiName, Quirks

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
HttpUrl = Annotated[str, Meta(pattern=r"^https?://[^/?#\s]+[^?#\s]*$(?!\n)")]
HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$(?!\n)")]
LogLevel = Literal["debug", "info", "warning", "error"]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. An unknown key is an error, so that a typing mistake is heard."""


class RetrySettings(_Table, frozen=True, kw_only=True):
    """How often and how soon a turn is tried again."""

    max_attempts: Count = 4
    """Tries of one turn that ended in a provider's error, the first included."""
    max_losses: Count = 20
    """Tries of one turn whose worker was lost; bounds a request that kills its workers."""
    base_delay_s: Seconds = 0.5
    max_delay_s: Seconds = 30.0


class QuirkSettings(Quirks, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quirks as the file has them: an unknown one is an error too."""


class ProviderSettings(_Table, frozen=True, kw_only=True):
    """One configured provider: what a request's `provider` names. What is left out is as its API has it."""

    api: ApiName
    base_url: HttpUrl | None = None
    path: str | None = None
    """In place of the API's own, beneath `base_url`; `{model}` in it stands for the request's model. Not for `gemini`,
    whose path says whether the answer streams."""
    query: dict[str, str] = {}
    """Parameters of each call's URL. Not for secrets."""
    api_key_env: str | None = None
    """Environment variable that holds the key; empty text: the provider needs none."""
    key_header: HeaderName | None = None
    """Header that carries the key."""
    key_format: Annotated[str, Meta(pattern=r"^[^{}]*\{\}[^{}]*$")] | None = None
    """What that header holds, with `{}` for the key. None: with `key_header` the key alone, else as the API has it."""
    headers: dict[HeaderName, str] = {}
    """Sent with each call. Not for secrets."""
    connect_timeout_s: Seconds = 10.0
    first_event_timeout_s: Seconds = 120.0
    idle_timeout_s: Seconds = 60.0
    """Longest silence inside a stream."""
    max_connections: Count = 256
    quirks: QuirkSettings = QuirkSettings()

    def __post_init__(self) -> None:
        if self.path is not None and self.api == "gemini":
            raise ValueError("gemini takes no path: it says whether the answer streams; base_url may have one")


class PythonTool(_Table, frozen=True, kw_only=True, tag="python", tag_field="kind"):
    """A Python callable, `module:function`, sync or async."""

    call: str
    description: str = ""
    parameters: dict[str, object] = {}
    timeout_s: Seconds | None = None


class HttpTool(_Table, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An HTTP endpoint: the arguments are the JSON body, the answer is the result."""

    url: str
    method: Literal["POST", "PUT", "GET"] = "POST"
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable that holds its value (a token, say)."""
    description: str = ""
    parameters: dict[str, object] = {}
    timeout_s: Seconds | None = None


ToolSettings = PythonTool | HttpTool


class McpStdio(_Table, frozen=True, kw_only=True, tag="stdio", tag_field="kind"):
    """An MCP server that runs as a child of each tool executor."""

    command: str
    args: tuple[str, ...] = ()
    env_pass: tuple[str, ...] = ()
    """Environment variables that it gets, beside PATH, HOME and their like."""
    prefix: str | None = None
    """What its tools' names begin with; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """To start and list its tools."""
    timeout_s: Seconds | None = None
    """For each call."""


class McpHttp(_Table, frozen=True, kw_only=True, tag="http", tag_field="kind"):
    """An MCP server behind Streamable HTTP."""

    url: str
    headers: dict[str, str] = {}
    header_env: dict[str, str] = {}
    """Header name to the environment variable that holds its value (a token, say)."""
    prefix: str | None = None
    """What its tools' names begin with; None: the table's name and `__`."""
    connect_timeout_s: Seconds = 30.0
    """To connect and list its tools."""
    timeout_s: Seconds | None = None
    """For each call."""


McpSettings = McpStdio | McpHttp


class LimitSettings(_Table, frozen=True, kw_only=True):
    """Bounds; each has a named error."""

    request_bytes: Bytes = 4 * 2**20
    inbound_entries: Count = 100_000
    event_bytes: Bytes = 8 * 2**20
    """One provider event (an image may take 400 KB)."""
    block_bytes: Bytes = 16 * 2**20
    run_events: Count = 500_000
    runs_per_fetcher: Count = 512
    tool_calls_per_worker: Count = 64
    tool_result_bytes: Bytes = 64 * 2**10
    """A larger result goes to the blob store; the model and the bus see its beginning and the blob's id."""
    mcp_message_bytes: Bytes = 8 * 2**20
    """One message of an MCP server."""
    lag_bytes: Bytes = 8 * 2**20
    """Per partition and hop: a fetcher stops reading sockets while a later stage is this far behind."""


class RetentionSettings(_Table, frozen=True, kw_only=True):
    """How long finished things stay readable."""

    open_run_s: Seconds = 86_400.0
    """Longest life of a run's keys without a new turn."""
    finished_run_s: Seconds = 3_600.0
    topic_entries: Annotated[int, Meta(ge=1000)] = 50_000
    """Entries kept of each public topic in each partition, about. More than a subscriber reads at once, so that it
    can tell when what it had not read was trimmed."""
    dead_entries: Count = 10_000


class BlobSettings(_Table, frozen=True, kw_only=True):
    """The blob store. `url` is what obstore takes: `file:///…`, `memory://`, `s3://bucket/prefix`."""

    url: str | None = None
    """None: `blobs` in the data directory."""
    service_url: str = "http://127.0.0.1:8085"
    """Where other services reach the blob service."""
    max_bytes: Bytes = 64 * 2**20
    ttl_s: Seconds = 86_400.0


class StageSettings(_Table, frozen=True, kw_only=True):
    """How the ordered stages and work queues run."""

    lease_s: Seconds = 3.0
    """Kill -9 is noticed within this; must be longer than any pause of a healthy worker."""
    tick_s: Seconds = 0.25
    max_records: Count = 256
    linger_ms: Annotated[float, Meta(ge=0, le=100)] = 3.0
    """Longest that the source gathers under load; nothing waits while idle."""
    drain_s: Seconds = 6.0
    """At shutdown, how long a fetcher lets its runs finish before it hands them over."""


class HttpSettings(_Table, frozen=True, kw_only=True):
    """Ports of each service's health, readiness and metrics pages."""

    host: str = "127.0.0.1"
    fetcher: int = 8081
    normalizer: int = 8082
    parser: int = 8083
    tools: int = 8084
    blobs: int = 8085


class Settings(_Table, frozen=True, kw_only=True):
    """The whole of `tokenbus.toml`."""

    redis_url: str | None = None
    """None: the embedded server of `tokenbus up` and `tokenbus demo`."""
    data_dir: str = ".tokenbus"
    """Where the embedded server and the blob store keep their files (TOKENBUS_DATA)."""
    prefix: str = DEFAULT_PREFIX
    partitions: Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)] = DEFAULT_PARTITIONS
    topics: tuple[Literal["visible", "chunks", "blocks"], ...] = ("visible", "chunks", "blocks")
    """Public topics that are written; `runs` and the logs always are."""
    log_level: LogLevel = "info"
    """How much is logged (TOKENBUS_LOG_LEVEL)."""
    providers: dict[str, ProviderSettings] = {}
    tools: dict[str, ToolSettings] = {}
    mcp: dict[str, McpSettings] = {}
    """MCP servers whose tools may be called."""
    retry: RetrySettings = RetrySettings()
    limits: LimitSettings = LimitSettings()
    retention: RetentionSettings = RetentionSettings()
    blobs: BlobSettings = BlobSettings()
    stages: StageSettings = StageSettings()
    http: HttpSettings = HttpSettings()

    @property
    def keys(self) -> Keys:
        """The key names of this deployment."""
        return Keys(self.prefix, self.partitions)

    @property
    def tool_definitions(self) -> list[Tool]:
        """The declared tools as a request would list them."""
        return [
            Tool(name=name, description=tool.description or None, parameters=tool.parameters)
            for name, tool in self.tools.items()
        ]

    @property
    def mcp_prefixes(self) -> dict[str, str]:
        """What the names of each MCP server's tools begin with."""
        return {name: f"{name}__" if server.prefix is None else server.prefix for name, server in self.mcp.items()}


DEFAULT_PROVIDERS: dict[str, ProviderSettings] = {
    "anthropic": ProviderSettings(api="anthropic"),
    "openai-chat": ProviderSettings(api="openai-chat"),
    "openai-responses": ProviderSettings(api="openai-responses"),
    "gemini": ProviderSettings(api="gemini"),
}
"""There without any file, each under the name of its API."""


def load(env: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the file that TOKENBUS_CONFIG names (none: defaults) and the environment.

    Raises SettingsError with the file or variable and the key at fault.
    """
    path = env.get("TOKENBUS_CONFIG")
    settings = read_file(Path(path)) if path else Settings()
    if url := env.get("TOKENBUS_REDIS_URL"):
        settings = msgspec.structs.replace(settings, redis_url=url)
    if data := env.get("TOKENBUS_DATA"):
        settings = msgspec.structs.replace(settings, data_dir=data)
    if partitions := env.get("TOKENBUS_PARTITIONS"):
        if not (partitions.isascii() and partitions.isdigit() and 1 <= int(partitions) <= MAX_PARTITIONS):
            raise SettingsError("environment", "TOKENBUS_PARTITIONS", f"{partitions!r} is not 1 to {MAX_PARTITIONS}")
        settings = msgspec.structs.replace(settings, partitions=int(partitions))
    if level := env.get("TOKENBUS_LOG_LEVEL"):
        try:
            settings = msgspec.structs.replace(settings, log_level=msgspec.convert(level.lower(), LogLevel))
        except msgspec.ValidationError:
            known = ", ".join(get_args(LogLevel))
            raise SettingsError("environment", "TOKENBUS_LOG_LEVEL", f"{level!r} is none of {known}") from None
    try:
        _ = settings.keys
    except ValueError as e:
        raise SettingsError(path or "settings", "prefix", str(e)) from None
    return msgspec.structs.replace(settings, providers={**DEFAULT_PROVIDERS, **settings.providers})


def read_file(path: Path) -> Settings:
    """One `tokenbus.toml`. Raises SettingsError."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Settings)
    except OSError as e:
        raise SettingsError(str(path), "file", e.strerror or str(e)) from None
    except msgspec.ValidationError as e:
        problem, _, where = str(e).partition(" - at `")
        raise SettingsError(str(path), where.rstrip("`") or "$", problem) from None
    except msgspec.DecodeError as e:
        raise SettingsError(str(path), "syntax", str(e)) from None
