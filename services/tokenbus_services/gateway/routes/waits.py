"""Routes of what runs wait for, in the bus's own protocol; part of the surface `native`.

``GET /waiting``                   decisions, answers and results that runs of the caller's tenant wait for, what waits
                                   longest first: ``?limit= &after= &newest_first=true``, for operators ``?tenant=``
``GET /runs/{id}/waiting``         what one run waits for
``POST /runs/{id}/waiting/{wait}`` decide it: ``{"type": "approval", "decision": "allow" | "deny", "reason",
                                   "arguments"}``, ``{"type": "answer", "decision", "content"}`` or ``{"type":
                                   "tool_result", "content", "is_error"}``, each with ``by`` and ``decision_id``;
                                   ``Idempotency-Key`` is an id too. 200 with the decision, 409 if another one counts
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute

from tokenbus import WaitInfo
from tokenbus.client.publishing import new_run_id
from tokenbus.core.request.parse import request_from
from tokenbus.events.requests import WaitDecision
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.routes.routing import json_answer, surface_routes
from tokenbus_services.gateway.routes.run_list import ListPage, flag_in, limit_in, position_in
from tokenbus_services.gateway.surfaces.fields import json_body
from tokenbus_services.gateway.surfaces.native import NativeSurface

_LISTED = {"tenant", "limit", "after", "newest_first"}
_TYPES = [kind.__struct_config__.tag for kind in get_args(WaitDecision)]


class WaitPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a list."""

    waiting: list[WaitInfo]
    next: str | None = None
    """Value of ``after`` for the next page; None at the end. A page that is not full may have it too."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of what runs wait for."""
    waits = _WaitRoutes(gateway)
    served: list[tuple[str, Handler, str]] = [
        ("/waiting", waits.all, "GET"),
        ("/runs/{run}/waiting", waits.of_run, "GET"),
        ("/runs/{run}/waiting/{wait}", waits.decide, "POST"),
    ]
    return surface_routes(gateway, waits.surface, served)


class _WaitRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = NativeSurface()
        self._gateway = gateway
        self._door = gateway.runs.waits

    async def all(self, request: Request) -> Any:
        """What the caller may see."""
        caller = await self._gateway.caller(request, self.surface)
        once: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            if name in once or name not in _LISTED:
                known = f"no parameter of this list: {', '.join(sorted(_LISTED))}"
                raise invalid(name, "given more than once" if name in once else known)
            once[name] = value
        limit = limit_in(once.get("limit"))
        listed = self._door.listed(
            caller,
            tenant=once.get("tenant"),
            newest_first=flag_in("newest_first", once.get("newest_first", "false")),
            limit=limit,
            after=position_in(once.get("after")),
        )
        page = ListPage[WaitInfo](limit)
        async for info in page.of(listed):
            if caller.owns(info.tenant or ""):
                page.found.append(info)
        return json_answer(WaitPage(waiting=page.found, next=page.next))

    async def of_run(self, request: Request) -> Any:
        """What one run waits for."""
        caller = await self._gateway.caller(request, self.surface)
        run = await self._gateway.runs.owned(request.path_params["run"], caller)
        return json_answer(WaitPage(waiting=await self._door.of_run(run.id)))

    async def decide(self, request: Request) -> Any:
        """Decide one wait."""
        caller = await self._gateway.caller(request, self.surface)
        asked = await self._gateway.read(request)
        run = await self._gateway.runs.owned(request.path_params["run"], caller)
        body = json_body(asked.body)
        if body.get("type") not in _TYPES:
            raise invalid("type", f"must be one of {', '.join(map(repr, _TYPES))}")
        named = {"decision_id": asked.headers.get(idempotency.HEADER) or new_run_id(), **body}
        decision = request_from({**named, "run": run.id, "wait": request.path_params["wait"]})
        assert isinstance(decision, WaitDecision)
        return json_answer(await self._door.decide(caller, "http", decision))
