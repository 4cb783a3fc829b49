"""Routes of the Gemini API: `models/MODEL:METHOD`, where MODEL may have slashes. Some clients leave out `models/`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import unsupported
from tokenbus_services.gateway.routes.routing import HeaderRoute, answered, not_served
from tokenbus_services.gateway.surfaces.gemini import (
    KEY_IN_URL,
    METHODS,
    GeminiArray,
    GeminiSurface,
    model_answer,
    models_answer,
)

HEADER = "x-goog-api-key"
"""Sent by every client of this API, and by no other."""
_STREAM = "streamGenerateContent"


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this surface."""
    surface, array = GeminiSurface(), GeminiArray()

    async def generate(request: Request) -> Any:
        _check_key(request)
        caller = await gateway.caller(request, surface)
        model, _, method = request.path_params["call"].removeprefix("models/").rpartition(":")
        if method not in METHODS or not model:
            raise not_served(request)
        asked = await gateway.read(request)
        asked = msgspec.structs.replace(asked, path={"model": model, "method": method})
        as_array = method == _STREAM and request.query_params.get("alt") != "sse"
        return await gateway.run(caller, array if as_array else surface, asked)

    async def models(request: Request) -> Response:
        _check_key(request)
        caller = await gateway.caller(request, surface)
        return answered(models_answer(caller.rules.models.names()))

    async def model(request: Request) -> Response:
        _check_key(request)
        caller = await gateway.caller(request, surface)
        return answered(model_answer(caller.rules.models.resolve(request.path_params["name"]).name))

    async def nothing(request: Request) -> Response:
        await gateway.caller(request, surface)
        raise not_served(request)

    answer = gateway.guarded(surface.name, surface.refusal, generate)
    list_models = gateway.guarded(surface.name, surface.refusal, models)
    show_model = gateway.guarded(surface.name, surface.refusal, model)
    refuse = gateway.guarded(surface.name, surface.refusal, nothing)
    bases = ("/gemini/v1beta", "/gemini/v1", "/v1beta")
    return [
        *(Route(f"{base}/{{call:path}}", answer, methods=["POST"]) for base in bases),
        Route("/v1/models/{call:path}", answer, methods=["POST"]),
        *(Route(f"{base}/models", list_models, methods=["GET"]) for base in bases),
        *(Route(f"{base}/models/{{name:path}}", show_model, methods=["GET"]) for base in bases),
        HeaderRoute("/v1/models", list_models, header=HEADER),
        HeaderRoute("/v1/models/{name:path}", show_model, header=HEADER),
        Route("/gemini/{rest:path}", refuse, methods=["GET", "POST", "DELETE"]),
        Route("/v1beta/{rest:path}", refuse, methods=["GET", "DELETE"]),
    ]


def _check_key(request: Request) -> None:
    """Raise Refusal for a key in the URL, before anything is looked up with it."""
    if "key" in request.query_params:
        raise unsupported("key", KEY_IN_URL)
