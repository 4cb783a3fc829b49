"""A session's history as messages, from the pieces that its hash has and, for a run without one, from the run's log.

The hash has ``before``: the messages before the run ``begins_at``, of a session that began with some, or whose history
was rewritten; and for each run from there on ``add:<n>``, messages that were put before it; ``in:<n>``, those that
started it; ``steer:<n>``, those that steered it, with the turn that they went into; and ``out:<n>``, what the run
added, as `Client.messages` gives it, with those that steered it. The last is kept by the fetcher that needs it first.
``heard:<n>``: how far the run was heard, if its listener said so after the run's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import sessions as scripts
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import is_end, public_event
from tokenbus.client.deployment import Deployment
from tokenbus.client.response import Response, ResponseBuilder
from tokenbus.events.requests import Message
from tokenbus.events.run_messages import CARRIED, messages_of
from tokenbus.events.sessions import SessionRun, session_run

AT_ONCE = 256
"""Runs whose pieces are read or measured at once."""
MOST_BYTES = 32 * 2**20
"""Of a history, as JSON. No provider takes more in one request, and who reads a history has it in memory."""
STEP_BYTES = 2**20
"""Pieces are read at once up to this size, or one run's, so that no session takes the server for long."""
FIRST_BYTES = 2**18
"""The same for the first of them, before it is known how much is wanted."""
_PIECES = ("add", "in", "out", "heard", "steer")
_COUNT = 256
_messages = msgspec.json.Decoder(list[Message])
_work = msgspec.msgpack.Decoder(list[msgspec.Raw])
_steers = msgspec.json.Decoder(list[tuple[int, list[Message]]])


class Summary(msgspec.Struct, frozen=True, array_like=True):
    """The piece ``summary``: what stands for the messages before the run ``runs`` in a request with a bound."""

    runs: int
    edits: int
    """How often the history was rewritten; once that is more, the summary is void."""
    messages: list[Message]


Steers = list[tuple[int, list[Message]]]


class History(msgspec.Struct, frozen=True):
    """The messages before a run of a session."""

    messages: list[Message]
    own: list[Message]
    """The messages that started the run."""
    steers: Steers
    """The messages that steered it so far, with the turn that they went into."""
    following: list[Message]
    """Messages that were put behind it, for the runs after it."""
    added: int = 0
    """How many of the last ``messages`` belong to no run."""
    left_out: int = 0
    """Of how many runs the messages were left out: the oldest ones."""
    whole: bool = True
    """Nothing was left out."""
    begins_at: int = 0
    """The first run whose messages they have; those before it are ``before`` or a summary."""
    summary: bool = False
    """They begin with a summary."""
    edits: int = 0
    """How often the history was rewritten."""
    forgotten: int = 0
    """What so many of the first runs added is gone, because a session keeps so much and no more."""


class Page(msgspec.Struct, frozen=True, array_like=True):
    """Fields of a history, and the pieces of some runs; `read_history` replies it."""

    fields: list[bytes | None]
    pieces: list[bytes | None]


async def newest_pieces(server: Server, keys: Keys, of: SessionRun) -> Page:
    """Read what `history_before` needs first: all that it needs, if it is short. Raises redis-py's errors."""
    n, key = of.number, keys.within(keys.partition_of(of.id)).of_session(of.ref)[3]
    names = ["before", "begins_at", f"add:{n}", f"in:{n}", f"steer:{n}", f"add:{n + 1}", "summary", "edits"]
    call = scripts.read_history(key, before=n, oldest=0, most_runs=AT_ONCE, most_bytes=FIRST_BYTES, fields=names)
    return msgspec.convert(await run_script(server, call), Page)


async def history_before(
    server: Server,
    keys: Keys,
    of: SessionRun,
    *,
    tokens: int | None = None,
    count: Callable[[Sequence[Message]], int] = len,
    keep: bool = False,
    newest: Page | None = None,
) -> History:
    """Read the history before a run, which may be the next one. Of one larger than `MOST_BYTES` the oldest runs are
    left out.

    ``tokens``: leave the oldest runs out until the rest has at most so many, as ``count`` counts. ``keep``: for a
    request: keep pieces that were read from logs, and begin with the summary if there is one. ``newest``: what
    `newest_pieces` has read of the same. Raises redis-py's errors, and Malformed for a log that is not one.
    """
    at = keys.within(keys.partition_of(of.id))  # where a fetcher knows the run to be
    key, n = at.of_session(of.ref)[3], of.number
    page = newest or await newest_pieces(server, keys, of)
    first, pieces = page.fields, page.pieces
    before, added, own, following = (_decoded(piece) for piece in (first[0], first[2], first[3], first[5]))
    begins_at, steers = int(first[1] or 0), _steers.decode(first[4] or b"[]")
    if begins_at > n:
        before = []  # of later runs: what was before this one is gone
    edits, summarised = int(first[7] or 0), False
    if keep and first[6]:
        summary = msgspec.json.decode(first[6], type=Summary)
        if summarised := summary.edits == edits and begins_at <= summary.runs <= n:
            begins_at, before = summary.runs, summary.messages

    def history(left_out: int = 0, *, whole: bool = True) -> History:
        return History(
            _joined(newest_first),
            own,
            steers,
            following,
            added=len(added),
            left_out=left_out,
            whole=whole,
            begins_at=begins_at,
            summary=summarised,
            edits=edits,
            forgotten=int(first[1] or 0) if first[0] is None else 0,
        )

    newest_first = [added]
    size, room = count(added), MOST_BYTES - len(first[2] or b"")
    while n > begins_at:
        if not pieces:
            call = scripts.read_history(key, before=n, oldest=begins_at, most_runs=AT_ONCE, most_bytes=STEP_BYTES)
            pieces = msgspec.convert(await run_script(server, call), Page).pieces
        for i in range(0, min(len(pieces), (n - begins_at) * len(_PIECES)), len(_PIECES)):
            put, sent, answered, heard, steered = pieces[i : i + len(_PIECES)]
            run = SessionRun(of.ref, of.made, n - 1)
            kept = answered
            if kept is None:
                out = await messages_in_log(server, at.log(run.id), heard, _steers.decode(steered or b"[]"))
                kept = msgspec.json.encode(out)
                if keep:
                    name = f"out:{run.number}"
                    call = scripts.remember(at.session(of.ref), key, made=of.made, name=name, messages=kept)
                    await run_script(server, call)
            else:
                out = _decoded(kept)
            piece = [*_decoded(put), *_decoded(sent), *out]
            room -= sum(len(each or b"") for each in (put, sent, kept))
            if room < 0 or (tokens is not None and (size := size + count(piece)) > tokens):
                return history(n, whole=False)
            newest_first.append(piece)
            n = run.number
        if not pieces:  # the history was rewritten meanwhile
            return history(n, whole=False)
        pieces = []
    if len(first[0] or b"") > room or (tokens is not None and before and size + count(before) > tokens):
        return history(begins_at, whole=False)
    newest_first.append(before)
    return history()


