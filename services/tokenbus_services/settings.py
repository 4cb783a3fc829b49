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
from tokenbus.bus.url import with_password
from tokenbus.errors import SettingsError
from tokenbus.events.requests import Tool
from tokenbus.providers.api import ApiName, Quirks

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]
HttpUrl = Annotated[str, Meta(pattern=r"^https?://[^/?#\s]+[^?#\s]*$(?!\n)")]
HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$(?!\n)")]
DEFAULT_TOOL_TIMEOUT_S = 60.0
"""Of a tool call, where neither the tool nor the request says."""
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


MediaTypes = tuple[Annotated[str, Meta(pattern=r"^(\*|[a-z]+/(\*|[a-z0-9.+-]+))$(?!\n)")], ...]
"""Media types, as `image/png`, `image/*` or `*`."""


class MediaSettings(_Table, frozen=True, kw_only=True):
    """What media one request may hold; checked before the call. What is left out is as the API documents it."""

    image_types: MediaTypes | None = None
    document_types: MediaTypes | None = None
    image_bytes: Bytes | None = None
    """Of one image, before base64."""
    document_bytes: Bytes | None = None
    """Of one document, before base64."""
    images: Count | None = None
    """How many images, those by url too."""
    request_bytes: Bytes | None = None
    """Of the whole body."""


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
    media: MediaSettings = MediaSettings()
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


class _Reach(_Table, frozen=True, kw_only=True):
    """Which addresses may be called beside public ones."""

    allow_private: bool = False
    """Loopback and private ones too. A name that has only others is refused."""
    allow_networks: tuple[str, ...] = ()
    """These too, in CIDR notation; the only way to a link-local or cloud metadata address."""


class HttpTool(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
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


class McpHttp(_Reach, frozen=True, kw_only=True, tag="http", tag_field="kind"):
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


class RateSettings(_Table, frozen=True, kw_only=True):
    """What all fetchers together may do in one scope; None: no limit. See docs/limits.md."""

    requests_per_second: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    """A second's worth, and at least one request, may come at once."""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    """Input and output. A minute's worth may come at once."""
    concurrency: Count | None = None
    """Calls at once."""


class ProviderRates(RateSettings, frozen=True, kw_only=True):
    """The limits of one provider, and of its models."""

    models: dict[str, RateSettings] = {}
    """By name, or by a beginning of names and `*` after it (`gpt-5*`), whose models share one limit. The name itself
    comes first, then the longest beginning."""


class LimitSettings(_Table, frozen=True, kw_only=True):
    """Bounds; each has a named error."""

    request_bytes: Bytes = 4 * 2**20
    inbound_entries: Count = 100_000
    block_bytes: Bytes = 16 * 2**20
    run_events: Count = 500_000
    runs_per_fetcher: Count = 512
    waiting_per_fetcher: Count = 1024
    """Runs that a fetcher looks at beyond those, so that each tenant gets its turn. One tenant never fills it."""
    longest_wait_s: Seconds = 3600.0
    """So long a run waits for its turn; then it fails with `limit_wait`. A request's `deadline_s` may be shorter."""
    providers: dict[str, ProviderRates] = {}
    """By the provider's name. With a table, even an empty one, a provider's Retry-After holds for all fetchers."""
    tenant: RateSettings | None = None
    """Of each tenant (`metadata.tenant`) that has no table of its own. Runs without a tenant are together one."""
    tenants: dict[str, RateSettings] = {}
    """By the tenant's name; empty text: runs without one."""
    tool_calls_per_worker: Count = 64
    tool_slack_s: Seconds = 120.0
    """So long past its timeout a call may stay open: it may have waited for an executor, or have been given to a second
    one. Then it gets an error result."""
    silent_run_s: Seconds = 900.0
    """A run of which nothing was heard for so long, and which no fetcher has, was lost, and ends `incomplete`."""
    tool_result_bytes: Bytes = 64 * 2**10
    """A larger result goes to the blob store; the model and the bus see its beginning and the blob's id."""
    tool_image_bytes: Annotated[int, Meta(ge=0)] = 2**20
    """Bytes of images in one result that the model is shown; further ones it reads of."""
    mcp_message_bytes: Bytes = 8 * 2**20
    """One message of an MCP server."""
    policy_slack_s: Seconds = 30.0
    """So long past the timeouts of all its policies a run may wait for a policy worker: one may have to start anew."""
    policy_waiting_events: Count = 50_000
    """Events of one run that wait for a policy worker. With more it counts as one for which none answers. And of all
    runs in one policy worker's hands: with more it reads no further for a while."""
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
    """Of one blob."""
    quota_bytes: Bytes | None = None
    """Of all blobs; None: what the store has room for."""
    ttl_s: Seconds = 86_400.0
    """Life of a blob after it was last put. One that is read lives at least `retention.open_run_s` from then."""
    token_env: str = "TOKENBUS_BLOB_TOKEN"
    """Environment variable with the token that the blob service asks for and the other services send; without a value
    it asks for none."""
    loader: Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)")] | None = None
    """`module:factory`: a store of your own in place of the blob service; the factory gives a
    `tokenbus.blobs.BlobLoader`."""
    inline_bytes: Bytes = 64 * 2**10
    """Base64 media of a request that is longer than so many characters goes to the store when the request is taken."""
    cache_bytes: Annotated[int, Meta(ge=0)] = 32 * 2**20
    """Recent blobs that each fetcher keeps in memory; one of more than a quarter of this is never kept."""


