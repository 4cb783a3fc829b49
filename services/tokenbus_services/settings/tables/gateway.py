"""The gateway: model names, surfaces and limits of its HTTP side. Its port is `http.gateway`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, get_args

from msgspec import Meta

from tokenbus.events.requests import Name
from tokenbus_services.settings.types import Bytes, Count, Currency, Seconds, Table

ConsoleRole = Literal["see_runs", "see_content", "act", "decide", "admin"]
CONSOLE_ROLES: tuple[ConsoleRole, ...] = get_args(ConsoleRole)


class ConsoleSettings(Table, frozen=True, kw_only=True):
    """If the table is there, the gateway serves the console under `/console/`. Needs a table `[gateway]`."""

    enabled: bool = True
    """False: no console, also under `tokenbus up`."""
    roles_without_keys: tuple[ConsoleRole, ...] = ("see_runs", "act")
    """What everybody may do at a gateway without keys, which listens on loopback only. With keys, each key's `console`
    says it.
    """
    session_hours: Annotated[float, Meta(gt=0, le=24 * 30)] = 12.0
    """A login ends after this time, or with its key."""
    ticket_minutes: Annotated[float, Meta(gt=0, le=24 * 60)] = 15.0
    """A link to a run that a colleague without a key may open is valid for this long."""


# The gateway's keys: what each client may do, what it may cost, and what tokens cost.

SurfaceName = Literal[
    "native",
    "openai_chat",
    "openai_responses",
    "openai_images",
    "anthropic_messages",
    "gemini",
    "ai_sdk_ui",
    "ag_ui",
    "durable_streams",
]
ForwardKind = Literal[
    "token_counts",
    "embeddings",
    "moderations",
    "compact",
    "audio",
    "images",
    "files",
    "batches",
    "caches",
    "vector_stores",
    "models",
]
"""Kinds of paths of the providers' APIs that are no runs."""
ALL_SURFACES: tuple[SurfaceName, ...] = get_args(SurfaceName)
Tenant = Annotated[
    str,
    Meta(
        max_length=128,
        pattern=r"^[!-~]([ -~]*[!-~])?$|^$",
        description="ASCII text of at most 128 characters, without blanks at its ends",
    ),
]
Money = Annotated[float, Meta(gt=0, le=1_000_000_000)]
Price = Annotated[float, Meta(ge=0, le=1_000_000)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)", description="a SHA-256 of 64 hex digits")]
BudgetPeriod = Literal["day", "week", "month"]


class KeyRules(Table, frozen=True, kw_only=True, omit_defaults=True):
    """What a key allows, whether it is in the settings or was made by a command."""

    tenant: Tenant = ""
    """Its runs belong to this tenant, and it sees no other tenant's runs. Empty: the key's id."""
    models: tuple[Name, ...] | None = None
    """Aliases and `PROVIDER/MODEL` names that it may use; `*` stands for any characters (`anthropic/*`). None: all."""
    surfaces: tuple[SurfaceName, ...] | None = None
    """The client protocols that it may use. None: all."""
    forward: tuple[ForwardKind, ...] | None = None
    """What it may use of `gateway.forward`. None: all of it, or with `surfaces` nothing."""
    tools: tuple[Name, ...] | None = None
    """Tools of this deployment that it may name, of those in `gateway.tools`. None: all of those."""
    allow_extra: tuple[str, ...] = ()
    """Fields of the provider's request body that it may set, in addition to `gateway.allow_extra`."""
    policies: tuple[Name, ...] = ()
    """Policies that judge all of its runs, after those of their routes and requests."""
    webhooks: tuple[Name, ...] = ()
    """Webhooks that are told of all of its runs. Its requests may name no others."""
    record: bool | None = None
    """Whether its runs are recorded. Overrides the request. None: the request decides."""
    max_deadline_s: Seconds | None = None
    """Longest deadline of its runs; a longer one is shortened."""
    max_tokens: Count | None = None
    """Largest `max_tokens` of its requests; a larger one is lowered, and one without gets it."""
    rpm_limit: Count | None = None
    """Requests per minute."""
    tpm_limit: Count | None = None
    """Tokens per minute, input and output, counted when they are reported."""
    max_parallel_requests: Count | None = None
    """Answers in progress at once."""
    max_budget: Money | None = None
    """Spend per `budget_duration`, in the currency of `gateway.prices`. Exceeded by one request's cost at most."""
    budget_duration: BudgetPeriod | None = None
    """Calendar period of the budget, in UTC; a week begins on Monday. None: the budget is for all time."""
    blocked: bool = False
    """Refuses all requests, and keeps the key."""
    operator: bool = False
    """May also see the runs of all tenants, and read topics and metrics."""
    approve: bool = True
    """May decide whether tool calls run that wait for it. False: another client of the tenant must, and the role
    `decide` of `console` is none.
    """
    metrics: bool = False
    """May read `/metrics` of the gateway, which names keys and models."""
    console: tuple[ConsoleRole, ...] = ()
    """What it may do in the console: `see_runs` (of its tenant; with `operator` or `admin` of all), `see_content`,
    `act` (cancel, retry, resume), `decide` (what runs wait for; needs `approve`), `admin` (dead letters, keys, spend).
    Each includes `see_runs`. Empty: no login.
    """
    metadata: dict[str, str] = {}
    """Notes of yours; the gateway does not read them."""


