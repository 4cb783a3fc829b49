"""What each surface provides: a translator from its requests to the bus's, and encoders from a run's events to bytes.

Everything here is pure: no IO, no clock, no random ids. What a client gets is a function of the run's log alone, so
any replica can repeat any byte of it, also after a crash of the one that began (`GatewayNote` carries what the log
would not know otherwise).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import msgspec

from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Generate
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.problem import Problem

Disconnect = Literal["cancel", "continue"]
NOTE = "gateway"
"""Key in the run's metadata of its `GatewayNote`. A client's metadata never sets it, nor ``tenant``."""


class GatewayNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Data that the gateway stores in a run's metadata. `Started` returns it to every encoder."""

    surface: str
    version: int
    """`Surface.version` of the encoder that began: another one must not continue its numbers."""
    created: int
    """Unix time in seconds; answers carry it."""
    model: str
    """As the client named it."""
    key: str | None = None
    """Id of the client's key, never the key."""
    body: str | None = None
    """Hash of the request's body, with an Idempotency-Key."""
    echo: dict[str, object] = {}
    """Fields of the request that answers repeat, as the surface wants them."""


class GatewayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, decoded only as far as HTTP."""

    body: bytes
    headers: Mapping[str, str]
    """Names in lower case."""
    path: Mapping[str, str] = {}
    """Path parameters."""
    query: Mapping[str, str] = {}


class TranslationRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the deployment and the client's key allow."""

    models: ModelTable
    drop_unsupported: frozenset[str] = frozenset()
    """Parameters that are dropped instead of refused if they have no effect here (`user`, `seed`, …)."""
    allow_extra: frozenset[str] = frozenset()
    """Fields of the provider's body that a client may set through `extra`."""
    tools: frozenset[str] | None = frozenset()
    """Tools of the deployment that a client may name; None: all."""


class Translated(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the bus, and how to answer its client."""

    generate: Generate
    """Without `id`, and without the keys of the gateway in `metadata`: the gateway sets both."""
    stream: bool
    model: str
    """As the client named it."""
    run: str | None = None
    """A run id that the client chose: if that run exists and is the client's own, it is joined."""
    echo: dict[str, object] = {}
    on_disconnect: Disconnect = "cancel"
    background: bool = False
    """Answer at once; the run continues without its client."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    media_type: str = "application/json"


class Encoder(ABC):
    """Encodes one run's log in a client's protocol. One instance for one answer, fed from seq 0 without a gap."""

    @abstractmethod
    def feed(self, event: PublicEvent) -> list[bytes]:
        """Return the protocol's events for this one, each complete, in order. Empty if the client gets nothing yet.

        The terminal event ends the answer: its last element ends the protocol's stream too.
        """

    @abstractmethod
    def broken(self, problem: Problem) -> list[bytes]:
        """End an answer that the gateway cannot continue (a restart, retention): always an error, never a silent end.
        It has a form that the protocol's clients treat as an error after any output.
        """


class WholeAnswer(ABC):
    """Collects one run's log into an answer that is not streamed."""

    @abstractmethod
    def feed(self, event: PublicEvent) -> Answer | None:
        """Return the answer after the terminal event, else None."""


class Surface(ABC):
    """One client protocol."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised if the bytes for the same log change."""
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    keep_alive: ClassVar[bytes]
    """Sent after some seconds of silence; carries no number, and no client takes it for an event."""
    stream_headers: ClassVar[Mapping[str, str]] = {}
    """In addition to those of every stream."""

    @abstractmethod
    def translate(self, request: GatewayRequest, rules: TranslationRules) -> Translated:
        """Translate a request. Raises Refusal, with the parameter's name, for anything that cannot be honoured."""

    @abstractmethod
    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """An encoder for a streamed answer. ``request`` is the one that asks, None if it is not at hand."""

    @abstractmethod
    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        """A collector for an answer that is not streamed."""

    @abstractmethod
    def refusal(self, problem: Problem) -> Answer:
        """A problem before the first byte, in the client's own error shape."""
