"""What to serve, as data: scripts of turns, their delivery and their faults.

Everything has a JSON form (tagged by ``type``), so scripts may come from files as well as from tests.
"""

from __future__ import annotations

from pathlib import Path
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
    """How a body is sent: each read is one write to a socket without Nagle's delay, and one HTTP chunk."""

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
    queued: Natural = 0
    """A job in the background waits for this many looks at it before it runs."""
    refuses_steering: bool = False
    """Over a WebSocket, the answer goes on without the message that should steer it."""

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


# Loads scripts from a directory.
#
# `NAME.json` is a `Script` as JSON, with paths relative to the directory; `NAME.sse` is a recording, a script of one
# turn; in a directory `NAME`, each `*.sse` is a turn, in order of name.


def load_scripts(directory: Path) -> list[Script]:
    """Load all scripts of a directory, in order of name. Raises OSError, or ValueError naming the file."""
    scripts = [script for path in sorted(directory.iterdir()) if (script := _load(path)) is not None]
    names = [script.name for script in scripts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{directory}: more than one script is called {', '.join(twice)}")
    return scripts


def recorded(name: str, *streams: Path) -> Script:
    """A script of recordings, one per turn."""
    return Script(name=name, turns=tuple(Turn(says=Recording(stream=str(stream))) for stream in streams))


def _load(path: Path) -> Script | None:
    if path.suffix == ".json":
        return _read(path)
    if path.suffix == ".sse":
        return recorded(path.stem, path)
    if path.is_dir() and (streams := sorted(path.glob("*.sse"))):
        return recorded(path.name, *streams)
    return None


def _read(path: Path) -> Script:
    try:
        script = msgspec.json.decode(path.read_bytes(), type=Script)
    except msgspec.DecodeError as e:
        raise ValueError(f"{path}: {e}") from None
    turns = (msgspec.structs.replace(turn, says=_located(turn.says, path.parent)) for turn in script.turns)
    return msgspec.structs.replace(script, name=script.name or path.stem, turns=tuple(turns))


def _located(says: Source, directory: Path) -> Source:
    """A recording with its paths resolved against the directory."""
    if not isinstance(says, Recording):
        return says
    body = None if says.body is None else str(directory / says.body)
    return Recording(stream=str(directory / says.stream), body=body)
