"""What a session's steps show, and what a transcript remembers of them."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.services.cli.events import EventFactory
from tokenbus.client.sessions.reader import SessionCursor, SessionStep
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import Configure, SessionMessage
from tokenbus.events.sessions import AnySessionEvent, Appended, Configured, Delivered, Returned, RunEnded
from tokenbus_services.cli.chat.transcript import Piece, Queued, Transcript

CONFIG = Configure(request={"provider": "p", "model": "m"}, when_busy="steer")


class Told:
    """A transcript, and the pieces of all that was fed to it."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.pieces: list[Piece] = []
        self._seq = -1
        self.of_session(Configured, append="c", item=CONFIG)

    def of_session(self, kind: type[AnySessionEvent], **fields: Any) -> list[Piece]:
        self._seq += 1
        return self.of_run(kind(session_seq=self._seq, at_ms=0, **fields))

    def of_run(self, event: AnySessionEvent | PublicEvent) -> list[Piece]:
        pieces = self.transcript.feed(SessionStep(event, SessionCursor(self._seq)))
        self.pieces += pieces
        return pieces

    def message(self, append: str, text: str, who: str | None = "ada") -> list[Piece]:
        return self.of_session(Appended, append=append, item=SessionMessage(content=text, participant=who))


def test_a_message_is_shown_where_it_took_effect_and_waits_until_then() -> None:
    told, run = Told(), EventFactory()
    assert told.message("a", "hello") == []
    assert told.transcript.waiting == {"a": Queued("ada", "hello")}
    told.of_session(Delivered, append="a", run="r1")
    told.of_run(run.started())
    told.of_run(run.chunk(0, "Hel"))
    told.message("b", "also", None)
    assert told.transcript.waiting == {"b": Queued("user", "also", steers=True)}
    told.of_run(run.chunk(0, "lo"))
    told.of_session(Delivered, append="b", run="r1", turn=1)
    told.of_session(RunEnded, run="r1", status="completed")
    assert [(piece.kind, piece.head, piece.text) for piece in told.pieces] == [
        ("said", "ada", "hello"),
        ("answer", "m", "Hel"),
        ("answer", "m", "lo"),
        ("said", "user", "also"),
    ]
    assert told.transcript.said == [("ada", "hello"), ("user", "also")]
    assert (told.transcript.runs, told.transcript.ends) == ({"a": "r1", "b": "r1"}, {"r1": "completed"})
    assert told.transcript.open_run is None


def test_a_returned_message_says_why_and_other_appends_say_nothing() -> None:
    told = Told()
    told.message("a", "hello")
    [piece] = told.of_session(Returned, append="a", reason="busy")
    assert piece == Piece("note", "ada's message “hello” was returned: the model is speaking")
    assert told.transcript.waiting == {}
    assert told.of_session(Returned, append="i", reason="nothing_open") == []
    [piece] = told.of_session(Returned, append="p", reason="rejected", problem="rejected by a policy: no")
    assert piece == Piece("note", "a message was returned: rejected by a policy: no")
    assert told.of_session(Delivered, append="i2", run="r1") == []
    assert told.transcript.open_run is None


def test_a_changed_model_is_noted_and_remembered_by_provider() -> None:
    told = Told()
    assert told.of_session(Configured, append="d", item=msgspec.structs.replace(CONFIG, together=True)) == []
    other = msgspec.structs.replace(CONFIG, request={"provider": "q", "model": "vendor/n"})
    assert told.of_session(Configured, append="e", item=other) == [Piece("note", "from now on q/vendor/n")]
    assert told.transcript.models == {"p": "m", "q": "vendor/n"}


def test_thinking_and_tools_are_not_the_answer_and_failures_are_said() -> None:
    told, run = Told(), EventFactory()
    told.of_run(run.started())
    told.of_run(run.block(0, "tool_result", content="x" * 500, tool_name="weather"))
    told.of_run(run.failed())
    assert [piece.kind for piece in told.pieces] == ["tool", "error"]
    assert len(told.pieces[0].text) < 300
    assert "come back later" in told.pieces[1].text
    told.of_session(RunEnded, run="r2", status="lost")
    assert told.pieces[-1].kind == "error"
