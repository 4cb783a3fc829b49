"""Routes of the Gemini API: `models/MODEL:METHOD`, where MODEL may have slashes. Some clients leave out `models/`."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import unsupported
from tokenbus_services.gateway.routes.routing import HeaderRoute, answered
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
    surface, array = GeminiSurface(), GeminiArray()

    async def generate(request: Request) -> Any:
        check_key(request)
        caller = await gateway.caller(request, surface)
        model, method = request.path_params["model"].removeprefix("models/"), request.scope["path"].rpartition(":")[2]
        asked = await gateway.read(request)
        asked = msgspec.structs.replace(asked, path={"model": model, "method": method})
        as_array = method == _STREAM and request.query_params.get("alt") != "sse"
        return await gateway.run(caller, array if as_array else surface, asked)

    async def models(request: Request) -> Response:
        check_key(request)
        caller = await gateway.caller(request, surface)
        return answered(models_answer(caller.rules.models.names()))

    async def model(request: Request) -> Response:
        check_key(request)
        caller = await gateway.caller(request, surface)
        return answered(model_answer(caller.rules.models.resolve(request.path_params["name"]).name))

    answer = gateway.guarded(surface.name, surface.refusal, generate)
    list_models = gateway.guarded(surface.name, surface.refusal, models)
    show_model = gateway.guarded(surface.name, surface.refusal, model)
    bases = ("/gemini/v1beta", "/gemini/v1", "/v1beta")
    return [
        *(
            Route(f"{base}/{{model:path}}:{method}", answer, methods=["POST"])
            for base in (*bases, "/v1/models")
            for method in METHODS
        ),
        *(Route(f"{base}/models", list_models, methods=["GET"]) for base in bases),
        *(Route(f"{base}/models/{{name:path}}", show_model, methods=["GET"]) for base in bases),
        HeaderRoute("/v1/models", list_models, header=HEADER),
        HeaderRoute("/v1/models/{name:path}", show_model, header=HEADER),
    ]


def check_key(request: Request) -> None:
    """Raise Refusal for a key in the URL, before anything is looked up with it."""
    if "key" in request.query_params:
        raise unsupported("key", KEY_IN_URL)