class RecordSettings(_Table, frozen=True, kw_only=True):
    """Debug records. With this table, even an empty one, a request may ask for its own; see docs/records.md."""

    sample: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """The share of runs that are recorded unasked, of those to which all of the following apply."""
    providers: tuple[str, ...] = ()
    """Only runs with these; empty: with any."""
    models: tuple[str, ...] = ()
    """Only with these, or those with a beginning and `*` after it (`gpt-5*`); empty: with any."""
    metadata: dict[str, str] = {}
    """Only runs whose metadata has these texts."""
    raw_bytes: Bytes = 32 * 2**20
    """Kept of one run's raw stream; what is beyond is cut off, and the record says so."""
    keep_s: Seconds = 7 * 86_400.0
    """How long a record is kept."""
    keep_entries: Count = 1_000
    """How many records are kept; beyond it the oldest goes first."""


class PolicySettings(_Table, frozen=True, kw_only=True):
    """One policy that a run may have. See docs/policy-stage.md."""

    use: Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)")]
    """Its class, `module:Class`: a `tokenbus.policy` StreamProcessor."""
    options: dict[str, object] = {}
    """As the class declares them."""
    on_error: Literal["block", "pass"] = "block"
    """What becomes of a run whose policy fails: it ends, or it goes on without."""
    timeout_s: Seconds = 30.0
    """Of each call of the policy."""


class PolicyRoute(_Table, frozen=True, kw_only=True):
    """Which runs have policies. What is left out, any run meets; one that meets several routes has the policies of all,
    in this order."""

    policies: tuple[str, ...]
    """Names of `[policies.NAME]`, in the order in which they judge."""
    providers: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    """These, or those with a beginning and `*` after it (`gpt-5*`)."""
    tenants: tuple[str, ...] = ()
    """Of `metadata.tenant`."""
    metadata: dict[str, str] = {}
    """Texts that the run's metadata must have."""


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
    recorder: int = 8086
    policy: int = 8087


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
    records: RecordSettings | None = None
    """None: nothing is recorded, and a request that asks for it is refused."""
    policies: dict[str, PolicySettings] = {}
    """With one of them there is a policy stage."""
    policy_routes: tuple[PolicyRoute, ...] = ()
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
    "openai-images": ProviderSettings(api="openai-images"),
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
    if settings.redis_url:
        settings = msgspec.structs.replace(settings, redis_url=with_password(settings.redis_url, env))
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
    settings = msgspec.structs.replace(settings, providers={**DEFAULT_PROVIDERS, **settings.providers})
    for name in settings.limits.providers:
        if name not in settings.providers:
            raise SettingsError(path or "settings", f"limits.providers.{name}", "there is no provider of this name")
    for i, route in enumerate(settings.policy_routes):
        for name in route.policies:
            if name not in settings.policies:
                where = f"policy_routes[{i}].policies"
                raise SettingsError(path or "settings", where, f"there is no policy {name!r}")
    return settings


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
