"""Routes of what runs wait for: an inbox of the viewer's tenant, what one run waits for, and the decision."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus import WaitInfo
from tokenbus.client.publishing import new_run_id
from tokenbus.core.request.parse import request_from
from tokenbus.events.requests import Answer, Approval, ToolResult
from tokenbus_services.console.access.hiding import wait_row
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import Desk, body_of, json
from tokenbus_services.gateway.problem import invalid

MOST = 500
"""Waits of an inbox: those that wait longest, sorted by their deadlines."""
_FIELDS = frozenset({"type", "decision", "reason", "arguments", "content", "is_error", "decision_id"})
_AS_JSON = ("arguments", "content")
"""Fields that a page sends as text, for its own numbers would lose digits."""


def routes(desk: Desk) -> list[BaseRoute]:
    """The routes."""
    parts = _WaitRoutes(desk)
    of_run = f"{PATH}/api/runs/{{run}}/waiting"
    return [
        Route(f"{PATH}/api/waiting", desk.view("see_runs", parts.all), methods=["GET"]),
        Route(f"{PATH}/api/waiting/count", desk.view("see_runs", parts.count), methods=["GET"]),
        Route(of_run, desk.view("see_runs", parts.of_run, links=True), methods=["GET"]),
        Route(f"{of_run}/{{wait}}", desk.action("decide", parts.decide), methods=["POST"]),
    ]


class _WaitRoutes:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._door = desk.gateway.runs.waits

    async def all(self, request: Request, viewer: Viewer) -> Response:
        """What runs of the viewer's tenant wait for, the oldest deadline first."""
        tenant = request.query_params.get("tenant") or None
        listed = self._door.listed(request.state.caller, tenant=tenant, newest_first=False, limit=MOST + 1, after=None)
        async with aclosing(listed):
            found = [info async for _, info in listed if info is not None]
        return self._shown(viewer, found[:MOST], more=len(found) > MOST)

    async def count(self, request: Request, viewer: Viewer) -> Response:
        """How many waits the inbox would have, without a bound."""
        return json({"count": await self._door.count(request.state.caller)})

    async def of_run(self, request: Request, viewer: Viewer) -> Response:
        """What one run waits for."""
        return self._shown(viewer, await self._door.of_run(await self._desk.run(request, viewer)), more=False)

    def _shown(self, viewer: Viewer, found: list[WaitInfo], *, more: bool) -> Response:
        content = viewer.may("see_content") or viewer.may("decide")
        rows = [wait_row(info, content=content) for info in sorted(found, key=lambda info: info.deadline_ms)]
        return json({"waiting": rows, "more": more, "now": self._desk.gateway.runs.server.clock.now_ms()})

    async def decide(self, request: Request, viewer: Viewer) -> Response:
        """Decide one wait, as the viewer. ``arguments`` and ``content`` are JSON as text; ``content`` is the result
        itself if the tool has no schema for it.
        """
        run, wait = await self._desk.run(request, viewer), request.path_params["wait"]
        body = await body_of(request)
        if unknown := body.keys() - _FIELDS:
            raise invalid(min(unknown), "unknown field")
        info = next((info for info in await self._door.of_run(run) if info.wait == wait), None)
        is_text = (
            info is not None and info.what == "tool_result" and (info.schema is None or bool(body.get("is_error")))
        )
        for name in _AS_JSON:
            if name in body and not (is_text and name == "content"):
                body[name] = _decoded(name, body[name])
        given: dict[str, Any] = {"decision_id": new_run_id(), **body, "run": run, "wait": wait}
        decision = request_from(given)
        if not isinstance(decision, Approval | Answer | ToolResult):
            raise invalid("type", "must be 'approval', 'answer' or 'tool_result'")
        fate = await self._door.decide(request.state.caller, "console", decision)
        # The door has entered it in the audit.
        self._desk.log("decide", viewer, run=run, wait=wait, decision=fate.decision)
        return json(fate)


def _decoded(name: str, text: object) -> object:
    try:
        return msgspec.json.decode(text if isinstance(text, str) else b"")
    except (msgspec.DecodeError, RecursionError) as e:
        raise invalid(name, f"must be JSON, as text: {e}") from None
