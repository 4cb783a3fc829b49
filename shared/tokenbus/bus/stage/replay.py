"""Rebuild a partition's state from its checkpoints and the entries between watermark and offset.

A checkpoint or an entry that crashes its workers leaves no error behind. So after some unfinished replays the next ones
are careful: they note each step before it begins, so that the next owner knows at which step the worker died. At first
they note each page of entries. Within a page at which a worker died, they note each frame, and they leave out a frame
at which two workers died. Only the run of that frame loses its state. The same holds for checkpoints, all of which are
one page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Self

import msgspec
from redis.exceptions import RedisError, ResponseError

from tokenbus.bus import scripts
from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.leases import Lease
from tokenbus.bus.run_record import ATTEMPT, ENDED, SEQ, STATUS, TENANT, TURN, status_of
from tokenbus.bus.server.error_replies import is_final
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry, Unreadable
from tokenbus.bus.stage.logic import RunPosition
from tokenbus.bus.stage.partition import TRIES_FIELD, IsolatedTries, Partition
from tokenbus.bus.unreadable import may_be_an_entry, read_one_by_one

log = logging.getLogger(__name__)

REPLAY_PAGE = 200
PIECES_READ = 8
"""Pieces of a checkpoint per command: about 1 MB, so that no reply blocks the server for long."""
CAREFUL_REPLAYS = 2
"""After more unfinished replays in a row than this, the next ones are careful."""
MOST_DEATHS = 2
"""A step is left out after this many workers died at it. One more died at its page."""
CAREFUL_PAGE = 50
"""Entries per page. Each note costs a command; with pages a careful replay takes hardly longer than any other."""
STEPS_FIELD = "replaying"
"""The lease hash's field of `NotedSteps`."""
REASON = f"{MOST_DEATHS} workers died as they restored it"


class Replaced(Exception):
    """Another server answered than the one that gave the lease, or another worker has the partition."""


