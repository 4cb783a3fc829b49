"""The gateway's app: its routes in front of the pages that every service has."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenbus import Client
from tokenbus.bus.server.server import Server
from tokenbus.errors import SettingsError
from tokenbus_services.gateway.callers import AccessControl, OpenAccess, has_keys
from tokenbus_services.gateway.cors import WithCors
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import AfterRouting, AsgiApp, WithRequestId
from tokenbus_services.gateway.keys.access import KeyAccess
from tokenbus_services.gateway.keys.create import keyed_parts
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.models import ModelTable, RoutedModel
from tokenbus_services.gateway.request_spans import RequestSpans
from tokenbus_services.gateway.routes.registry import routes_of
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.service import GatewayPart, GatewayService
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.runtime.app.service_app import make_app, make_broker, worker_name
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import GatewaySettings, Settings
from tokenbus_services.telemetry import open_tracer

PAGES = ("/health", "/ready", "/metrics", "/asyncapi", "/asyncapi.json")
"""Of every service; everything else is the gateway's."""
CONSOLE = "/console"


class WithPages:
    """The routes of the gateway, in addition to an app with the pages of every service and the lifespan."""

    def __init__(self, pages: AsgiApp, routes: AsgiApp) -> None:
        self.app = pages
        self._routes = routes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        is_page = scope["type"] == "lifespan" or scope.get("path") in PAGES
        await (self.app if is_page else self._routes)(scope, receive, send)


class WithConsole:
    """The console for its own paths, in addition to the routes of all surfaces."""

    def __init__(self, app: AsgiApp, console: AsgiApp) -> None:
        self.app = app
        self._console = console

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        path: str = scope.get("path", "")
        ours = scope["type"] == "http" and (path == CONSOLE or path.startswith(f"{CONSOLE}/"))
        await (self._console if ours else self.app)(scope, receive, send)


CreateConsole = Callable[[Settings, Gateway, KeyDirectory | None], tuple[AsgiApp, list[GatewayPart]]]
"""Makes the console's app, and what works beside it. The directory is None at a gateway without keys."""


def create(settings: Settings, *, create_console: CreateConsole | None = None) -> AsgiApp:
    """Create a gateway. Raises SettingsError if the settings have no table `[gateway]`."""
    table = settings.gateway
    if table is None:
        raise SettingsError("settings", "gateway", "the table is missing; an empty one is enough")
    assert settings.redis_url
    registry = CollectorRegistry()
    server = Server(settings.redis_url)
    bus = Client(settings.redis_url, prefix=settings.prefix, partitions=settings.partitions)
    models = model_table(settings, table)
    access, parts = make_access(settings, table, models, server, bus)
    tracer = open_tracer(settings, "gateway", registry)
    spans = RequestSpans(tracer, server.clock.now_ms) if tracer else None
    worker = worker_name()
    runs = GatewayRuns(table, bus=bus, server=server, keys=settings.keys, access=access, worker=worker, spans=spans)
    gateway = Gateway(settings, runs=runs, access=access, models=models, metrics=GatewayMetrics(registry), spans=spans)
    front = routes(gateway, console=f"{CONSOLE}/" if create_console else None)
    if create_console:
        console, more = create_console(settings, gateway, access.directory if isinstance(access, KeyAccess) else None)
        front, parts = WithRequestId(WithConsole(front, console)), [*parts, *more]
    service = GatewayService(
        settings, worker=worker, server=server, bus=bus, gateway=gateway, parts=parts, tracer=tracer
    )
    app = make_app(service, make_broker(settings, registry), registry, stuck_s=stuck_after_s(settings.redis_url))
    return WithPages(app, front)


def routes(gateway: Gateway, *, console: str | None = None) -> AsgiApp:
    """The app of all surfaces. ``console``: see `routes_of`."""
    handlers: Any = {HTTPException: _no_route, Exception: _defect}
    app: AsgiApp = AfterRouting(Starlette(routes=routes_of(gateway, console=console), exception_handlers=handlers))
    if gateway.settings.origins:
        app = WithCors(app, origins=gateway.settings.origins)
    return WithRequestId(app)


def model_table(settings: Settings, table: GatewaySettings) -> ModelTable:
    """The names of models that clients may use. Raises SettingsError for an alias to a provider that is not there."""
    for name, choices in table.aliases.items():
        for i, choice in enumerate(choices):
            if (provider := choice.partition("/")[0]) not in settings.providers:
                raise SettingsError("settings", f"gateway.aliases.{name}[{i}]", f"unknown provider {provider!r}")
    providers = {name: provider.api for name, provider in settings.providers.items()}
    return ModelTable(providers, aliases_of(table), table.models)


def aliases_of(table: GatewaySettings) -> dict[str, list[RoutedModel]]:
    """The aliases of the settings."""
    return {name: [_provider_model(choice) for choice in choices] for name, choices in table.aliases.items()}


def make_access(
    settings: Settings, table: GatewaySettings, models: ModelTable, server: Server, bus: Client
) -> tuple[AccessControl, list[GatewayPart]]:
    """Access control in front of all routes, and what works beside it. Raises SettingsError."""
    rules = rules_of(table, models)
    if not has_keys(settings):
        return OpenAccess(rules), []
    return keyed_parts(settings, server, bus, rules=rules, aliases=aliases_of(table), env=os.environ)


def rules_of(table: GatewaySettings, models: ModelTable) -> TranslationRules:
    """What the deployment allows every client."""
    return TranslationRules(
        models=models,
        drop_unsupported=frozenset(table.drop_unsupported),
        allow_extra=frozenset(table.allow_extra),
        tools=None if "*" in table.tools else frozenset(table.tools),
    )


def _provider_model(name: str) -> RoutedModel:
    provider, _, model = name.partition("/")
    return RoutedModel(provider=provider, model=model)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    why = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _problem(error.status_code, code, why, dict(error.headers or {}))


async def _defect(request: Request, error: Exception) -> Response:
    return _problem(500, "gateway_error", f"the gateway failed ({type(error).__name__})", {})


def _problem(status: int, code: str, message: str, headers: dict[str, str]) -> Response:
    """No surface is known here, so the error has the shape that most clients read, OpenAI's."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    headers = {"x-should-retry": "false", **headers}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
