"""Folds a session's steps into what a person reads. Pure; every reader of a session gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.client.sessions.reader import SessionStep
from tokenbus.events.public import (
    BlockComplete,
    Cancelled,
    Chunk,
    Completed,
    Event,
    Incomplete,
    PublicEvent,
    Restarted,
    Resumed,
    Retrying,
    RunFailedEvent,
    Started,
    UnknownEvent,
    Waiting,
)
from tokenbus.events.requests import Configure, Message, SessionMessage
from tokenbus.events.sessions import (
    AnySessionEvent,
    Appended,
    Configured,
    Delivered,
    Returned,
    ReturnReason,
    RunEnded,
    SessionEvent,
)
from tokenbus.events.topics import type_of
from tokenbus_services.cli.chat import asking
from tokenbus_services.cli.render import event_text as wording

Kind = Literal["said", "answer", "thinking", "tool", "ask", "note", "error"]

NOBODY = "user"
"""Who said a message without a participant."""
_MODEL = "model"
_RESULT_CHARS = 200
"""How much of a tool's input or result is shown."""
_RETURNED: dict[ReturnReason, str] = {
    "busy": "the model is speaking",
    "withdrawn": "taken back",
    "queue_full": "too many messages wait",
    "heard_too_far": "it says that more was heard than was said",
    "not_waiting": "it does not wait any more",
    "nothing_open": "there is nothing to interrupt",
    "newer_run": "the next answer has begun",
    "exists": "the session is there already",
    "rejected": "a policy did not let it pass",
}


class Piece(msgspec.Struct, frozen=True):
    """Something to show. Pieces with the same ``block`` are one paragraph."""

    kind: Kind
    text: str
    head: str = ""
    """Who speaks."""
    block: tuple[str, int] | None = None
    run: str | None = None


class Queued(msgspec.Struct, frozen=True):
    """A message that was accepted and has not taken effect."""

    author: str
    text: str
    steers: bool = False
    """It may go into the open run."""


class Transcript:
    """What was said in a session so far, and what waits."""

    def __init__(self) -> None:
        self.config: Configure | None = None
        self.waiting: dict[str, Queued] = {}
        self.open_run: str | None = None
        self.models: dict[str, str] = {}
        """By provider: the model that the session last used of it."""
        self.said: list[tuple[str, str]] = []
        """Author and text of each message that was delivered."""
        self.runs: dict[str, str | None] = {}
        """The run of each append that was delivered; None for one that was returned."""
        self.ends: dict[str, str] = {}
        """How each run ended."""
        self.asks: dict[tuple[str, str], Waiting] = {}
        """What runs wait for, by run and wait; what waits longest first."""
        self._speaker = _MODEL

    @property
    def model(self) -> str:
        """Provider and model of the next run."""
        request = self.config.request if self.config else {}
        return f"{request.get('provider')}/{request.get('model')}"

    def feed(self, step: SessionStep) -> list[Piece]:
        """Apply one step; return the lines to show."""
        event = step.event
        return self._of_session(event) if isinstance(event, SessionEvent) else self._of_run(event)

    def _of_session(self, event: AnySessionEvent) -> list[Piece]:
        match event:
            case Configured(item=Configure() as config):
                return self._configured(config)
            case Appended(item=SessionMessage() as message):
                config = self.config.when_busy if self.config else None
                author, text = message.participant or NOBODY, text_of(message)
                steers = (message.when_busy or config) == "steer" and self.open_run is not None
                self.waiting[event.append] = Queued(author, text, steers)
                return []
            case Delivered():
                message = self.waiting.pop(event.append, None)
                if message is None:
                    return []
                self.open_run = self.runs[event.append] = event.run
                self.said.append((message.author, message.text))
                return [Piece("said", message.text, message.author, run=event.run)]
            case Returned():
                message = self.waiting.pop(event.append, None)
                self.runs[event.append] = None
                why = event.problem or _RETURNED.get(event.reason, event.reason)
                if message is None:  # of what policies reject, the session never has the text
                    return [Piece("note", f"a message was returned: {why}")] if event.reason == "rejected" else []
                return [Piece("note", f"{message.author}'s message “{message.text}” was returned: {why}")]
            case RunEnded():
                self.open_run = None
                self.ends[event.run or ""] = event.status
                self.asks = {key: ask for key, ask in self.asks.items() if ask.run != event.run}
                lost = [Piece("error", "nothing is left of this answer", run=event.run)]
                return lost if event.status == "lost" else []
            case _:
                return []

    def _configured(self, config: Configure) -> list[Piece]:
        before, known = self.model, self.config is not None
        self.config = config
        provider, _, model = self.model.partition("/")
        self.models[provider] = model
        return [Piece("note", f"from now on {self.model}")] if known and self.model != before else []

    def _of_run(self, event: PublicEvent) -> list[Piece]:
        """What an event of a run shows."""
        block = (event.run, event.block) if isinstance(event, Chunk | BlockComplete) else None
        match event:
            case Started():
                self.open_run, self._speaker = event.run, event.participant or event.model
                return []
            case Waiting():
                self.asks[event.run, event.wait] = event
                return [Piece("ask", asking.text_of(event), run=event.run)]
            case Resumed():
                self.asks.pop((event.run, event.wait), None)
                return [Piece("note", asking.fate_of(event), run=event.run)]
            case Chunk(visible=True):
                return [Piece("answer", event.text, self._speaker, block, event.run)]
            case Chunk(kind="thinking"):
                return [Piece("thinking", event.text, block=block, run=event.run)]
            case Chunk():
                return []
            case BlockComplete(kind="text" | "thinking" | "audio"):
                return []
            case BlockComplete():
                return [Piece("tool", _short(f"{wording.title(event)} {wording.content(event)}"), run=event.run)]
            case _:
                note = _note(event)
                return [msgspec.structs.replace(note, run=event.run)] if note else []


def _note(event: Event) -> Piece | None:
    match event:
        case Retrying() | Restarted():
            return Piece("note", f"{type_of(event)}: {wording.details(event)}")
        case RunFailedEvent():
            return Piece("error", wording.error(event.error))
        case Incomplete():
            return Piece("error", f"the answer is incomplete: {event.reason}")
        case Cancelled():
            return Piece("note", event.reason or "cancelled")
        case Completed(finish=finish) if finish not in ("stop", "tool_use"):
            return Piece("note", f"it ended by {finish}")
        case UnknownEvent():
            return Piece("note", "an event of a newer tokenbus")
        case _:
            return None


def began_with(messages: Sequence[Message]) -> list[Piece]:
    """What a session shows of the history that it began with."""
    pieces: list[Piece] = []
    for message in messages:
        kind, nobody = ("answer", _MODEL) if message.role == "assistant" else ("said", NOBODY)
        if message.role in ("user", "assistant") and (text := text_of(message)):
            pieces.append(Piece(kind, text, message.participant or nobody))
    return pieces


def text_of(message: SessionMessage | Message) -> str:
    """A message's text; other parts by their type."""
    if isinstance(message.content, str):
        return message.content
    parts = (getattr(part, "text", None) or f"[{part.__struct_config__.tag}]" for part in message.content)
    return " ".join(parts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _RESULT_CHARS else f"{line[:_RESULT_CHARS]}…"
