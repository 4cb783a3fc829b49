"""A burst of many megabytes at the end of a large run goes out in parts, so that other answers continue in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from tokenbus.events.public import Completed, PublicEvent, Timing
from tokenbus_services.gateway.answers import answer
from tokenbus_services.gateway.answers.answer import AnswerTimes, RunOfAnswer, StreamedAnswer


class Burst:
    """An encoder with pieces of these sizes for its only event."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def feed(self, event: PublicEvent) -> list[bytes]:
        return [*self._pieces]

    def broken(self, problem: Any) -> list[bytes]:
        return [*self._pieces]


@pytest.mark.parametrize(
    ("pieces", "parts"),
    [
        ([b"a", b"", b"bc"], [b"abc"]),
        ([b"abc", b"de"], [b"abc", b"de"]),
        ([b"0123456789", b"x"], [b"0123", b"4567", b"89x"]),
    ],
)
async def test_an_answer_is_sent_in_parts_of_bounded_size(
    pieces: list[bytes], parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "SEND_BYTES", 4)
    sent: list[MutableMapping[str, Any]] = []
    others = 0

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append({**message, "others": others})

    async def receive() -> MutableMapping[str, Any]:
        nonlocal others
        await asyncio.sleep(0)
        others += 1  # what else this gateway does
        return {"type": "http.request"}

    async def events() -> AsyncGenerator[PublicEvent]:
        yield Completed(run="r", seq=0, turn=0, attempt=1, finish="stop", timing=Timing(total_ms=1))

    encoder: Any = Burst(*pieces)
    how = RunOfAnswer(run="r", events=events(), refusal=lambda problem: pytest.fail(str(problem)), times=AnswerTimes())
    streamed = StreamedAnswer(
        how, encoder=lambda event: encoder, media_type="text/event-stream", keep_alive=b"", early=False
    )
    await streamed({}, receive, send)
    bodies = [message for message in sent if message["type"] == "http.response.body" and message["body"]]
    assert [message["body"] for message in bodies] == parts
    turns = [message["others"] for message in bodies]
    assert turns == sorted(set(turns)), "the event loop turned between the parts"
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
