"""The request of a session's run: the history before its own messages, bounded as the configuration says.

A bound by summary: the oldest runs that do not fit are written as text into a request of its own, whose id follows from
what it summarises. So it is one run, however many fetchers ask for it. Its answer is kept as a piece of the history.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import STATUS, UNENDED, status_of
from tokenbus.bus.scripts.requests import publish
from tokenbus.bus.scripts.sessions import remember
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client.sessions.history import (
    MOST_BYTES,
    History,
    Page,
    Steers,
    Summary,
    history_before,
    messages_in_log,
    newest_pieces,
)
from tokenbus.core.request.bounds import tenant_of
from tokenbus.events.requests import Generate, HistoryBound, Message
from tokenbus.events.sessions import SessionRun
from tokenbus_services.pricing import estimated_input
from tokenbus_services.session_summary import summary_request, words

SUMMARY_S = 60.0
"""How long a run waits for the summary of its history; without one the oldest messages are left out."""
LOOK_S = 0.1
ROOM = 0.5
"""The part of the bound that is left to the newest runs when the others are summarised."""
MOST_REQUESTS = 100_000
"""No summary is asked for while more requests wait."""
_NOTE = "gateway"
"""Where the gateway notes in a run's metadata whose key pays. Its note of a run that answers a client has more fields,
so no client's protocol shows a summary as an answer.
"""
SUMMARISED = "What was said before, in summary:\n\n"


Keep = Callable[[Sequence[Message]], Awaitable[None]]


class InSession(msgspec.Struct, frozen=True):
    """A run's request in its session."""

    request: Generate
    steers: Steers
    notes: tuple[str, ...] = ()
    summary: Summarised | None = None
    """What should be summarised first."""


class Summarised(msgspec.Struct, frozen=True):
    """A beginning of the history, and the request that summarises it."""

    of: SessionRun
    runs: int
    edits: int
    request: Generate


class SessionHistory:
    """Reads histories for one fetcher."""

    def __init__(self, server: Server, keys: Keys, sleep: Callable[[float], Awaitable[None]], keep: Keep) -> None:
        """``keep`` keeps the blobs of messages for as long as a session."""
        self._server = server
        self._keys = keys
        self._sleep = sleep
        self._keep_blobs = keep

    async def newest(self, of: SessionRun) -> Page:
        """What `before` needs first; it may be read together with the run."""
        return await retry_until_available(
            self._server, lambda: newest_pieces(self._server, self._keys, of), what="history of a session"
        )

    async def before(self, request: Generate, of: SessionRun, bound: HistoryBound | None, newest: Page) -> InSession:
        """The request with the history of its session, what steers the run, and notes on what was left out."""
        tokens = bound.tokens if bound else None
        found = await self._read(request, of, tokens, newest)
        await self._keep_blobs(found.messages)
        own = found.own or request.messages
        whole = msgspec.structs.replace(request, messages=[*found.messages, *own])
        notes: tuple[str, ...] = ()
        if found.forgotten:
            kept = "`retention.session_runs` says how many a session keeps"
            notes = (f"messages of the session's oldest runs are gone (runs: {found.forgotten}): {kept}",)
        if found.whole:
            if found.summary:
                notes = (f"the session's messages before run {found.begins_at} are in a summary",)
            return InSession(whole, found.steers, notes)
        why = f"at most {tokens} tokens are sent, as the session's configuration says"
        if tokens is None:
            why = f"at most {MOST_BYTES >> 20} MiB of a history are sent"
        notes = (*notes, f"messages of the session's oldest runs were left out (runs: {found.left_out}): {why}")
        summary = await self._summary(request, of, bound) if bound and bound.how == "summary" else None
        return InSession(whole, found.steers, notes, summary)

    async def summarise(self, wanted: Summarised) -> None:
        """Wait until the summary is a piece of the history, if it comes in time."""
        server, run = self._server, wanted.request.id or ""
        clock, since_ms = server.clock, server.clock.now_ms()
        key = self._keys.run(run)
        data = msgspec.json.encode(wanted.request)
        call = publish(self._keys.requests, requests=[MOST_REQUESTS, data, tenant_of(wanted.request.metadata)])
        await retry_until_available(server, lambda: run_script(server, call), what="request for a summary")
        while clock.now_ms() - since_ms < SUMMARY_S * 1000:
            found = await retry_until_available(
                server, lambda: server.client.hget(key, STATUS), what="state of a summary"
            )
            status = status_of(found)
            if status == "completed":
                await self._keep(wanted, run)
                return
            if status not in (None, "awaited", *UNENDED):
                return
            await self._sleep(LOOK_S)

    async def _keep(self, wanted: Summarised, run: str) -> None:
        messages = await retry_until_available(
            self._server, lambda: messages_in_log(self._server, self._keys.log(run)), what="text of a summary"
        )
        text = "".join(words(messages)).strip()
        if not text:
            return
        piece = Summary(wanted.runs, wanted.edits, [Message(role="user", content=SUMMARISED + text)])
        of, at = wanted.of, self._keys.within(self._keys.partition_of(wanted.of.id))
        call = remember(
            at.session(of.ref),
            at.of_session(of.ref)[3],
            made=of.made,
            name="summary",
            messages=msgspec.json.encode(piece),
        )
        await retry_until_available(self._server, lambda: run_script(self._server, call), what="summary of a session")

    async def _read(self, request: Generate, of: SessionRun, tokens: int | None, newest: Page | None = None) -> History:
        def count(messages: Sequence[Message]) -> int:
            return estimated_input(msgspec.structs.replace(request, system=None, tools=[], messages=list(messages)))

        return await retry_until_available(
            self._server,
            lambda: history_before(self._server, self._keys, of, tokens=tokens, count=count, keep=True, newest=newest),
            what="history of a session",
        )

    async def _summary(self, request: Generate, of: SessionRun, bound: HistoryBound) -> Summarised:
        runs = (await self._read(request, of, round(bound.tokens * ROOM))).left_out
        old = await self._read(request, msgspec.structs.replace(of, number=runs), None)
        messages = old.messages[: len(old.messages) - old.added]
        what = f"{of.ref} {of.made} {runs} {old.edits} {old.begins_at} {bound}"
        metadata: dict[str, object] = {"summary_of": of.id}
        if tenant := tenant_of(request.metadata):
            metadata["tenant"] = tenant
        if key := _payer(request.metadata):
            metadata[_NOTE] = {"key": key}
        summarises = msgspec.structs.replace(
            summary_request(bound, request, messages),
            id=f"summary-{sha256(what.encode()).hexdigest()[:32]}",
            metadata=metadata,
        )
        return Summarised(of, runs, old.edits, summarises)


def _payer(metadata: dict[str, object] | None) -> str | None:
    """The id of the gateway's key that pays for a run, and so for its summary; the run's reservation holds both."""
    try:
        return msgspec.convert((metadata or {}).get(_NOTE) or {}, _Payer).key
    except msgspec.ValidationError:  # a publisher's own text
        return None


class _Payer(msgspec.Struct, frozen=True):
    key: str | None = None
