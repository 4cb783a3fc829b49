"""Routes of sessions: a list of them, each as it goes on, and what may be said in one."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus import SessionCursor, SessionStep
from tokenbus.client.sessions.listing import list_sessions, session_filter
from tokenbus.core.request.parse import request_from
from tokenbus.events.requests import Append, Interrupt, SessionMessage, Withdraw
from tokenbus.events.sessions import SessionEvent
from tokenbus.events.topics import as_written
from tokenbus_services.console.access.hiding import hidden_of_session, session_row
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import SURFACE, Desk, body_of, json
from tokenbus_services.console.routes.runs import broken_line, event_lines
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.routes.native import live_stream
from tokenbus_services.gateway.routes.run_list import ListPage, age_in, position_in

PAGE = 50
NOBODY = "console"
"""Who says what is typed at a console without keys."""


def routes(desk: Desk) -> list[BaseRoute]:
    """The routes."""
    parts = _SessionRoutes(desk)
    one = f"{PATH}/api/sessions/{{session}}"
    return [
        Route(f"{PATH}/api/sessions", desk.view("see_runs", parts.all), methods=["GET"]),
        Route(one, desk.view("see_runs", parts.one), methods=["GET"]),
        Route(f"{one}/events", desk.view("see_runs", parts.events), methods=["GET"]),
        Route(f"{one}/events", desk.action("act", parts.append), methods=["POST"]),
    ]


class _SessionRoutes:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._door = desk.gateway.runs.sessions

    async def all(self, request: Request, viewer: Viewer) -> Response:
        """A page of the sessions that match. Words that may not be seen are not looked at either."""
        query, content = request.query_params, viewer.may("see_content")
        words = query.get("words", "").casefold().split()
        wanted = session_filter(
            tenant=(viewer.tenant if viewer.tenant is not None else query.get("tenant")) or None,
            metadata=_metadata(query.get("metadata", "")) if content else {},
            words=" ".join(words) if content else None,
            older_than=age_in(query.get("older_than") or None),
        )
        listed = list_sessions(
            self._desk.gateway.runs.deployment, wanted, after=position_in(query.get("after") or None)
        )
        page = ListPage[dict[str, Any]](PAGE)
        async for info in page.of(listed):
            if content or all(word in info.session.casefold() for word in words):
                page.found.append(session_row(info, content=content))
        return json({"sessions": page.found, "next": page.next, "now": self._desk.gateway.runs.server.clock.now_ms()})

    async def one(self, request: Request, viewer: Viewer) -> Response:
        """What the session is now, and what it began with."""
        name, caller, tenant = _named(request)
        content = viewer.may("see_content")
        info = await self._door.info(caller, name, tenant=tenant)
        began = await self._door.messages(caller, name, tenant=tenant, runs=False) if content else []
        return json({"session": session_row(info, content=content), "began_with": began})

    async def events(self, request: Request, viewer: Viewer) -> Any:
        """Events of the session and of its runs in their one order, each with its cursor as the id."""
        name, caller, tenant = _named(request)
        given = request.headers.get("last-event-id")
        try:
            after = None if given is None else SessionCursor.parse(given)
        except ValueError:
            raise invalid("last-event-id", "must be the id of an event of a session") from None
        content = viewer.may("see_content")
        await self._door.info(caller, name, tenant=tenant)  # a refusal is better than a stream that breaks
        if content and after is None:
            self._desk.log("read", viewer, session=name)
        steps = await self._door.follow(caller, name, after=after, live=True, tenant=tenant)
        return live_stream(
            self._desk.gateway.times,
            steps,
            lambda step: _lines(step, content=content),
            check=lambda: self._desk.viewer(request, "see_runs"),
            broken=broken_line,
        )

    async def append(self, request: Request, viewer: Viewer) -> Response:
        """Say something, interrupt the answer, or take back what waits; under the viewer's own name."""
        name, caller, tenant = _named(request)
        given = request_from({**(await body_of(request)), "type": "append", "session": name, "metadata": None})
        assert isinstance(given, Append)
        item = given.item
        if isinstance(item, SessionMessage):
            item = SessionMessage(content=item.content, when_busy=item.when_busy, participant=viewer.name or NOBODY)
        elif not isinstance(item, Interrupt | Withdraw):
            raise invalid("item.type", "the console appends messages, interrupts and withdrawals")
        receipt, _ = await self._door.append(caller, SURFACE, name, item, append=given.id, tenant=tenant)
        kind = f"session.{item.__struct_config__.tag}"
        facts = {"session": name, "append": receipt.append, "run": receipt.fate.run}
        if isinstance(item, SessionMessage):
            await self._desk.changed(kind, viewer, **facts)
        else:  # the door has entered it in the audit
            self._desk.log(kind, viewer, **facts)
        return json(receipt, 202 if receipt.fate.state == "appended" else 200)


def _named(request: Request) -> tuple[str, Any, str | None]:
    """Session, caller, and the tenant that an operator names; that of a viewer with a tenant is the viewer's."""
    return request.path_params["session"], request.state.caller, request.query_params.get("tenant", "")


def _metadata(text: str) -> dict[str, object]:
    """``name=value``, as in the list's field."""
    name, sign, value = text.partition("=")
    return {name.strip(): value.strip()} if sign and name.strip() else {}


def _lines(step: SessionStep, *, content: bool) -> bytes:
    event = step.event
    number = str(step.cursor)
    if not isinstance(event, SessionEvent):
        return event_lines(event, content=content, number=number)
    data = msgspec.json.encode(as_written(event) if content else hidden_of_session(event))
    return b"id: %s\nevent: session\ndata: %s\n\n" % (number.encode(), data)
