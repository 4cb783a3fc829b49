"""The console's ASGI app, in front of the gateway's other routes.

All paths are below `/console`. The pages are files of the package, the API is JSON and server-sent events. Every POST
needs the header `x-console-csrf` with the token of `GET /console/api/session`. A link's ticket travels as `?ticket=` or
in the header `x-console-ticket`.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from tokenbus_services.console.access.session import PATH, ConsoleSessions, Signer, StoredLogins, StoredSecret
from tokenbus_services.console.http import Desk, StaticFiles, WithSafeHeaders, refused
from tokenbus_services.console.routes import admin as routes_admin
from tokenbus_services.console.routes import runs as routes_runs
from tokenbus_services.console.routes import session as routes_session
from tokenbus_services.console.routes import sessions as routes_sessions
from tokenbus_services.console.routes import stream as routes_stream
from tokenbus_services.console.routes import times as routes_times
from tokenbus_services.console.routes import waits as routes_waits
from tokenbus_services.console.runs.run_view import Costs
from tokenbus_services.console.sampler import Sampler
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import AsgiApp, Scope
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.problem import Problem, Refusal, defect
from tokenbus_services.gateway.service import GatewayPart
from tokenbus_services.net.request_guard import GuardRefusal, RequestGuard
from tokenbus_services.runtime.deployment_snapshot import DeploymentReader
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import ConsoleSettings


def create(settings: Settings, gateway: Gateway, directory: KeyDirectory | None) -> tuple[AsgiApp, list[GatewayPart]]:
    """The console's app, and what works beside it. ``directory``: None at a gateway without keys."""
    table = settings.console or ConsoleSettings()
    signer = Signer(StoredSecret(gateway.runs.server, gateway.runs.keys))
    logins = StoredLogins(gateway.runs.server, gateway.runs.keys)
    desk = Desk(gateway, ConsoleSessions(table, signer, logins, directory))
    costs = Costs(settings)
    server, keys = gateway.runs.server, gateway.runs.keys
    deployment = DeploymentReader(server, keys, further=settings.further_queues, judged=bool(settings.policies))
    sampler = Sampler(server, keys, costs, deployment)
    handlers: Any = {HTTPException: _no_route, Exception: _defect}
    app = Starlette(
        routes=[
            *_pages(),
            *routes_session.routes(desk, table, settings.gateway.currency if settings.gateway else ""),
            *routes_runs.routes(desk, costs),
            *routes_times.routes(desk),
            *routes_sessions.routes(desk),
            *routes_waits.routes(desk),
            *routes_stream.routes(desk, sampler),
            *routes_admin.routes(desk, settings),
        ],
        exception_handlers=handlers,
    )
    # Cookies are for the console alone, so the pages that `gateway.origins` lists may not act here.
    guard = RequestGuard(app, hosts=settings.host_names, private=(PATH,), refused=_refused)
    return WithSafeHeaders(guard), [sampler]


def _pages() -> list[BaseRoute]:
    files = StaticFiles()

    async def bare(request: Request) -> Response:
        return RedirectResponse(f"{PATH}/", 308)

    async def index(request: Request) -> Response:
        return files.answer(request, "index.html")

    async def static(request: Request) -> Response:
        try:
            return files.answer(request, request.path_params["path"])
        except Refusal as e:
            return refused(e.problem)

    return [
        Route(PATH, bare, methods=["GET"]),
        Route(f"{PATH}/", index, methods=["GET"]),
        Route(f"{PATH}/static/{{path:path}}", static, methods=["GET"]),
    ]


def _refused(scope: Scope, refusal: GuardRefusal) -> AsgiApp:
    return refused(Problem(status=refusal.status, code=refusal.code, message=refusal.message, kind="auth"))


async def _no_route(request: Request, error: Exception) -> Any:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    problem = Problem(status=error.status_code, code=code, message=error.detail, kind="not_found")
    return refused(problem)


async def _defect(request: Request, error: Exception) -> Any:
    return refused(defect())
