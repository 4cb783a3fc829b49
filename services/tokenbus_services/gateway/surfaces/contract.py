"""What each surface provides: a reader of its requests, and encoders from a run's events to bytes.

Everything here is pure: no IO, no clock, no random ids. What a client gets is a function of the run's log alone, so
any replica can repeat any byte of it, also after a crash of the one that began (`GatewayNote` carries what the log
would not know otherwise).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.events.public import TERMINAL, Cancelled, Completed, Incomplete, PublicEvent, RunFailedEvent
from tokenbus.events.requests import Generate
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.problem import Problem, of_end
from tokenbus_services.gateway.surfaces.owed_calls import OwedCall, OwedCalls

Disconnect = Literal["cancel", "continue"]
NOTE = "gateway"
"""Key in the run's metadata of its `GatewayNote`. A client's metadata never sets it, nor ``tenant``."""


def blob_path(run: str, blob_id: str) -> str:
    """Where the gateway serves a blob that a run's events name."""
    return f"/runs/{run}/blobs/{blob_id}"


def wait_name(run: str, wait: str) -> str:
    """A wait of a run, as clients of other protocols name it."""
    return f"{run}:{wait}"


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
    hold: str | None = None
    """The name under which a budget holds what the run may cost; None: the run's id."""
    body: str | None = None
    """Hash of the request's body, with an Idempotency-Key."""
    echo: dict[str, object] = {}
    """Fields of the request that answers repeat, as the surface wants them."""
    left_out: list[str] = []
    """Paths of the request's fields that had no effect, without indices: hints that the provider has no place for, and
    what the operator's `drop_unsupported` names.
    """


class Payer(msgspec.Struct, frozen=True):
    """Who pays for a run, of its `GatewayNote`."""

    key: str
    hold: str | None = None


def payer_in(metadata: dict[str, object] | None) -> Payer | None:
    """Who pays for the run with this metadata; None: no key."""
    try:
        payer = msgspec.convert((metadata or {}).get(NOTE), Payer)
    except msgspec.ValidationError:  # a publisher's own text
        return None
    return payer if payer.key else None


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
    """Parameters that are dropped instead of refused if they are not supported here, as paths without indices."""
    allow_extra: frozenset[str] = frozenset()
    """Fields of the provider's body that a client may set through `extra`."""
    tools: frozenset[str] | None = frozenset()
    """Tools of the deployment that a client may name; None: all."""
    client_tools: frozenset[str] = frozenset()
    """Those of the deployment that clients run."""


class GivenAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client answers to a run that waits, as its protocol says it."""

    at: str
    """Its place in the request."""
    name: str = ""
    """The wait, as the surface named it to the client; empty: that of the call ``tool_id``."""
    run: str = ""
    """The run that the client says it belongs to."""
    tool_id: str = ""
    approved: bool | None = None
    """Of an approval; of a question, False: the person does not want to answer."""
    left: bool = False
    """The person left without an answer, which allows nothing."""
    reason: str | None = None
    arguments: dict[str, object] | None = None
    """Edited ones."""
    content: Any = ""
    """The result of the client's tool, or the answer to a question."""
    is_error: bool = False


Claim = Callable[[str], Awaitable[Callable[[], Awaitable[None]]]]


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
    left_out: list[str] = []
    """See `GatewayNote.left_out`."""
    on_disconnect: Disconnect = "cancel"
    background: bool = False
    """Answer at once; the run continues without its client."""
    claim: Claim | None = None
    """Called with the new run's id before it is published, and may refuse it; returns what undoes that."""
    given: Sequence[GivenAnswer] = ()
    """What the client answers to a run that waits."""
    only_answers: bool = False
    """The request says nothing else, unless nothing waits for what it answers."""


def left_out_header(paths: Sequence[str]) -> dict[str, str]:
    """The header that names what was left out of a request; empty if nothing was."""
    return {"x-tokenbus-left-out": ", ".join(paths)} if paths else {}


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


class WholeStream(WholeAnswer):
    """A stream that is sent at once, for clients that know nothing else."""

    def __init__(self, encoder: Encoder, media_type: str, headers: Mapping[str, str]) -> None:
        self._encoder = encoder
        self._media_type = media_type
        self._headers = headers
        self._out: list[bytes] = []

    def feed(self, event: PublicEvent) -> Answer | None:
        self._out += self._encoder.feed(event)
        if not isinstance(event, TERMINAL):
            return None
        return Answer(status=200, body=b"".join(self._out), headers=self._headers, media_type=self._media_type)


class WholeRun(WholeAnswer):
    """A body made of the whole run, with the calls that its client owes a result. A run that did not complete is
    refused.
    """

    def __init__(
        self,
        body: Callable[[Response, Completed, Sequence[OwedCall]], object],
        refusal: Callable[[Problem], Answer],
    ) -> None:
        self._body = body
        self._refusal = refusal
        self._builder = ResponseBuilder()
        self._owed = OwedCalls()

    def feed(self, event: PublicEvent) -> Answer | None:
        self._builder.add(event)
        self._owed.feed(event)
        if isinstance(event, Incomplete | RunFailedEvent | Cancelled):
            return self._refusal(of_end(event))
        if not isinstance(event, Completed):
            return None
        return Answer(status=200, body=msgspec.json.encode(self._body(self._builder.response, event, self._owed.calls)))


_encode = msgspec.json.Encoder().encode
_ESCAPED = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""U+2028, U+2029 and U+0085: `str.splitlines` ends a line there, and so does `httpx.Response.iter_lines`, with which
many clients read event streams. In JSON they occur inside strings only.
"""


def encode_line(value: object) -> bytes:
    """Encode a value as JSON without anything that ends a line."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _ESCAPED:
            data = data.replace(raw, escaped)
    return data
