"""The gateway's app: its routes in front of the pages that every service has."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tokenbus import Client
from tokenbus.bus.server.server import Server
from tokenbus.client.client import read_archive
from tokenbus.errors import SettingsError, TokenbusError
from tokenbus_services.blobs.client import archive_of
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.gateway.callers import AccessControl, Caller, OpenAccess, has_keys
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import AfterRouting, AsgiApp, Edge, Refuse, Scope, headers_in, response_to
from tokenbus_services.gateway.keys.access import KeyAccess
from tokenbus_services.gateway.keys.admin import AdminServer
from tokenbus_services.gateway.keys.admission import KeyAdmission
from tokenbus_services.gateway.keys.directory import KeyDirectory, check_keys
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.gateway.metrics import GatewayMetrics
from tokenbus_services.gateway.models import ModelTable, aliases_of
from tokenbus_services.gateway.problem import Problem, Refusal, of_exception
from tokenbus_services.gateway.request_spans import RequestSpans
from tokenbus_services.gateway.routes.registry import Forms, routes_of
from tokenbus_services.gateway.runs import GatewayRuns
from tokenbus_services.gateway.service import GatewayPart, GatewayService
from tokenbus_services.gateway.surfaces.contract import TranslationRules
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.net.request_guard import PAGES, GuardRefusal, RequestGuard
from tokenbus_services.runtime.app.service_app import make_app, make_broker, worker_name
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import ClientTool, GatewaySettings, Settings
from tokenbus_services.telemetry import open_tracer

_HEADERS = frozenset(
    {
        *("accept", "authorization", "content-type", "idempotency-key", "last-event-id", "x-api-key", "x-goog-api-key"),
        *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "x-goog-api-client"),
        *("cache-control", "x-request-id", "user-agent", "if-none-match"),
    }
)
_PREFIXES = ("openai-", "x-stainless-", "x-tokenbus-", "x-goog-upload-")
_METHODS = "GET, POST, PATCH, DELETE, HEAD"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "request-id", "x-tokenbus-run", "retry-after", "retry-after-ms", "x-should-retry"),
        *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
        *("stream-next-offset", "stream-cursor", "stream-up-to-date", "stream-closed", "etag"),
        *("x-goog-upload-url", "x-goog-upload-status"),
    )
)
_VARY = (b"vary", b"Origin")


class WithCors:
    """Which web pages may call the gateway. Preflights need no key.

    Never allows credentials: keys travel in headers that the page sets itself.
    """

    def __init__(self, app: AsgiApp, *, origins: Collection[str]) -> None:
        self.app = app
        self._origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = dict[bytes, bytes](scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin", b"")
        if not origin:
            await self.app(scope, receive, send)
            return
        allowed = origin.decode("latin-1").lower() in self._origins
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            requested = headers.get(b"access-control-request-headers", b"").decode("latin-1")
            answer = [_VARY, *(_preflight(origin, requested) if allowed else ())]
            await send({"type": "http.response.start", "status": 204 if allowed else 403, "headers": answer})
            await send({"type": "http.response.body"})
            return

        async def with_origin(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED.encode())]
                message["headers"] = [*message.get("headers", ()), _VARY, *(more if allowed else ())]
            await send(message)

        await self.app(scope, receive, with_origin)


def _preflight(origin: bytes, requested: str) -> list[tuple[bytes, bytes]]:
    names = [name for each in requested.split(",") if _is_allowed(name := each.strip().lower())]
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", _METHODS.encode()),
        (b"access-control-allow-headers", ", ".join(names).encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]


def _is_allowed(header: str) -> bool:
    return header in _HEADERS or header.startswith(_PREFIXES)


METRICS = "/metrics"
CONSOLE = "/console"


class WithPages:
    """The routes of the gateway, in addition to an app with the pages of every service and the lifespan."""

    def __init__(self, pages: AsgiApp, routes: AsgiApp, access: AccessControl) -> None:
        self.app = pages
        self._routes = routes
        self._access = access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path")
        app = self.app if scope["type"] == "lifespan" or path in PAGES else self._routes
        if app is self.app and scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            problem = _no_route(405, f"{scope['method']} {path}: a page is only read", {"allow": "GET, HEAD"})
            app = response_to(problem, openai_refusal, scope)
        elif path == METRICS and scope["type"] == "http":
            try:
                check_metrics(await self._access.identify(headers_in(Request(scope))))
            except Refusal as e:
                app = response_to(e.problem, openai_refusal, scope)
            except TokenbusError as e:
                app = response_to(of_exception(e), openai_refusal, scope)
        await app(scope, receive, send)


def check_metrics(caller: Caller) -> None:
    """Raise Refusal (403) if the caller may not read metrics, which name the deployment's keys and models."""
    if not (caller.operator or caller.metrics):
        why = "metrics are for operators: `metrics = true` of a key opens them to it"
        raise Refusal(Problem(status=403, code="metrics_not_allowed", message=why, kind="auth"))


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
    make_archive = partial(archive_of, settings.blobs)
    read_archive(bus, make_archive)
    models = model_table(settings, table)
    access, parts = make_access(settings, table, models, server, bus)
    tracer = open_tracer(settings, "gateway", registry)
    spans = RequestSpans(tracer, server.clock.now_ms)
    worker = worker_name()
    runs = GatewayRuns(
        table,
        bus=bus,
        server=server,
        keys=settings.keys,
        access=access,
        worker=worker,
        spans=spans,
        make_archive=make_archive,
    )
    gateway = Gateway(settings, runs=runs, access=access, models=models, metrics=GatewayMetrics(registry), spans=spans)
    found = routes_of(gateway, console=f"{CONSOLE}/" if create_console else None)
    front = routes(gateway, found)
    if create_console:
        console, more = create_console(settings, gateway, access.directory if isinstance(access, KeyAccess) else None)
        front, parts = WithConsole(front, console), [*parts, *more]
    service = GatewayService(
        settings, worker=worker, server=server, bus=bus, gateway=gateway, parts=parts, tracer=tracer
    )
    app = make_app(service, make_broker(settings, registry), registry, stuck_s=stuck_after_s(settings.redis_url))
    form = Forms(found).of
    return Edge(_guarded(settings, WithPages(app, front, access), form), form=form)