class KeySettings(KeyRules, frozen=True, kw_only=True):
    """One client of the gateway. Its table's name is the id in logs, in run metadata and in the spend."""

    sha256: tuple[Sha256, ...] | Sha256 = ()
    """SHA-256 of the key, in hex; several while a key is rotated."""
    expires: datetime | None = None
    """The key is refused from then on. With a time zone."""


class PriceSettings(Table, frozen=True, kw_only=True):
    """Prices per million tokens, in any one currency."""

    input: Price
    output: Price
    cache_read: Price | None = None
    """Input read from the provider's cache. None: as `input`."""
    cache_write: Price | None = None
    """Input written to the provider's cache. None: as `input`."""
    max_output: Count = 32_768
    """Tokens of an answer that a budget reserves if the request sets no `max_tokens`."""


class AdminSettings(Table, frozen=True, kw_only=True):
    """HTTP API to make and revoke keys, on its own port. Without its token it does not start."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8091
    token_env: str = "TOKENBUS_GATEWAY_ADMIN_TOKEN"
    """Environment variable with the token; with `_FILE` appended: a file with the token."""


ModelName = Annotated[str, Meta(pattern=r"^[^/\s]+/\S+$(?!\n)", description="`PROVIDER/MODEL`")]
"""`PROVIDER/MODEL`."""
Origin = Annotated[
    str, Meta(pattern=r"^https?://[^/?#\s*]+$(?!\n)", description="an origin as `https://HOST` or `https://HOST:PORT`")
]
"""`https://HOST` or `https://HOST:PORT`, as browsers send it."""


class GatewaySettings(Table, frozen=True, kw_only=True):
    """If the table is there, `tokenbus up` runs the gateway."""

    aliases: dict[str, Annotated[tuple[ModelName, ...], Meta(min_length=1, max_length=9)]] = {}
    """Model names of your own, each with one or more `PROVIDER/MODEL`. The further ones are tried in turn if a turn
    fails before any of its visible text was emitted.
    """
    models: tuple[ModelName, ...] = ()
    """`PROVIDER/MODEL` names that `/v1/models` lists in addition to the aliases. Requests may name others."""
    surfaces: tuple[SurfaceName, ...] = ALL_SURFACES
    """The client protocols that are served."""
    forward: tuple[ForwardKind, ...] = ()
    """Kinds of requests that are no runs and go to their provider as they are. The gateway then needs the keys of the
    providers. Policies, records and fallbacks do not apply to them.
    """
    forward_bytes: Bytes = 512 * 2**20
    """Maximum size of a file that is forwarded, in either direction. Other bodies: `body_bytes`."""
    drop_unsupported: tuple[str, ...] = ()
    """Parameters, as paths without indices (`tools.allowed_callers`), that are left out, rather than refused, if they
    cannot be honoured.
    """
    allow_extra: tuple[str, ...] = ()
    """Fields of the provider's request body that clients may set."""
    tools: tuple[str, ...] = ()
    """Tools of this deployment that clients may name in `tokenbus.tools`; `*`: all."""
    leave_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """How long a stopping gateway still accepts connections while `/ready` already says no: as long as a load balancer
    that asks it takes to look elsewhere. Then it lets answers finish for `stages.drain_s`.
    """
    origins: tuple[Origin, ...] = ()
    """Web pages of these origins may call the gateway (CORS)."""
    max_added_ms: Annotated[float, Meta(ge=0, le=1000)] = 10.0
    """`max_added_ms` of runs whose answer is streamed to a client, if the request says none."""
    background_added_ms: Annotated[float, Meta(ge=0, le=1000)] = 50.0
    """The same if no client reads along: the answer is returned whole, or runs in the background."""
    deadline_s: Seconds = 600.0
    """Deadline of runs whose client waits for the answer, if the request sets none."""
    body_bytes: Bytes = 32 * 2**20
    """Maximum size of a request's body."""
    inbound_bytes: Bytes = 256 * 2**20
    """Maximum bytes of all requests' bodies and frames that are not published yet, per gateway. One key may hold as
    much of it as remains free for all others.
    """
    media_bytes: Bytes = 256 * 2**20
    """Maximum bytes of images and sounds that answers hold at once, per gateway, for protocols that have no address for
    what is in the blob store. What finds no room is sent as its id. One key may hold as much as remains free for all
    others.
    """
    connections: Count = 4096
    """Maximum connections per gateway, and 16 more for health probes. One key may hold as many requests, streams and
    sockets as remain free for all others.
    """
    early_status_s: Seconds = 2.0
    """How long a streamed answer waits for its first event, so that a failure still has its own HTTP status."""
    keep_alive_s: Seconds = 5.0
    """A stream that is silent for this long gets some bytes without meaning, in its protocol's form."""
    send_timeout_s: Seconds = 30.0
    """A client that reads nothing for this long is dropped."""
    rejoin_s: Seconds = 10.0
    """How long a run with an `Idempotency-Key` continues after its client disconnected, so that a retry can join it."""
    require_keys: bool = False
    """Whether clients need a key. They do in any case if there are `keys` or an `admin` API; set it for keys that only
    commands make.
    """
    keys: dict[str, KeySettings] = {}
    """The gateway's clients, each under the id that logs and the spend have."""
    admin: AdminSettings | None = None
    currency: Currency = "USD"
    """Of `prices` and budgets, as the console names it."""
    prices: dict[str, PriceSettings] = {}
    """By the beginning of `PROVIDER/MODEL`; the longest that fits holds."""