async def history_bytes(deployment: Deployment, ref: str) -> int:
    """About how much memory the messages of a session take as JSON, at most `MOST_BYTES`: what is still in logs alone
    is not counted. Raises ServerUnavailable.
    """
    server, keys = deployment.server, await deployment.keys_of(ref)
    key = keys.of_session(ref)[3]
    with translated(server):
        runs = int(await server.client.hget(keys.session(ref), "runs") or 0)
        total: int = await server.client.hstrlen(key, "before")
        while runs >= 0 and total < MOST_BYTES:
            pipe = server.client.pipeline(transaction=False)
            for n in range(runs, max(-1, runs - AT_ONCE), -1):
                for what in _PIECES:
                    pipe.hstrlen(key, f"{what}:{n}")
            total += sum(await pipe.execute())
            runs -= AT_ONCE
    return min(total, MOST_BYTES)


async def steered_turns(deployment: Deployment, run: str) -> list[int]:
    """The turns of a session's run that messages went into. Raises ServerUnavailable."""
    of = session_run(run)
    if of is None:
        return []
    keys = await deployment.keys_of(of.ref)
    with translated(deployment.server):
        found: bytes | None = await deployment.server.client.hget(keys.of_session(of.ref)[3], f"steer:{of.number}")
    return [turn for turn, _ in _steers.decode(found or b"[]")]


async def waiting_steers(server: Server, keys: Keys, of: SessionRun) -> list[Message]:
    """The messages that wait to steer a session's open run, in the order in which its next turn takes them in. Raises
    redis-py's errors.
    """
    _, appends, queue, _ = keys.within(keys.partition_of(of.id)).of_session(of.ref)
    waiting: list[bytes] = await server.client.zrange(queue, 0, -1)
    if not waiting:
        return []
    found: list[bytes | None] = await server.client.hmget(
        appends, [mark + one for one in waiting for mark in (b"!", b"^")]
    )
    works = [work for work, steers in zip(found[::2], found[1::2], strict=True) if work and steers]
    # The first field of what a message starts; another one is no text, so the whole cannot be decoded.
    pieces = [msgspec.msgpack.decode(_work.decode(work)[0], type=str) for work in works]
    return [message for piece in pieces for message in _messages.decode(f"[{piece}]")]


def _decoded(piece: bytes | None) -> list[Message]:
    return _messages.decode(piece) if piece else []


def _joined(newest_first: list[list[Message]]) -> list[Message]:
    return [message for piece in reversed(newest_first) for message in piece]


async def messages_in_log(
    server: Server, log: str, heard: bytes | None = None, steers: Steers | None = None
) -> list[Message]:
    """What an ended run added, with the messages that steered it; nothing else if its log is gone."""
    through, _, characters = (heard or b"").decode().partition(" ")
    builder = ResponseBuilder(
        heard_through=int(through) if through else None, heard_characters=int(characters) if characters else None
    )
    response = await response_in_log(server, log, builder)
    if response is None:
        return [message for _, messages in steers or () for message in messages]
    return _with_steers(response, steers) if steers else response.messages


async def response_in_log(server: Server, log: str, builder: ResponseBuilder | None = None) -> Response | None:
    """What the log of a run makes, which should have ended; None if the log is gone. Raises redis-py's errors."""
    builder = builder or ResponseBuilder()
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
    return builder.response if known else None


def _with_steers(response: Response, steers: Steers) -> list[Message]:
    """The run's messages turn by turn, each after the messages that steered it."""
    messages: list[Message] = []
    last = max((block.turn for block in response.blocks), default=0)
    for turn in sorted({block.turn for block in response.blocks} | {turn for turn, _ in steers}):
        messages += [message for at, steering in steers for message in steering if at == turn]
        blocks = [block for block in response.blocks if block.turn == turn]
        extras = [extra for extra in response.provider_extra if turn == last or extra.get("name") not in CARRIED]
        messages += messages_of(blocks, extras, response.participant, response.heard)
    return messages
