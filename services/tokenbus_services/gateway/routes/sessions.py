"""Routes of sessions, in the bus's own protocol; part of the surface `native`.

``POST /sessions/{id}/events``           append ``{"item": {"type": "message" | "configure" | "interrupt" | "withdraw",
                                         …}, "id", "metadata"}``: 202 if it waits, else 200, with its fate.
                                         ``Idempotency-Key`` is an id too
``GET /sessions/{id}/events``            the events of the session and of its runs, in one order: ``Last-Event-ID`` or
                                         ``?after=CURSOR`` go on after one; ``?live=false``: those that are stored
``GET /sessions/{id}/events/{append}``   the fate of an append
``GET /sessions``                        by their last event: ``?words= &metadata.NAME= &older_than= &limit= &after=``
``GET /sessions/{id}``                   one of them, with its configuration; ``/messages``: its history
``POST /sessions/{id}/fork``             ``{"session", "through", "id"}``: another session with this history
``DELETE /sessions/{id}``                204 once all of it is gone

Operators name the tenant with ``?tenant=``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import BaseRoute

from tokenbus import SessionCursor, SessionInfo
from tokenbus.client.sessions.listing import SessionFilter, list_sessions, session_filter
from tokenbus.core.request.parse import request_from
from tokenbus.events.requests import Append, Delete
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.http_request import headers_in, hold_bytes
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.routes.native import live_stream
from tokenbus_services.gateway.routes.routing import json_answer, surface_routes
from tokenbus_services.gateway.routes.run_list import ListPage, age_in, flag_in, limit_in, position_in
from tokenbus_services.gateway.surfaces.fields import Fields, json_body
from tokenbus_services.gateway.surfaces.native import NativeSurface, broken, lines_of

_METADATA = "metadata."
_LISTED = {"tenant", "words", "older_than", "limit", "after", "oldest_first"}


class SessionPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a list."""

    sessions: list[SessionInfo]
    next: str | None = None
    """Value of ``after`` for the next page; None at the end. A page that is not full may have it too."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of sessions."""
    sessions = _SessionRoutes(gateway)
    served: list[tuple[str, Handler, str]] = [
        ("/sessions", sessions.all, "GET"),
        ("/sessions/{session}", sessions.one, "GET"),
        ("/sessions/{session}", sessions.delete, "DELETE"),
        ("/sessions/{session}/messages", sessions.messages, "GET"),
        ("/sessions/{session}/events", sessions.events, "GET"),
        ("/sessions/{session}/events", sessions.append, "POST"),
        ("/sessions/{session}/events/{append}", sessions.fate, "GET"),
        ("/sessions/{session}/fork", sessions.fork, "POST"),
    ]
    return surface_routes(gateway, sessions.surface, served)


