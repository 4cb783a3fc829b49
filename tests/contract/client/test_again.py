"""A run that ended badly: retried from the start, or resumed from its output."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.contract.client.writer import LOST, Writer
from tokenbus import BlockComplete, Client, Generate, Incomplete, Message
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestInvalid, RunNotFound, RunNotRepeatable, RunOpen
from tokenbus.events.public import Timing
from tokenbus.events.requests import TextPart

REQUEST = Generate(
    id="r",
    provider="anthropic",
    model="m",
    messages=[Message(role="user", content="Hi")],
    metadata={"tenant": "t"},
)


async def ended(
    server: Server, keys: Keys, expected: str = "", *, request: Generate = REQUEST, turn: int = 0, **fields: Any
) -> Writer:
    """A run that broke off after some text."""
    writer = Writer(server, keys, "r")
    await writer.start()
    if expected:
        await writer.say(expected)
        about = {"block": 0, "kind": "text", "content": expected, "cut": True}
        await writer.write((BlockComplete, about))
    await writer.write(
        (Incomplete, {"finish": "unknown", "timing": Timing(total_ms=1), "reason": "cut", "error": LOST})
    )
    kept = {"status": "incomplete", "request": msgspec.json.encode(request), "turn": turn, **fields}
    await server.client.hset(keys.run("r"), mapping=kept)
    return writer


async def published(server: Server, keys: Keys) -> list[Generate]:
    entries = await server.client.xrange(keys.requests)
    return [msgspec.json.decode(fields[b"__data__"], type=Generate) for _, fields in entries]


async def test_a_retry_is_the_same_request_as_a_new_run_that_names_the_old_one(bus: Client, server: Server, keys: Keys):
    await ended(server, keys, "Half")
    new = await bus.retry("r")
    [request] = await published(server, keys)
    assert new.id == request.id != "r"
    link = {"tenant": "t", "retry_of": "r"}
    assert request == msgspec.structs.replace(REQUEST, id=new.id, metadata=link)


async def test_a_repeated_request_gives_the_same_new_run_unless_another_is_requested(
    bus: Client, server: Server, keys: Keys
):
    await ended(server, keys, "Half")
    ids = [(await bus.retry("r")).id, (await bus.retry("r")).id, (await bus.retry("r", again=2)).id]
    ids += [(await bus.resume("r")).id, (await bus.resume("r")).id]
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert len(set(ids)) == 3


async def test_the_runs_that_one_run_may_lead_to_are_bounded(bus: Client, server: Server, keys: Keys):
    await ended(server, keys, "Half")
    for number in (0, -1, 1001, True, "2"):
        again: Any = number
        with pytest.raises(ValueError, match="from 1 to 1000"):
            await bus.retry("r", again=again)
        with pytest.raises(ValueError, match="from 1 to 1000"):
            await bus.resume("r", again=again)
    assert await published(server, keys) == []
    await bus.retry("r", again=1000)


async def test_going_on_sends_the_partial_text_as_the_beginning_of_the_answer(bus: Client, server: Server, keys: Keys):
    await ended(server, keys, "Hello there, ")
    new = await bus.resume("r")
    [request] = await published(server, keys)
    reply = Message(role="assistant", content=[TextPart(text="Hello there,")])  # providers refuse blanks at the end
    assert request.messages == [*REQUEST.messages, reply]
    assert request.metadata == {"tenant": "t", "resume_of": "r"}
    assert request.id == new.id


async def test_a_further_continuation_extends_the_partial_answer(bus: Client, server: Server, keys: Keys):
    begun = [*REQUEST.messages, Message(role="assistant", content="Hello")]
    await ended(server, keys, " there", request=msgspec.structs.replace(REQUEST, messages=begun))
    await bus.resume("r")
    [request] = await published(server, keys)
    assert request.messages[1].content == [TextPart(text="Hello"), TextPart(text=" there")]


@pytest.mark.parametrize("how", ["retry", "resume"])
async def test_runs_that_cannot_be_taken_up_again_are_errors_by_name(bus: Client, server: Server, keys: Keys, how: str):
    again = getattr(bus, how)
    with pytest.raises(RunNotFound):
        await again("nobody")
    with pytest.raises(RequestInvalid):
        await again("a b")
    writer = await ended(server, keys, "Half")
    still_open = ("open", "cancelling", "expiring")
    for status, error in (*((status, RunOpen) for status in still_open), ("completed", RunNotRepeatable)):
        await server.client.hset(keys.run("r"), "status", status)
        with pytest.raises(error):
            await again("r")
    await server.client.hset(keys.run("r"), "status", "failed")
    await server.client.hdel(keys.run("r"), "request")
    with pytest.raises(RunNotRepeatable, match="refused"):
        await again("r")
    await server.client.unlink(keys.run("r"), writer.log)
    with pytest.raises(RunNotFound):
        await again("r")
    assert await published(server, keys) == []


async def test_a_turn_without_text_or_cut_among_calls_cannot_be_continued(bus: Client, server: Server, keys: Keys):
    writer = await ended(server, keys)
    with pytest.raises(RunNotRepeatable, match="no text to continue"):
        await bus.resume("r")
    await server.client.unlink(writer.log)
    writer = Writer(server, keys, "r")
    await writer.start()
    await writer.say("Let me look.")
    await writer.write((BlockComplete, {"block": 1, "kind": "tool_call", "arguments": "{}"}))
    await writer.write((Incomplete, {"finish": "unknown", "timing": Timing(total_ms=1), "reason": "cut"}))
    await server.client.hset(keys.run("r"), "status", "incomplete")
    with pytest.raises(RunNotRepeatable, match="tool calls"):
        await bus.resume("r")


async def test_intakes_word_on_continuing_counts_and_not_the_providers_name(bus: Client, server: Server, keys: Keys):
    writer = await ended(server, keys, "Half", request=msgspec.structs.replace(REQUEST, provider="openai-responses"))
    await bus.resume("r")  # no flag forbids it
    await server.client.hset(keys.run("r"), "continues", 1)
    await bus.resume("r", again=2)
    assert len(await published(server, keys)) == 2
    await server.client.hset(keys.run("r"), "continues", 0)
    await server.client.unlink(writer.log)  # it is raised before the run's text is read
    with pytest.raises(RunNotRepeatable, match="cannot continue") as e:
        await bus.resume("r")
    assert (e.value.code, e.value.run) == ("run_not_repeatable", "r")
    await bus.retry("r")
