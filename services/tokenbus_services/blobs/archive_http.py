"""HTTP routes of the archive, as plain ASGI, beside those of blobs.

``POST /archive``                 store a log: a line with the run's `RunInfo`, then a line for each event: 201
``GET /archive/log?run=&after=``  the same lines: the summary, then the events after this seq
``DELETE /archive/log?run=``      delete it: an `ArchiveDeleted`
``GET /archive/runs``             an `ArchivePage`: of ``tenant``, from ``since_ms`` to ``until_ms``, by ``limit`` and
                                  ``after``; ``oldest_first``
``DELETE /archive/runs``          delete all that ended in this time, of ``tenant`` or of all
``GET /archive/names?blob_id=``   whether a log names this blob

Token, problems and bounds are those of blobs (`blobs/http.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from urllib.parse import parse_qsl

import msgspec
import structlog

from tokenbus.blob_wire import ARCHIVE_PATH, ArchiveDeleted, ArchiveNames, ArchivePage, BlobProblem
from tokenbus.bus.liveness import stop_task
from tokenbus.errors import BlobError, BlobNotFound, BlobRefused, BlobUnauthorized
from tokenbus.secret_env import Secret
from tokenbus_services.blobs.archive import MOST_LISTED, Archive, Wanted
from tokenbus_services.blobs.auth import admitted
from tokenbus_services.blobs.http import (
    BlobMetrics,
    ClientGone,
    Receive,
    Scope,
    Send,
    answer_problem,
    body_of,
    send_json,
    until_gone,
)

_METHODS = {"": {"POST"}, "log": {"GET", "DELETE"}, "runs": {"GET", "DELETE"}, "names": {"GET"}}
_PART_BYTES = 64 * 2**10

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class _Numbered(msgspec.Struct):
    seq: int


_numbered = msgspec.json.Decoder(_Numbered)


class ArchiveRoutes:
    """The ASGI app for ``/archive`` and everything below it."""

    def __init__(self, archive: Archive, *, token: str | Secret = "", metrics: BlobMetrics | None = None) -> None:
        self._archive = archive
        self._token = token
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, what = scope["method"], scope["path"].removeprefix(ARCHIVE_PATH).removeprefix("/")
        try:
            if not admitted(dict[bytes, bytes](scope["headers"]).get(b"authorization", b""), self._token):
                raise BlobUnauthorized(ARCHIVE_PATH)
            if what not in _METHODS:
                raise BlobNotFound(what)
            if method not in _METHODS[what]:
                problem = BlobProblem(code="method_not_allowed", message=f"{method} is not allowed for this path")
                allow = (b"allow", ", ".join(sorted(_METHODS[what])).encode())
                await send_json(send, HTTPStatus.METHOD_NOT_ALLOWED, problem, [allow])
                return
            await self._do(method, what, _Query(scope), receive, send)
        except ClientGone:
            log.info("archive_upload_cut")
        except BlobError as e:
            await answer_problem(send, e, self._metrics)

    async def _do(self, method: str, what: str, query: _Query, receive: Receive, send: Send) -> None:
        archive = self._archive
        if what == "":
            await send_json(send, HTTPStatus.CREATED, await archive.put(body_of(receive, None)))
        elif what == "names":
            named = await archive.names(query.text("blob_id") or "")
            await send_json(send, HTTPStatus.OK, ArchiveNames(named=named))
        elif what == "log" and method == "DELETE":
            logs, blobs = await archive.delete(query.text("run") or "")
            await send_json(send, HTTPStatus.OK, ArchiveDeleted(logs=logs, blobs=sorted(blobs)))
        elif what == "log":
            await self._log(query, receive, send)
        elif method == "DELETE":
            await send_json(send, HTTPStatus.OK, ArchiveDeleted(logs=await archive.delete_all(query.wanted())))
        else:
            limit = query.number("limit", MOST_LISTED) or MOST_LISTED
            found, position = await archive.list(query.wanted(), limit=min(limit, MOST_LISTED))
            after = f"{position[0]}-{position[1]}" if position else None
            await send_json(send, HTTPStatus.OK, ArchivePage(runs=found, next=after))

    async def _log(self, query: _Query, receive: Receive, send: Send) -> None:
        after = query.number("after", -1)
        info, pieces = await self._archive.open(query.text("run") or "")
        async with aclosing(pieces):
            head = [(b"content-type", b"application/x-ndjson"), (b"x-content-type-options", b"nosniff")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": msgspec.json.encode(info) + b"\n", "more_body": True})
            gone = asyncio.create_task(until_gone(receive), name="disconnect of a reader")
            try:
                async for part in _after(pieces, -1 if after is None else after):
                    if gone.done():  # what is sent now goes nowhere, and waits for nobody
                        return
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except BlobError as e:  # the head was sent: a body without its end is the answer
                log.error("archive_read_failed", run=info.run, code=e.code, problem=str(e))
                return
            finally:
                await stop_task(gone)
        await send({"type": "http.response.body"})


async def _after(pieces: AsyncGenerator[bytes], seq: int) -> AsyncGenerator[bytes]:
    """The whole lines of events after this seq. Holds one event more than a part."""
    pending = bytearray()
    async for piece in pieces:
        pending += piece
        end = pending.rfind(b"\n") + 1
        if not end:
            continue
        lines = bytes(pending[:end])
        del pending[:end]
        if seq >= 0:
            lines = b"".join(line for line in lines.splitlines(keepends=True) if _numbered.decode(line).seq > seq)
        for at in range(0, len(lines), _PART_BYTES):
            yield lines[at : at + _PART_BYTES]


class _Query:
    """The parameters of the URL. Raises BlobRefused for a value that is not one."""

    def __init__(self, scope: Scope) -> None:
        self._given = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))

    def text(self, name: str) -> str | None:
        return self._given.get(name)

    def number(self, name: str, default: int | None = None) -> int | None:
        given = self._given.get(name)
        if given is None or given == str(default):
            return default
        if not (given.isascii() and given.isdigit() and len(given) <= 16):
            raise BlobRefused(name, "must be a whole number")
        return int(given)

    def wanted(self) -> Wanted:
        ended, _, run = self._given.get("after", "").partition("-")
        if run and not (ended.isascii() and ended.isdigit() and len(ended) <= 16):
            raise BlobRefused("after", "must be `next` of an earlier answer")
        return Wanted(
            tenant=self.text("tenant"),
            since_ms=self.number("since_ms", 0) or 0,
            until_ms=self.number("until_ms"),
            after=(int(ended), run) if run else None,
            newest_first=self.text("oldest_first") != "true",
        )
