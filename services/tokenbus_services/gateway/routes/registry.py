"""The surfaces by name, and where their routes are made.

To add a surface, write it and list it here, beside `settings.gateway.SurfaceName`. One that is only posted to needs no
more than its `paths`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.gateway import Gateway, GuardedEndpoint
from tokenbus_services.gateway.http_request import Refuse, Scope
from tokenbus_services.gateway.routes import (
    ag_ui,
    ai_sdk_ui,
    anthropic_messages,
    durable_streams,
    forwarded,
    gemini,
    native,
    openai_responses,
    sessions,
    waits,
)
from tokenbus_services.gateway.routes import models as routes_models
from tokenbus_services.gateway.routes.routing import HeaderRoute
from tokenbus_services.gateway.surfaces.errors import openai_refusal
from tokenbus_services.gateway.surfaces.openai_chat import OpenAIChatSurface
from tokenbus_services.gateway.surfaces.openai_images import OpenAIImagesSurface
from tokenbus_services.settings import SurfaceName

GUIDE = "docs/guides/gateway.md"


class ServedApi(msgspec.Struct, frozen=True):
    """How a client finds one protocol."""

    api: str
    path: str
    """Where its requests go, below the gateway's address."""
    docs: str = GUIDE
    """Its page, in a checkout of tokenbus."""


SURFACES: Mapping[SurfaceName, ServedApi] = {
    "openai_chat": ServedApi("OpenAI Chat Completions", "/v1/chat/completions"),
    "openai_responses": ServedApi("OpenAI Responses", "/v1/responses", "docs/guides/gateway-responses.md"),
    "native": ServedApi("requests and events of tokenbus itself", "/runs"),
    "anthropic_messages": ServedApi("Anthropic Messages", "/anthropic/v1/messages", "docs/guides/gateway-anthropic.md"),
    "gemini": ServedApi("Gemini", "/gemini", "docs/guides/gateway-gemini.md"),
    "openai_images": ServedApi("OpenAI Images", "/v1/images/generations", "docs/guides/gateway-responses.md"),
    "ai_sdk_ui": ServedApi("useChat of the AI SDK", "/api/chat", "docs/guides/use-chat.md"),
    "ag_ui": ServedApi("AG-UI", "/agui", "docs/guides/ag-ui.md"),
    "durable_streams": ServedApi("Durable Streams", "/v1/stream", "docs/guides/durable-streams.md"),
}
"""In the order in which their routes are tried, one after the other: first those that most clients ask."""


class Forms:
    """In which surface's form a problem is written that no endpoint has answered."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_path: dict[str, Refuse] = {}
        """By the fixed beginning of a route's path."""
        self._by_header: dict[bytes, Refuse] = {}
        for route in routes:
            endpoint = getattr(route, "endpoint", None)
            if isinstance(route, Route) and isinstance(endpoint, GuardedEndpoint):
                if isinstance(route, HeaderRoute):
                    self._by_header[route.header] = endpoint.refusal
                else:
                    self._by_path.setdefault(route.path.partition("{")[0].rstrip("/"), endpoint.refusal)

    def of(self, scope: Scope) -> Refuse:
        endpoint = scope.get("endpoint")
        if isinstance(endpoint, GuardedEndpoint):
            return endpoint.refusal
        path: str = scope.get("path", "")
        parts = path.split("/")
        for n in range(len(parts), 1, -1):
            if found := self._by_path.get("/".join(parts[:n])):
                return found
        named = (self._by_header[name] for name, _ in scope["headers"] if name in self._by_header)
        return next(named, openai_refusal)


_ROUTES: Mapping[SurfaceName, Callable[[Gateway], list[BaseRoute]]] = {
    "openai_chat": lambda gateway: gateway.posted(OpenAIChatSurface()),
    "openai_responses": openai_responses.routes,
    "native": lambda gateway: [*native.routes(gateway), *sessions.routes(gateway), *waits.routes(gateway)],
    "anthropic_messages": anthropic_messages.routes,
    "gemini": gemini.routes,
    "openai_images": lambda gateway: gateway.posted(OpenAIImagesSurface()),
    "ai_sdk_ui": ai_sdk_ui.routes,
    "ag_ui": ag_ui.routes,
    "durable_streams": durable_streams.routes,
}


def routes_of(gateway: Gateway, *, console: str | None = None) -> list[BaseRoute]:
    """The routes of the surfaces that the settings turn on, what is forwarded, the list of models, and the index.

    ``console``: its path, if this gateway serves it.
    """
    found: list[BaseRoute] = []
    for name in SURFACES:
        if name in gateway.settings.surfaces:
            found += _ROUTES[name](gateway)
    return [*found, *forwarded.routes(gateway), *routes_models.routes(gateway), _index(gateway, console)]


def _index(gateway: Gateway, console: str | None) -> BaseRoute:
    """`GET /`: lists the APIs that the caller may use, with their paths and pages."""

    async def index(request: Request) -> Any:
        caller = await gateway.caller(request)
        served = [(name, api) for name, api in SURFACES.items() if name in gateway.settings.surfaces]
        apis = [api for name, api in served if caller.surfaces is None or name in caller.surfaces]
        pages = {"models": "/v1/models", **({} if console is None else {"console": console})}
        body = {"service": "tokenbus gateway", "apis": msgspec.to_builtins(apis), **pages, "docs": GUIDE}
        return JSONResponse(body, headers={"x-content-type-options": "nosniff"})

    return Route("/", gateway.guarded("index", openai_refusal, index), methods=["GET"])
