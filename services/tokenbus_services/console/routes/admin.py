"""Routes for those who run the deployment: dead letters, keys and spend."""

from __future__ import annotations

import re
from datetime import date
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus.bus.dead_letters import (
    StoredDeadLetter,
    drop_dead_letter,
    find_dead_letter,
    give_back,
    newest_dead_letters,
)
from tokenbus.bus.server.server import translated
from tokenbus.errors import CannotRetry, DeadNotFound
from tokenbus_services.console.access.session import PATH, Viewer
from tokenbus_services.console.http import SURFACE, Desk, json
from tokenbus_services.gateway.budgets.spend import Spent, read_spend, today
from tokenbus_services.gateway.keys.directory import entry_of, summary
from tokenbus_services.gateway.keys.key import KeyEntry
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.settings import Settings

PAGE = 50
"""Dead letters with one answer."""
_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


def routes(desk: Desk, settings: Settings) -> list[BaseRoute]:
    parts = _AdminRoutes(desk, settings)
    return [
        Route(f"{PATH}/api/dead", desk.view("see_runs", parts.dead), methods=["GET"]),
        Route(f"{PATH}/api/dead/{{entry}}/retry", desk.action("admin", parts.retry), methods=["POST"]),
        Route(f"{PATH}/api/dead/{{entry}}/drop", desk.action("admin", parts.drop), methods=["POST"]),
        Route(f"{PATH}/api/keys", desk.view("admin", parts.keys), methods=["GET"]),
        Route(f"{PATH}/api/spend", desk.view("admin", parts.spend), methods=["GET"]),
    ]


class _AdminRoutes:
    def __init__(self, desk: Desk, settings: Settings) -> None:
        self._desk = desk
        self._runs = desk.gateway.runs
        self._server = desk.gateway.runs.server
        self._keys = desk.gateway.runs.keys
        self._store = KeyStore(self._server, self._keys)
        table = settings.gateway
        self._prices = len(table.prices) if table else 0
        self._fixed = [entry_of(name, key) for name, key in table.keys.items()] if table else []

    async def dead(self, request: Request, viewer: Viewer) -> Response:
        """The newest dead letters. They are of all tenants, so a tenant's viewer gets none."""
        if viewer.tenant is not None:
            return json({"entries": [], "next": None})
        after = request.query_params.get("after")
        if after is not None and not _ENTRY.fullmatch(after):
            raise invalid("after", "must be the id of an entry")
        with translated(self._server, self._keys.dead):
            newest = newest_dead_letters(self._server, self._keys, most=PAGE + 1, after=after)
            found = [dead async for dead in newest]
        entries = [_shown(dead, viewer) for dead in found[:PAGE]]
        return json({"entries": entries, "next": entries[-1]["id"] if len(found) > PAGE else None})

    async def retry(self, request: Request, viewer: Viewer) -> Response:
        dead = await self._found(request)
        try:
            if dead.entry.group:
                with translated(self._server, self._keys.dead):
                    made = {"group": await give_back(self._server, self._keys, dead)}
            else:
                run = await self._runs.retry_dead_letter(request.state.caller, SURFACE, dead)
                self._runs.leave(run)
                made = {"run": run.id}
        except CannotRetry as e:
            why = e.problem if viewer.may("see_content") else "this entry cannot be retried: drop it"
            raise Refusal(Problem(status=409, code=e.code, message=why, kind="invalid_request")) from None
        # After the publication: a crash in between repeats it under the same id, which is the same run.
        with translated(self._server, self._keys.dead):
            await drop_dead_letter(self._server, self._keys, [dead.id])
        await self._desk.changed("dead.retry", viewer, entry=dead.id, run=dead.entry.run, new_run=made.get("run"))
        return json(made, 202)

    async def drop(self, request: Request, viewer: Viewer) -> Response:
        dead = await self._found(request)
        with translated(self._server, self._keys.dead):
            await drop_dead_letter(self._server, self._keys, [dead.id])
        await self._desk.changed("dead.drop", viewer, entry=dead.id, run=dead.entry.run)
        return json({"dropped": dead.id})

    async def keys(self, request: Request, viewer: Viewer) -> Response:
        """All keys, without their hashes."""
        now = await self._store.now_ms()
        entries = [*self._fixed, *await self._store.all()]
        fixed = {entry.id for entry in self._fixed}
        return json({"keys": [_key(entry, now, "settings" if entry.id in fixed else "redis") for entry in entries]})

    async def spend(self, request: Request, viewer: Viewer) -> Response:
        """What each key spent in its budget's period."""
        now = await self._store.now_ms()
        entries = [*self._fixed, *await self._store.all()]
        found = await read_spend(self._server, self._keys, [entry.id for entry in entries])
        rows: list[dict[str, Any]] = []
        for entry, spent in zip(entries, found, strict=True):
            period = entry.rules.budget_duration
            used: Spent = spent.total if period is None else spent.since(_begin(period, today(now)))
            rows.append(
                {
                    "key": entry.id,
                    "tenant": entry.rules.tenant or entry.id,
                    "period": period or "in all",
                    "spent": used.cost,
                    "budget": entry.rules.max_budget,
                    "runs": used.runs,
                    "input": used.input,
                    "output": used.output,
                    "last_used": spent.last_used,
                }
            )
        return json({"spend": rows, "prices": self._prices})

    async def _found(self, request: Request) -> StoredDeadLetter:
        entry: str = request.path_params["entry"]
        if not _ENTRY.fullmatch(entry):
            raise invalid("entry", "must be the id of an entry")
        try:
            with translated(self._server, self._keys.dead):
                return await find_dead_letter(self._server, self._keys, entry)
        except DeadNotFound as e:
            raise Refusal(Problem(status=404, code=e.code, message="no such entry", kind="not_found")) from None


def _shown(dead: StoredDeadLetter, viewer: Viewer) -> dict[str, Any]:
    """An entry. Its bytes are a request or an event, and its reason may quote them."""
    facts: dict[str, Any] = msgspec.to_builtins(dead.entry)
    body: str = facts.pop("bytes")
    facts |= {"id": dead.id, "size": dead.entry.size or len(dead.entry.bytes), "bytes": None}
    if not viewer.may("see_content"):
        return {**facts, "reason": None, "hidden": len(dead.entry.reason)}
    return {**facts, "bytes": body if viewer.may("admin") else None}


def _key(entry: KeyEntry, now_ms: int, source: str) -> dict[str, Any]:
    shown = summary(entry, source=source, now_ms=now_ms)
    return {
        "id": shown.id,
        "name": shown.name,
        "tenant": entry.rules.tenant or entry.id,
        "console": list(entry.rules.console),
        "operator": entry.rules.operator,
        "state": shown.state,
        "blocked": entry.rules.blocked,
        "revoked": entry.revoked_ms is not None,
        "source": source,
        "created": shown.created,
        "expires": shown.expires,
    }


def _begin(period: str, day: date) -> date:
    """The first day of the calendar period that this day is in."""
    if period == "month":
        return day.replace(day=1)
    return date.fromordinal(day.toordinal() - day.weekday()) if period == "week" else day