class _SessionRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = NativeSurface()
        self._gateway = gateway
        self._door = gateway.runs.sessions

    async def all(self, request: Request) -> Any:
        """The sessions that the caller may see."""
        caller = await self._gateway.caller(request, self.surface)
        once: dict[str, str] = {}
        metadata: dict[str, object] = {}
        for name, value in request.query_params.multi_items():
            if name in once or name[len(_METADATA) :] in metadata:
                raise invalid(name, "given more than once")
            if name.startswith(_METADATA):
                metadata[name[len(_METADATA) :]] = value
            elif name in _LISTED:
                once[name] = value
            else:
                raise invalid(name, f"no parameter of a list of sessions: {', '.join(sorted(_LISTED))}, metadata.NAME")
        limit = limit_in(once.get("limit"))
        wanted = _wanted(caller, once, metadata)
        listed = list_sessions(
            self._gateway.runs.deployment,
            wanted,
            after=position_in(once.get("after")),
            newest_first=not flag_in("oldest_first", once.get("oldest_first", "false")),
            limit=limit,
        )
        page = ListPage[SessionInfo](limit)
        async for info in page.of(listed):
            page.found.append(info)
        return json_answer(SessionPage(sessions=page.found, next=page.next))

    async def one(self, request: Request) -> Any:
        """One session."""
        name, caller, tenant = await self._named(request)
        info = await self._door.info(caller, name, tenant=tenant)
        config = await self._door.configuration(caller, name, tenant=tenant)
        return json_answer({**msgspec.to_builtins(info), "configuration": msgspec.to_builtins(config)})

    async def messages(self, request: Request) -> Any:
        """The history, which counts among the bytes that the key's requests hold until it is sent."""
        name, caller, tenant = await self._named(request)
        size = await self._door.history_bytes(caller, name, tenant=tenant)
        hold_bytes(request, size, self._gateway.bodies)
        return json_answer({"messages": await self._door.messages(caller, name, tenant=tenant)})

    async def events(self, request: Request) -> Any:
        """The one order, from the cursor on."""
        name, caller, tenant = await self._named(request)
        given = headers_in(request).get("last-event-id") or request.query_params.get("after")
        try:
            after = None if given is None else SessionCursor.parse(given)
        except ValueError:
            raise invalid("after", "must be the id of an event of a session") from None
        live = flag_in("live", request.query_params.get("live", "true"))
        steps = await self._door.follow(caller, name, after=after, live=live, tenant=tenant)
        return live_stream(
            self._gateway.times,
            steps,
            lambda step: lines_of(step.event, number=str(step.cursor)),
            check=lambda: self._gateway.caller(request, self.surface),
            broken=broken,
        )

    async def append(self, request: Request) -> Any:
        """Put something into the session."""
        name, caller, tenant = await self._named(request)
        asked = await self._gateway.read(request)
        body = json_body(asked.body)
        key = asked.headers.get(idempotency.HEADER)
        given = request_from({"id": key, **body, "type": "append", "session": name})
        assert isinstance(given, Append)
        if isinstance(given.item, Delete):
            raise invalid("item.type", "a session is deleted by DELETE /sessions/{id}")
        receipt, headers = await self._door.append(
            caller, self.surface.name, name, given.item, append=given.id, metadata=given.metadata, tenant=tenant
        )
        status = 202 if receipt.fate.state == "appended" else 200
        return json_answer(receipt, status=status, headers=headers)

    async def fate(self, request: Request) -> Any:
        """What became of an append."""
        name, caller, tenant = await self._named(request)
        append = request.path_params["append"]
        fate = await self._door.fate(caller, name, append, tenant=tenant)
        if fate is None:
            message = "no such append, or its fate is forgotten"
            raise Refusal(Problem(status=404, code="append_not_found", message=message, kind="not_found"))
        return json_answer({"append": append, "fate": fate})

    async def fork(self, request: Request) -> Any:
        """Begin another session with the history."""
        name, caller, tenant = await self._named(request)
        asked = await self._gateway.read(request)
        fields = Fields(json_body(asked.body))
        to, through, append = (
            fields.needed("session", fields.text("session")),
            fields.text("through"),
            fields.text("id"),
        )
        fields.end()
        surface = self.surface.name
        headers = await self._door.fork(caller, surface, name, to, through=through, append=append, tenant=tenant)
        return json_answer({"session": to}, status=201, headers={**headers, "location": f"/sessions/{to}"})

    async def delete(self, request: Request) -> Any:
        """Remove all of it."""
        name, caller, tenant = await self._named(request)
        await self._door.info(caller, name, tenant=tenant)
        await self._door.append(caller, self.surface.name, name, Delete(), tenant=tenant)
        return HttpResponse(status_code=204)

    async def _named(self, request: Request) -> tuple[str, Caller, str | None]:
        caller = await self._gateway.caller(request, self.surface)
        return request.path_params["session"], caller, request.query_params.get("tenant")


def _wanted(caller: Caller, once: Mapping[str, str], metadata: Mapping[str, object]) -> SessionFilter:
    tenant = once.get("tenant") if caller.operator else caller.tenant
    return session_filter(
        tenant=tenant or None, metadata=metadata, words=once.get("words"), older_than=age_in(once.get("older_than"))
    )