def routes(gateway: Gateway, found: Sequence[BaseRoute]) -> AsgiApp:
    """The app of all surfaces."""
    form = Forms(found).of

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = f"{request.method} {request.url.path[:200]}: {error.detail}"
        problem = _no_route(error.status_code, why, dict(error.headers or {}))
        return response_to(problem, form(request.scope), request.scope)

    app: AsgiApp = AfterRouting(Starlette(routes=found, exception_handlers={HTTPException: no_route}))
    if gateway.settings.origins:
        app = WithCors(app, origins=gateway.settings.origins)
    return app


def _no_route(status: int, why: str, headers: dict[str, str]) -> Problem:
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    kind = "not_found" if status == 404 else "invalid_request"
    return Problem(status=status, code=code, message=why, kind=kind, headers=headers)


def _guarded(settings: Settings, app: AsgiApp, form: Callable[[Scope], Refuse]) -> AsgiApp:
    """Protect the app from pages of other sites: without keys everything, with keys the pages of every service.

    Nothing else of a gateway with keys works without a header that only the client itself can set.
    """
    assert settings.gateway
    keyed = has_keys(settings)

    def refused(scope: Scope, refusal: GuardRefusal) -> AsgiApp:
        problem = Problem(status=refusal.status, code=refusal.code, message=refusal.message, kind="auth")
        return response_to(problem, form(scope), scope)

    return RequestGuard(
        app,
        hosts=settings.host_names,
        within=PAGES if keyed else ("",),
        private=PAGES if keyed else ("",),
        origins=() if keyed else settings.gateway.origins,
        consumes=_consumes,
        refused=refused,
    )


def _consumes(scope: Scope) -> bool:
    """Whether a GET takes something away: a group's events go to one of its readers."""
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return scope["path"].startswith("/topics/") and "group" in query


def model_table(settings: Settings, table: GatewaySettings) -> ModelTable:
    """The names of models that clients may use. Raises SettingsError for an alias to a provider that is not there."""
    for name, choices in table.aliases.items():
        for i, choice in enumerate(choices):
            if (provider := choice.partition("/")[0]) not in settings.providers:
                raise SettingsError("settings", f"gateway.aliases.{name}[{i}]", f"unknown provider {provider!r}")
    providers = {name: provider.api for name, provider in settings.providers.items()}
    return ModelTable(providers, aliases_of(table), table.models)


def make_access(
    settings: Settings, table: GatewaySettings, models: ModelTable, server: Server, bus: Client
) -> tuple[AccessControl, list[GatewayPart]]:
    """Access control in front of all routes, and what works beside it. Raises SettingsError."""
    rules = rules_of(settings, table, models)
    if not has_keys(settings):
        return OpenAccess(rules), []
    return keyed_parts(settings, server, bus, rules=rules, env=os.environ)


def rules_of(settings: Settings, table: GatewaySettings, models: ModelTable) -> TranslationRules:
    """What the deployment allows every client."""
    return TranslationRules(
        models=models,
        drop_unsupported=frozenset(table.drop_unsupported),
        allow_extra=frozenset(table.allow_extra),
        tools=None if "*" in table.tools else frozenset(table.tools),
        client_tools=frozenset(name for name, tool in settings.tools.items() if isinstance(tool, ClientTool)),
    )


def keyed_parts(
    settings: Settings,
    server: Server,
    bus: Client,
    *,
    rules: TranslationRules,
    env: Mapping[str, str],
) -> tuple[KeyAccess, list[GatewayPart]]:
    """Access control, and what works beside it. Raises SettingsError for keys and an admin API that cannot work."""
    table = settings.gateway
    assert table
    check_keys(table.keys)
    admission = KeyAdmission.of(settings, server)
    access = KeyAccess(settings, server, admission=admission, rules=rules)
    counter = SpendCounter(
        server,
        bus,
        settings.keys,
        prices=admission.prices,
        apis={name: provider.api for name, provider in settings.providers.items()},
        rules_of=admission.directory.rules_of,
        keep_ms=admission.keep_ms,
    )
    parts: list[GatewayPart] = [counter]
    if table.admin:
        parts.append(AdminServer(settings, table.admin, server, KeyStore(server, settings.keys), env))
    return access, parts
