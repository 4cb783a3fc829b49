"""The gateway: model names, surfaces and limits of its HTTP side. Its port is `http.gateway`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.tables.gateway_keys import (
    ALL_SURFACES,
    AdminSettings,
    KeySettings,
    PriceSettings,
    SurfaceName,
)
from tokenbus_services.settings.types import Bytes, Count, Seconds, Table

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
    drop_unsupported: tuple[str, ...] = ()
    """Parameters, as paths without indices (`tools.allowed_callers`), that are left out, rather than refused, if they
    cannot be honoured.
    """
    allow_extra: tuple[str, ...] = ()
    """Fields of the provider's request body that clients may set."""
    tools: tuple[str, ...] = ()
    """Tools of this deployment that clients may name in `tokenbus.tools`; `*`: all."""
    origins: tuple[Origin, ...] = ()
    """Web pages of these origins may call the gateway (CORS)."""
    deadline_s: Seconds = 600.0
    """Deadline of runs whose client waits for the answer, if the request sets none."""
    body_bytes: Bytes = 32 * 2**20
    """Maximum size of a request's body."""
    inbound_bytes: Bytes = 256 * 2**20
    """Maximum bytes of all requests' bodies and frames that are not published yet, per gateway. One key may hold as
    much of it as remains free for all others.
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
    prices: dict[str, PriceSettings] = {}
    """By the beginning of `PROVIDER/MODEL`; the longest that fits holds."""
