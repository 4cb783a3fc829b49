"""Erases runs that have ended: all that the server keeps of them, and a search that finds what is left.

What a run leaves on the server: its hash (request, history, result), its log, its tape and the order of its tree; its
places in the index; its events in the public topics; its entries among the dead letters and in the index of records;
the gateway's notes; what webhooks are still to tell; and what stages have passed on to each other, which is trimmed as
soon as no open run needs it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Any

import msgspec

from tokenbus.bus.dead_letters import all_dead_letters, drop_dead_letter
from tokenbus.bus.keys import DATA_FIELD, TOPICS, Keys, SubscribedTopic
from tokenbus.bus.layout import locate
from tokenbus.bus.records import drop_record
from tokenbus.bus.run_record import ACCEPTED, ENDED_AT, STATUS, TENANT, UNENDED, children_in, status_of
from tokenbus.bus.scripts.retention import erase
from tokenbus.bus.server.run_scripts import run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.topology import POLICY, STAGES
from tokenbus.bus.webhooks import deliveries_of
from tokenbus.events.child_runs import child_id
from tokenbus.events.sessions import session_ref
from tokenbus.events.waits import WaitFate

PAGE = 500
PASSING_S = 5.0
"""How long an erasure waits until stages have read what they were passed, and until a record that a recorder may be
writing is there to be dropped."""
LATER_MS = 60_000
"""Events and decisions about a run that are written after its end are written within this time."""


class _OfRun(msgspec.Struct):
    type: str = ""
    run: str = ""
    session: str | None = None
    tenant: str = ""


_of_run = msgspec.json.Decoder(_OfRun)
_fate = msgspec.json.Decoder(WaitFate)


class Erased(msgspec.Struct, kw_only=True):
    """What was found of runs, by place, and deleted."""

    runs: list[str] = []
    """Those whose keys were there."""
    open: list[str] = []
    """Runs that have not ended. Nothing of them was deleted."""
    found: Counter[str] = msgspec.field(default_factory=Counter[str])
    """Number of entries by place: `runs`, `events`, `dead letters`, `records`, `notes`,
    `webhooks`.
    """


class _Window(msgspec.Struct):
    """Where a partition's topics may have events of the runs: all of it if a run's times are unknown."""

    runs: set[str]
    sessions: set[str] = msgspec.field(default_factory=set[str])
    """Of these the topic of sessions is searched, whatever the times."""
    since_ms: int | None = None
    until_ms: int | None = None


async def with_children(server: Server, keys: Keys, runs: Collection[str]) -> set[str]:
    """These runs, and all child runs below those of them that have ended. Raises redis-py's errors."""
    found, level = set(runs), set(runs)
    while level:
        await locate(server, keys, *level)
        below: set[str] = set()
        for page in _pages(sorted(level)):
            pipe = server.client.pipeline(transaction=False)
            for run in page:
                pipe.hget(keys.run(run), STATUS)
                pipe.hkeys(keys.run(run))
            replies: list[Any] = await pipe.execute()
            for run, status, fields in zip(page, replies[::2], replies[1::2], strict=True):
                if status_of(status) not in UNENDED:
                    below.update(child_id(run, block) for block in children_in(fields))
        level = below - found
        found |= level
    return found


async def erase_runs(server: Server, keys: Keys, runs: Collection[str], sessions: Collection[str] = ()) -> Erased:
    """Delete all that the server has of these runs and of their child runs, unless they are open; idempotent.
    ``sessions``: what deleted ones of these (`session_ref`) left on the topic, too, but for the event that says it.
    Raises redis-py's errors; a part may be deleted then.
    """
    erased = Erased()
    runs = await with_children(server, keys, runs)
    await locate(server, keys, *runs)
    names = {run: keys.partition_of(run) for run in runs}
    facts: dict[str, list[bytes | None]] = {}
    for page in _pages(runs):
        pipe = server.client.pipeline(transaction=False)
        for run in page:
            pipe.hmget(keys.run(run), [ACCEPTED, ENDED_AT, TENANT])
            pipe.unlink(*_notes(keys, run))
        replies: list[Any] = await pipe.execute()
        told = await _told_of_decisions(server, keys, page)
        facts.update(zip(page, replies[::2], strict=True))
        erased.found["notes"] += sum(replies[1::2])
        calls = [_erase(keys, run, names[run], facts[run][2]) for run in page]
        for run, gone in zip(page, await run_scripts(server, calls), strict=True):
            if not gone:
                erased.open.append(run)
                told.pop(run, None)
            elif any(facts[run]):
                erased.runs.append(run)
        for reply in [key for found in told.values() for key in found]:
            erased.found["notes"] += await server.client.unlink(reply)
    erased.found["runs"] = len(erased.runs)
    for ref in sessions:
        erased.found["notes"] += await server.client.unlink(*await _notes_of_session(server, keys, ref))
    windows: dict[int, _Window] = {}
    for run in set(runs) - set(erased.open):
        window = windows.setdefault(names[run], _Window(set()))
        _widen(window, run, *facts[run][:2])
    _add_sessions(keys, windows, sessions)
    for partition, window in windows.items():
        await _clean_inputs(server, keys, partition, window.runs)
        await _recorded(server, keys.topic(partition, "records"), window.runs)
        for run in window.runs:
            erased.found["records"] += await drop_record(server, keys, run)
        for topic in TOPICS:
            async for stream, ids in _events(server, keys, partition, topic, window):
                erased.found["events"] += await server.client.xdel(stream, *ids)
    gone = set(runs) - set(erased.open)
    erased.found["webhooks"] = await _clean_webhooks(server, keys, gone, set(windows))
    ids = [letter.id async for letter in all_dead_letters(server, keys) if letter.entry.run in gone]
    erased.found["dead letters"] += await drop_dead_letter(server, keys, ids) if ids else 0
    return erased


