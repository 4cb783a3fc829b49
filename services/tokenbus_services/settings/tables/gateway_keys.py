"""The gateway's keys: what each client may do, what it may cost, and what tokens cost."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, get_args

from msgspec import Meta

from tokenbus.events.requests import Name
from tokenbus_services.settings.tables.console import ConsoleRole
from tokenbus_services.settings.types import Count, Seconds, Table

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
    tools: tuple[Name, ...] | None = None
    """Tools of this deployment that it may name, of those in `gateway.tools`. None: all of those."""
    allow_extra: tuple[str, ...] = ()
    """Fields of the provider's request body that it may set, in addition to `gateway.allow_extra`."""
    policies: tuple[Name, ...] = ()
    """Policies that judge all of its runs, after those of their routes and requests."""
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
    metrics: bool = False
    """May read `/metrics` of the gateway, which names keys and models."""
    console: tuple[ConsoleRole, ...] = ()
    """What it may do in the console: `see_runs` (of its tenant; with `operator` or `admin` of all), `see_content`,
    `act` (cancel, retry, resume), `admin` (dead letters, keys, spend). Each includes `see_runs`. Empty: no login.
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
