"""What to serve, as data: scripts of turns, their delivery and their faults.

Everything has a JSON form (tagged by ``type``), so scripts may come from files as well as from tests.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tokenbus_services.mock_provider.reply import Reply

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class _Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of the tagged choices below."""


class Wire(_Choice, frozen=True, kw_only=True, tag="wire"):
    """Bytes as they were on the wire: the stream, and the body for a request that does not stream."""

    stream: bytes
    body: bytes | None = None


class Recording(_Choice, frozen=True, kw_only=True, tag="recording"):
    """Files that hold the same; read at each request."""

    stream: str
    """Path; in a script file, relative to it."""
    body: str | None = None


Source = Reply | Wire | Recording


class Whole(_Choice, frozen=True, kw_only=True, tag="whole"):
    """Whole events per read."""

    events: Positive = 1


class Fixed(_Choice, frozen=True, kw_only=True, tag="fixed"):
    """Bytes per read."""

    size: Positive


class Random(_Choice, frozen=True, kw_only=True, tag="random"):
    """Reads of 1 to ``largest`` bytes; the same seed cuts the same body at the same places."""

    seed: int
    largest: Positive


class Offsets(_Choice, frozen=True, kw_only=True, tag="offsets"):
    """Reads end at these places of the body, in bytes from its beginning, and at its end."""

    at: tuple[Positive, ...]


Cuts = Whole | Fixed | Random | Offsets


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a body goes out: each read is one write to a socket without Nagle's delay, and one HTTP chunk."""

    cuts: Cuts = Whole()
    pace: Annotated[float, Meta(gt=0)] | None = None
    """Reads a second; None: as fast as the client takes them."""
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    """Silence before the response's head."""


class _Placed(_Choice, frozen=True, kw_only=True):
    """A position in the body: after some events or bytes, or after the event with a text; none: the beginning."""

    after_events: Natural | None = None
    after_bytes: Natural | None = None
    after_text: str | None = None
    """As in the JSON. A body without it is an error."""

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.after_events, self.after_bytes, self.after_text)) > 1:
            raise ValueError("at most one place: after_events, after_bytes or after_text")


class Status(_Choice, frozen=True, kw_only=True, tag="status"):
    """An HTTP error in place of the reply."""

    status: Annotated[int, Meta(ge=400, le=599)]
    headers: dict[str, str] = {}
    body: bytes | None = None
    """None: the API's own error body for this status."""


class HangUp(_Choice, frozen=True, kw_only=True, tag="hang_up"):
    """The connection closes without an answer."""


class ErrorEvent(_Placed, frozen=True, kw_only=True, tag="error_event"):
    """The API's error event in mid-stream, and the end of the body."""

    status: Annotated[int, Meta(ge=400, le=599)] = 529
    """The HTTP status that this error would have had before the stream began."""


class CutOff(_Placed, frozen=True, kw_only=True, tag="cut_off"):
    """The connection closes in the middle of the body."""

    reset: bool = False
    """With a TCP reset rather than an orderly close."""


class Stall(_Placed, frozen=True, kw_only=True, tag="stall"):
    """Nothing more is sent and the connection stays open, until the client leaves or the test resumes it."""


Fault = Status | HangUp | ErrorEvent | CutOff | Stall


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer of the model."""

    says: Source
    delivery: Delivery = Delivery()
    first: tuple[Fault | None, ...] = ()
    """What goes wrong with the first tries, in order."""
    fault: Fault | None = None
    """What goes wrong with every later try."""

    def fault_of(self, attempt: int) -> Fault | None:
        """What goes wrong with this try, counted from 0."""
        return self.first[attempt] if attempt < len(self.first) else self.fault


class Script(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation: turn n of a request's history is answered with turn n of the script.

    A request asks for a script by naming it as its model.
    """

    turns: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    name: str = ""
    """Empty in a file: the file's name."""
    repeat_last: bool = False
    """Past the last turn, the last once more; else that is an error."""

    def paced(self, pace: float | None) -> Script:
        """The same script at another pace (reads a second)."""
        turns = (
            msgspec.structs.replace(turn, delivery=msgspec.structs.replace(turn.delivery, pace=pace))
            for turn in self.turns
        )
        return msgspec.structs.replace(self, turns=tuple(turns))