async def remains(server: Server, keys: Keys, runs: Collection[str], sessions: Collection[str] = ()) -> Counter[str]:
    """Search the whole server for these runs, and the topic for these sessions: how much there is, by place. Raises
    redis-py's errors.
    """
    found = Counter[str]()
    await locate(server, keys, *runs)
    for page in _pages(runs):
        pipe = server.client.pipeline(transaction=False)
        for run in page:
            pipe.exists(keys.run(run), keys.log(run), keys.tape(run), keys.tree(run))
            pipe.exists(*_notes(keys, run))
            pipe.hexists(keys.record_entries, run)
        replies: list[int] = await pipe.execute()
        for place, counts in zip(("runs", "notes", "records"), (replies[n::3] for n in range(3)), strict=True):
            found[place] += sum(counts)
    for ref in sessions:
        found["notes"] += await server.client.exists(*await _notes_of_session(server, keys, ref))
    windows: dict[int, _Window] = {}
    for run in runs:
        windows.setdefault(keys.partition_of(run), _Window(set())).runs.add(run)
    _add_sessions(keys, windows, sessions)
    for partition, window in windows.items():
        for topic in TOPICS:
            async for _, ids in _events(server, keys, partition, topic, window):
                found["events"] += len(ids)
        for _, stream in _inputs(keys, partition):
            for _, fields in await server.client.xrange(stream):
                found["passed on"] += sum(name.decode(errors="replace") in window.runs for name in fields)
        stream = keys.topic(partition, "notices")
        found["webhooks"] += len([entry async for entry in _notices(server, stream, window.runs)])
    found["webhooks"] += len([each async for each in deliveries_of(server, keys, runs)])
    found["dead letters"] = sum([letter.entry.run in runs async for letter in all_dead_letters(server, keys)])
    return found


async def _clean_webhooks(server: Server, keys: Keys, runs: set[str], partitions: Iterable[int]) -> int:
    """Delete what receivers were still to be told of these runs; how much it was."""
    count = 0
    for partition in partitions:
        stream = keys.topic(partition, "notices")
        if ids := [entry_id async for entry_id in _notices(server, stream, runs)]:
            count += await server.client.xdel(stream, *ids)
    async for deliveries, delivery in deliveries_of(server, keys, runs):
        await deliveries.done(delivery)
        count += 1
    return count


async def _notices(server: Server, stream: str, runs: set[str]) -> AsyncIterator[bytes]:
    begin = "-"
    while page := await server.client.xrange(stream, begin, "+", count=PAGE):
        for entry_id, fields in page:
            if {name.decode(errors="replace") for name in fields} <= runs:
                yield entry_id
        begin = f"({page[-1][0].decode()}"


def _inputs(keys: Keys, partition: int) -> list[tuple[str, str]]:
    """Lease and input of each stage."""
    stages = (*STAGES, POLICY)
    return [(keys.lease(partition, name), keys.topic(partition, topic)) for name, topic in stages]


async def _clean_inputs(server: Server, keys: Keys, partition: int, runs: set[str]) -> None:
    """Trim exactly what the stages themselves trim only about, and delete what they have processed of these runs alone.

    An entry that open runs share stays until they have ended. What arrived last is waited for, for a while.
    """
    until = asyncio.get_running_loop().time() + PASSING_S
    for lease, stream in _inputs(keys, partition):
        newest = await server.client.xrevrange(stream, count=1)
        while True:
            offset, watermark = await server.client.hmget(lease, ["offset", "watermark"])
            read = not newest or (offset and id_key(offset.decode()) >= id_key(newest[0][0].decode()))
            if read or asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(PASSING_S / 100)
        if offset is None or watermark in {None, b"0-0"}:
            continue
        await server.client.xtrim(stream, minid=watermark, approximate=False)
        begin = "-"
        while page := await server.client.xrange(stream, begin, offset, count=PAGE):
            named = {entry_id: {name.decode(errors="replace") for name in fields} for entry_id, fields in page}
            still_open = await _open_among(server, keys, set[str]().union(*named.values()) - runs)
            ids = [entry_id for entry_id, names in named.items() if names & runs and not names & still_open]
            if ids:
                await server.client.xdel(stream, *ids)
            begin = f"({page[-1][0].decode()}"


