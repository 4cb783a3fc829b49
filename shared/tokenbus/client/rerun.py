"""Builds a new request from a run that ended badly: retry it from the start, or resume from its text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import sha256
from typing import Literal

import msgspec

from tokenbus.bus.run_record import CHOICE, CONTINUES, REQUEST, STATUS, TURN, UNENDED, history_fields, status_of
from tokenbus.bus.server.server import translated
from tokenbus.client.deployment import Deployment
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.client.sessions.history import history_before
from tokenbus.core.request.validate import left_from
from tokenbus.core.run.continuation import partial_message
from tokenbus.errors import RunNotFound, RunNotRepeatable, RunOpen
from tokenbus.events.frames import history_decoder
from tokenbus.events.public import PublicEvent
from tokenbus.events.requests import ContentPart, Generate, Message, TextPart
from tokenbus.events.sessions import session_run

How = Literal["retry", "resume"]
MAX_AGAIN = 1000
"""New runs that one run may lead to in each way."""
_request = msgspec.json.Decoder(Generate)


class EndedRun(msgspec.Struct, frozen=True):
    """What the server keeps of a run that ended badly."""

    run: str
    request: Generate
    history: list[Message]
    """Messages that its earlier turns added to the conversation, and those that steered it."""
    turn: int
    steers: list[Message] = []
    """The messages that steered it."""
    continues: bool = True
    """Whether the provider that was called last can continue a partial answer; True also if that is not known."""
    choice: int = 0
    """Which provider and model were called last: 0 for the request's own, n for its n-th fallback."""

    @property
    def last_request(self) -> Generate:
        """The request as last sent to a provider."""
        return left_from(self.request, self.choice)


async def request_again(
    deployment: Deployment, run: str, how: How, *, again: int, events: AsyncGenerator[PublicEvent]
) -> Generate:
    """Build the request that retries or resumes a run. ``events``: all of the run's, read only for a resume.

    Raises ValueError if ``again`` is not from 1 to `MAX_AGAIN`; RunNotFound, RunOpen, RunNotRepeatable; the errors of
    ``events``.
    """
    if type(again) is not int or not 1 <= again <= MAX_AGAIN:
        raise ValueError(f"again: {again!r} is not a whole number from 1 to {MAX_AGAIN}")
    async with aclosing(events):
        ended = await ended_run(deployment, run)
        if how == "retry":
            return retried_request(ended, again=again)
        check_resumable(ended)
        builder = ResponseBuilder()
        async for event in events:
            builder.add(event)
    return resumed_request(ended, builder.response, again=again)


async def ended_run(deployment: Deployment, run: str) -> EndedRun:
    """Read what the server keeps of an incomplete, failed or cancelled run.

    Raises RunNotFound, also if the records have expired; RunOpen; RunNotRepeatable if the run completed or was refused;
    ServerUnavailable.
    """
    keys = await deployment.keys_of(run)
    client = deployment.server.client
    # Read single fields: the hash of a recorded run also holds its raw stream.
    with translated(deployment.server):
        fields = [STATUS, REQUEST, TURN, CONTINUES, CHOICE]
        found, request, last_turn, continues, stored_choice = await client.hmget(keys.run(run), fields)
    status = status_of(found)
    if status in (None, "awaited"):
        raise RunNotFound(run)
    if status in UNENDED:
        raise RunOpen(run)
    if status == "completed":
        raise RunNotRepeatable(run, "it completed")
    if request is None:
        raise RunNotRepeatable(run, "its request was refused, so it is not kept")
    turn = int(last_turn or 0)
    asked, steers = _request.decode(request), dict[int, list[Message]]()
    if of_session := session_run(run):  # its request has the new messages alone
        with translated(deployment.server):
            before = await history_before(deployment.server, keys, of_session)
        asked = msgspec.structs.replace(asked, messages=[*before.messages, *(before.own or asked.messages)])
        for at, steering in before.steers:
            steers[at] = [*steers.get(at, []), *steering]
    history = steers.get(0, [])
    if turn:
        with translated(deployment.server):
            turns = await client.hmget(keys.run(run), history_fields(turn))
        if None in turns:  # expired between the two reads
            raise RunNotFound(run)
        for n, encoded in enumerate(turns, 1):
            history = [*history, *history_decoder.decode(encoded), *steers.get(n, [])]
    choice = int(stored_choice or 0)
    goes_on = (continues or b"")[choice : choice + 1] != b"0"
    return EndedRun(
        run=run,
        request=asked,
        history=history,
        turn=turn,
        steers=[message for _, steering in sorted(steers.items()) for message in steering],
        continues=goes_on,
        choice=choice,
    )


def retried_request(ended: EndedRun, *, again: int) -> Generate:
    """Return the same request as a new run, with what steered it from the start."""
    return _linked(ended.request, ended.run, "retry", again, [*ended.request.messages, *ended.steers])


def check_resumable(ended: EndedRun) -> None:
    """Check what is known before the run's text is read. Raises RunNotRepeatable if the run cannot be resumed."""
    if not ended.continues:
        request = ended.last_request
        problem = f"{request.model} at {request.provider} cannot continue a partial answer to this request"
        raise RunNotRepeatable(ended.run, problem)
    if ended.request.mode == "prefill" and ended.history:
        raise RunNotRepeatable(ended.run, "in mode prefill a run cannot be resumed after its tools ran")


def resumed_request(ended: EndedRun, response: Response, *, again: int) -> Generate:
    """Build the request that continues the last turn's text. Raises RunNotRepeatable if that is not possible."""
    check_resumable(ended)
    request, run, heard = ended.request, ended.run, response.heard
    parts: list[ContentPart] = []
    for block in response.blocks:
        if block.turn == ended.turn and block.kind in ("tool_call", "tool_result") and not block.cut:
            raise RunNotRepeatable(run, "it ended among its tool calls")
        if block.turn == ended.turn and block.kind == "text":
            text = block.content or ""
            parts.append(TextPart(text=text if heard is None else text[: heard.get(block.block, 0)]))
    message, _ = partial_message(parts)
    if message is None:
        raise RunNotRepeatable(run, "it has no text to continue")
    if request.mode == "prefill":
        message = msgspec.structs.replace(message, participant=request.participant)
    return _linked(ended.last_request, run, "resume", again, _joined([*request.messages, *ended.history], message))


def _joined(messages: list[Message], more: Message) -> list[Message]:
    """Append the partial answer; extends the last message if that is already a partial answer."""
    *before, last = messages
    if last.role != "assistant":
        return [*messages, more]
    return [*before, msgspec.structs.replace(last, content=[*_parts(last.content), *_parts(more.content)])]


def _parts(content: str | list[ContentPart]) -> list[ContentPart]:
    return [TextPart(text=content)] if isinstance(content, str) else content


def _linked(request: Generate, run: str, how: How, again: int, messages: Sequence[Message]) -> Generate:
    return msgspec.structs.replace(
        request,
        id=derived_id(run, how, again),
        parent=None,
        messages=list(messages),
        metadata={**(request.metadata or {}), f"{how}_of": run},
    )


def derived_id(run: str, how: How, again: int) -> str:
    """Derive the new run's id: always the same for the same arguments, and distinct from every other run's."""
    return f"{how}-{sha256(f'{how} {again} {run}'.encode()).hexdigest()[:32]}"
