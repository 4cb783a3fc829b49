"""`/v1/models`: the names that requests may give, in the shape of OpenAI's list.

Clients of Anthropic and Gemini ask the same path; the routes of their surfaces recognise them by a header, and come
first.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.models import ModelTable
from tokenbus_services.gateway.surfaces.errors import openai_refusal

CREATED = 1763769600
"""Models have no time of their own here; clients insist on one."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The list, and one model; clients send the slash of a name percent-encoded."""

    async def every(request: Request) -> Any:
        models = (await gateway.caller(request)).rules.models
        return JSONResponse({"object": "list", "data": [_openai(name, models) for name in models.names()]})

    async def one(request: Request) -> Any:
        models = (await gateway.caller(request)).rules.models
        name: str = request.path_params["id"]
        models.resolve(name)
        return JSONResponse(_openai(name, models))

    found: list[BaseRoute] = []
    for prefix in ("/v1", ""):
        found.append(Route(f"{prefix}/models", gateway.guarded("models", openai_refusal, every), methods=["GET"]))
        found.append(
            Route(f"{prefix}/models/{{id:path}}", gateway.guarded("models", openai_refusal, one), methods=["GET"])
        )
    return found


def _openai(name: str, models: ModelTable) -> dict[str, object]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": models.resolve(name).provider}