async def _recorded(server: Server, stream: str, runs: set[str]) -> None:
    """Wait for a while until no recorder has any of these runs: it may have read one before it was deleted."""
    until = asyncio.get_running_loop().time() + PASSING_S
    while asyncio.get_running_loop().time() < until:
        for _, fields in await server.client.xrange(stream):
            if any(name.decode(errors="replace") in runs for name in fields):
                break
        else:
            return
        await asyncio.sleep(PASSING_S / 100)


async def _open_among(server: Server, keys: Keys, runs: Collection[str]) -> set[str]:
    """Those that have not ended."""
    pipe = server.client.pipeline(transaction=False)
    for run in runs:
        pipe.hget(keys.run(run), STATUS)
    states: list[bytes | None] = await pipe.execute() if runs else []
    return {run for run, status in zip(runs, states, strict=True) if status_of(status) in UNENDED}


async def topic_entries(
    server: Server, stream: str, begin: str = "-", end: str = "+"
) -> AsyncIterator[tuple[str, bytes]]:
    """The id and the data of each entry. Raises redis-py's errors."""
    while page := await server.client.xrange(stream, begin, end, count=PAGE):
        for entry_id, fields in page:
            yield entry_id.decode(), fields.get(DATA_FIELD.encode(), b"")
        begin = f"({page[-1][0].decode()}"


async def _events(
    server: Server, keys: Keys, partition: int, topic: SubscribedTopic, window: _Window
) -> AsyncIterator[tuple[str, list[str]]]:
    """The ids of the entries of these runs, in pages."""
    always = topic == "sessions" and window.sessions
    begin = "-" if window.since_ms is None or always else str(window.since_ms)
    end = "+" if window.until_ms is None or always else str(window.until_ms)
    stream = keys.topic(partition, topic)
    ids: list[str] = []
    async for entry_id, data in topic_entries(server, stream, begin, end):
        of = _of(data)
        of_session = always and of.type != "deleted" and session_ref(of.tenant, of.session or "") in window.sessions
        if of.run in window.runs or of_session:
            ids.append(entry_id)
        if len(ids) == PAGE:
            yield stream, ids
            ids = []
    if ids:
        yield stream, ids


def run_in(data: bytes) -> str:
    """The run of an event; empty if it names none."""
    return _of(data).run


def _of(data: bytes) -> _OfRun:
    try:
        return _of_run.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _OfRun()


def _add_sessions(keys: Keys, windows: dict[int, _Window], sessions: Collection[str]) -> None:
    for ref in sessions:  # one that is gone cannot be located
        for partition in keys.places(ref):
            windows.setdefault(partition, _Window(set())).sessions.add(ref)


def _widen(window: _Window, run: str, accepted: bytes | None, ended: bytes | None) -> None:
    first = not window.runs
    window.runs.add(run)
    if accepted is None or ended is None or not (first or window.since_ms is not None):
        window.since_ms = window.until_ms = None
        return
    since, until = int(accepted), int(ended) + LATER_MS
    window.since_ms = since if window.since_ms is None else min(window.since_ms, since)
    window.until_ms = until if window.until_ms is None else max(window.until_ms, until)


def _erase(keys: Keys, run: str, partition: int, tenant: bytes | None) -> Any:
    tenants = ["", tenant.decode()] if tenant else [""]
    indexes = [index(partition, name) for name in tenants for index in (keys.open_runs, keys.ended_runs)]
    return erase(keys.run(run), keys.log(run), keys.tape(run), keys.tree(run), indexes, run=run)


def _notes(keys: Keys, run: str) -> list[str]:
    return [keys.gateway_published(run), keys.gateway_deleted(run)]


async def _notes_of_session(server: Server, keys: Keys, ref: str) -> list[str | bytes]:
    """Who writes to it, and the answers in it that clients may come back to."""
    answers = keys.gateway_answers(ref)
    return [keys.gateway_writers(ref), answers, *await server.client.zrange(answers, 0, -1)]


async def _told_of_decisions(server: Server, keys: Keys, runs: Sequence[str]) -> dict[str, list[str]]:
    """For each run, the keys of what the senders of its decisions were told, which names who decided."""
    pipe = server.client.pipeline(transaction=False)
    for run in runs:
        pipe.hkeys(keys.run(run))
    names: list[list[bytes]] = await pipe.execute()
    fates = {run: of for run, each in zip(runs, names, strict=True) if (of := [n for n in each if n[:5] == b"fate:"])}
    pipe = server.client.pipeline(transaction=False)
    for run, fields in fates.items():
        pipe.hmget(keys.run(run), fields)
    replies: list[list[bytes | None]] = await pipe.execute() if fates else []
    return {
        run: [keys.decision(run, _fate.decode(fate).id) for fate in found if fate]
        for run, found in zip(fates, replies, strict=True)
    }


def _pages(runs: Iterable[str]) -> list[list[str]]:
    every = list(dict.fromkeys(runs))
    return [every[at : at + PAGE] for at in range(0, len(every), PAGE)]
