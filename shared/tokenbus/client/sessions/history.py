"""A session's history as messages, from the pieces that its hash has and, for a run without one, from the run's log.

The hash has ``before``: the messages that the session began with; and for each run ``in:<n>``, the messages that
started it, and ``out:<n>``, what the run added, as `Client.messages` gives it. The latter is kept by the fetcher that
needs it first. ``heard:<n>``: how far the run was heard, if its listener said so after the run's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import sessions as scripts
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import is_end, public_event
from tokenbus.client.response import ResponseBuilder
from tokenbus.events.requests import Message
from tokenbus.events.sessions import SessionRun

AT_ONCE = 32
"""Runs whose pieces are read with one command."""
_COUNT = 256
_messages = msgspec.json.Decoder(list[Message])


class History(msgspec.Struct, frozen=True):
    """The messages before a run of a session."""

    messages: list[Message]
    own: list[Message]
    """The messages that started the run."""
    left_out: int = 0
    """Of how many runs the messages were left out: the oldest ones."""


async def history_before(
    server: Server,
    keys: Keys,
    of: SessionRun,
    *,
    tokens: int | None = None,
    count: Callable[[Sequence[Message]], int] = len,
    keep: bool = False,
) -> History:
    """Read the history before a run, which may be the next one.

    ``tokens``: leave the oldest runs out until the rest has at most so many, as ``count`` counts. ``keep``: keep pieces
    that were read from logs. Raises redis-py's errors, and Malformed for a log that is not one.
    """
    at = keys.within(keys.partition_of(of.ref))
    key = at.of_session(of.ref)[3]
    first: list[bytes | None] = await server.client.hmget(key, [f"in:{of.number}", "before"])
    own, before = (_decoded(piece) for piece in first)
    newest_first: list[list[Message]] = []
    size, number = 0, of.number
    while number > 0:
        runs = range(number - 1, max(0, number - AT_ONCE) - 1, -1)
        names = [f"{what}:{n}" for n in runs for what in ("in", "out", "heard")]
        found: list[bytes | None] = await server.client.hmget(key, names)
        for i, n in enumerate(runs):
            sent, answered, heard = found[3 * i : 3 * i + 3]
            run = SessionRun(of.ref, of.made, n)
            out = _decoded(answered) if answered else await _from_log(server, at.log(run.id), heard)
            if keep and answered is None:
                call = scripts.remember(
                    at.session(of.ref), key, made=of.made, name=f"out:{n}", messages=msgspec.json.encode(out)
                )
                await run_script(server, call)
            piece = [*_decoded(sent), *out]
            if tokens is not None and (size := size + count(piece)) > tokens:
                return History(_joined(newest_first), own, left_out=n + 1)
            newest_first.append(piece)
        number = runs[-1]
    if tokens is not None and before and size + count(before) > tokens:
        return History(_joined(newest_first), own)
    return History([*before, *_joined(newest_first)], own)


def _decoded(piece: bytes | None) -> list[Message]:
    return _messages.decode(piece) if piece else []


def _joined(newest_first: list[list[Message]]) -> list[Message]:
    return [message for piece in reversed(newest_first) for message in piece]


async def _from_log(server: Server, log: str, heard: bytes | None) -> list[Message]:
    """What an ended run added; nothing if its log is gone."""
    through, _, characters = (heard or b"").decode().partition(" ")
    builder = ResponseBuilder(
        heard_through=int(through) if through else None, heard_characters=int(characters) if characters else None
    )
    after, known, ended = "0-0", False, False
    while not ended:
        entries: list[Entry] = await server.client.xrange(log, f"({after}", count=_COUNT)
        if not entries:
            break
        for entry in entries:
            event = public_event(log, entry)
            builder.add(event)
            ended = is_end(event)
        known, after = True, entries[-1][0].decode()
    return builder.response.messages if known else []