class NotedSteps(msgspec.Struct, frozen=True, array_like=True):
    """The notes of a careful replay."""

    page: str = ""
    """The last page that began."""
    step: str = ""
    """The last step of it that began, if its steps were noted."""
    tries: int = 0
    """How often that step began in unfinished replays."""
    left_out: dict[str, str] = {}
    """Steps to leave out, and their pages."""

    @classmethod
    def parse(cls, stored: bytes | None) -> Self:
        """From the lease hash; empty if there is nothing, or it is from an unknown version."""
        try:
            return msgspec.msgpack.decode(stored or b"", type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return cls()


class CarefulReplay:
    """Notes the steps of one owner's replay, which may start over while the server is unavailable."""

    def __init__(self, server: Server, lease_key: str, found: NotedSteps) -> None:
        """``found``: the notes of the last replay, which did not finish."""
        self._server = server
        self._lease_key = lease_key
        self._found = found
        self._left_out = dict(found.left_out)
        if found.tries >= MOST_DEATHS:
            self._left_out[found.step] = found.page
        self._page = ""

    async def begin_page(self, page: str) -> bool:
        """Note that the page begins. True: each of its steps must `begin` too. Raises redis-py's errors."""
        self._page = page
        if page == self._found.page or page in self._left_out.values():
            return True
        await self._note(NotedSteps(page, left_out=self._left_out))
        return False

    async def begin(self, step: str) -> bool:
        """Note that the step begins. False: it must be left out. Raises redis-py's errors."""
        if step in self._left_out:
            return False
        tries = self._found.tries + 1 if step == self._found.step else 1
        await self._note(NotedSteps(self._page, step, tries, self._left_out))
        return True

    async def _note(self, noted: NotedSteps) -> None:
        value = msgspec.msgpack.encode(noted)
        await run_script(self._server, scripts.note(self._lease_key, field=STEPS_FIELD, value=value))


async def rebuild(
    server: Server, keys: Keys, part: Partition, lease: Lease, careful: CarefulReplay | None = None
) -> None:
    """Bring a new partition to its last owner's state. If it raises (redis-py's errors), start over with a new one.

    ``careful``: notes each step, and knows those that must be left out. Raises Replaced: what a master says that was
    replaced is of events that are lost, and would number those to come.
    """
    client = server.client
    part.loads = await run_script(server, scripts.count(part.lease_key, field="loads"))
    part.isolated = IsolatedTries.parse(await client.hget(part.lease_key, TRIES_FIELD))
    checkpoints = await _answer(server, part, lambda pipe: pipe.hgetall(part.state_key))
    pieces: dict[str, dict[int, bytes]] = {}
    for run, numbers in part.pieces_of(checkpoints):
        pieces[run] = {}
        for at in range(0, len(numbers), PIECES_READ):
            group = numbers[at : at + PIECES_READ]
            try:
                key = keys.pieces(part.number, part.group, run)
                found = await _answer(server, part, lambda pipe, key=key, group=group: pipe.hmget(key, group))
            except ResponseError as e:
                if not is_final(e):
                    raise
                break  # without its pieces the run is unreadable
            pieces[run] |= {number: piece for number, piece in zip(group, found, strict=True) if piece is not None}
    if careful is None or not await careful.begin_page("checkpoints"):
        part.restore(checkpoints, pieces)
    else:
        for name, data in checkpoints.items():
            run = name.decode(errors="replace")
            if await careful.begin(f"checkpoint {run}"):
                part.restore({name: data}, pieces)
            else:
                part.give_up_input(run, lease.offset, REASON)
    while part.offset != lease.offset:
        count = CAREFUL_PAGE if careful else REPLAY_PAGE
        page, unreadable = await _page(server, part, lease.offset, count)
        if not page and not unreadable:
            # A fail-over may have lost them and the offset with them: the next renewal or commit finds that.
            if (await run_position(server, part)).offset == lease.offset:
                log.error("%s: entries that a replay needs are gone", part.lease_key)
            break
        if careful is None or not await careful.begin_page(f"after {part.offset}"):
            part.replay(page)
        else:
            await _replay_carefully(part, page, careful, lease.offset)
        if unreadable:
            log.error("%s: entry %s: %s", part.lease_key, unreadable.entry[0].decode(), unreadable.reason)
            part.skip_unreadable(unreadable)
        await asyncio.sleep(0)  # let other partitions run
    runs = part.finish_replay(lease.offset)
    for run, at in (await run_positions(server, keys, part, runs)).items():
        if at.seq:
            part.logic.recall(run, at.seq)


async def _replay_carefully(part: Partition, page: list[Entry], careful: CarefulReplay, last: str) -> None:
    """Replay frame by frame. A run whose frame is left out loses its state, and its other frames are not replayed."""
    for entry_id, fields in page:
        at, before = entry_id.decode(), part.offset
        for name, frame in fields.items():
            run = name.decode(errors="replace")
            if await careful.begin(f"{at} {run}"):
                part.offset = before
                part.replay([(entry_id, {name: frame})])
            else:
                part.give_up_input(run, last, REASON)
        part.offset = at


async def give_up_state(server: Server, part: Partition, lease: Lease, reason: str) -> None:
    """Bring a new partition to the committed offset without its last owner's state: the runs that may have been open
    there are lost. If it raises (redis-py's errors), start over with a new one.
    """
    part.loads = await run_script(server, scripts.count(part.lease_key, field="loads"))
    part.lose((name.decode(errors="replace") for name in await server.client.hkeys(part.state_key)), reason)
    while part.offset != lease.offset:
        page, unreadable = await _page(server, part, lease.offset, REPLAY_PAGE)
        if not page and not unreadable:
            break
        for entry_id, fields in page:
            part.skip(entry_id.decode(), fields, reason)
        if unreadable:
            part.skip(unreadable.entry[0].decode(), {**unreadable.entry[1], **unreadable.sizes}, reason)
        await asyncio.sleep(0)
    part.finish_replay(lease.offset)


async def _answers(server: Server, part: Partition, ask: Callable[[Any], object]) -> list[Any]:
    """The replies to what ``ask`` adds to a pipeline, errors among them. Raises redis-py's errors, and Replaced.

    The lease is read last, on the same connection: where it has the partition's token, all before is of its owner.
    """
    pipe = server.client.pipeline(transaction=False)
    ask(pipe)
    pipe.hget(part.lease_key, "token")
    *replies, token = await pipe.execute(raise_on_error=False)
    if isinstance(token, Exception):
        raise token
    if token != part.token.encode():
        raise Replaced(f"{part.lease_key} has the token {token!r}, and not {part.token}")
    return replies


async def _answer(server: Server, part: Partition, ask: Callable[[Any], object]) -> Any:
    """The one reply to what ``ask`` adds to a pipeline; otherwise as `_answers`."""
    [reply] = await _answers(server, part, ask)
    if isinstance(reply, Exception):
        raise reply
    return reply


async def _page(server: Server, part: Partition, last: str, count: int) -> tuple[list[Entry], Unreadable | None]:
    """The next entries of a replay, and the unreadable entry that follows them, if any."""
    try:
        begin = f"({part.offset}"
        return await _answer(server, part, lambda pipe: pipe.xrange(part.stream, begin, last, count=count)), None
    except (RedisError, OSError) as e:
        if not await may_be_an_entry(server, e):
            raise
    return await read_one_by_one(server, part.stream, after=part.offset, last=last, count=count)


async def learn_from_logs(server: Server, keys: Keys, part: Partition, runs: Iterable[str]) -> None:
    """Pass the events of these runs' logs to the logic if it implements `LearnsFromLog`. Skips unreadable logs."""
    if not part.logic.learns_from_log:
        return
    for run in runs:
        begin = "-"
        try:
            while page := await server.client.xrange(keys.log(run), begin, count=REPLAY_PAGE):
                for _, fields in page:
                    part.logic.learn(run, fields.get(DATA_FIELD.encode(), b""))
                begin = f"({page[-1][0].decode()}"
        except ResponseError as e:  # any other error restarts the whole rebuild
            if not is_final(e):
                raise
            log.warning("run %s: its log cannot be read, so its open blocks are not completed: %s", run, e)


async def run_positions(server: Server, keys: Keys, part: Partition, runs: Iterable[str]) -> dict[str, RunPosition]:
    """Positions of open runs of the partition from their hashes; omits runs without a valid hash. Raises redis-py's
    errors, and Replaced.

    An error that may pass is raised: a run without its position would repeat numbers that its log has.
    """
    runs = list(runs)
    if not runs:
        return {}

    def ask(pipe: Any) -> None:
        for run in runs:
            pipe.hmget(keys.run(run), [TURN, ATTEMPT, SEQ, STATUS, TENANT])

    found: dict[str, RunPosition] = {}
    for run, reply in zip(runs, await _answers(server, part, ask), strict=True):
        if isinstance(reply, ResponseError) and is_final(reply):
            log.error("run %s: its hash cannot be read: %s", run, reply)
            continue
        if isinstance(reply, Exception):
            raise reply
        try:
            if any(reply):
                turn, attempt, seq = (int(number or 0) for number in reply[:3])
                tenant = (reply[4] or b"").decode(errors="replace")
                found[run] = RunPosition(turn, attempt, seq, status_of(reply[3]) in ENDED, tenant)
        except ValueError:
            log.error("run %s: its hash does not look like a run's: %s", run, reply)
    return found


async def run_position(server: Server, part: Partition) -> Lease:
    """The server's current position as a lease. Raises redis-py's errors, and Replaced."""
    offset, watermark = await _answer(server, part, lambda pipe: pipe.hmget(part.lease_key, ["offset", "watermark"]))
    return Lease(part.number, part.token, offset.decode(), watermark.decode())
