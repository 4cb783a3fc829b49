"""Routes of the Messages API. Its clients add `/v1/messages` to their base URL, whether that ends in `/v1` or not."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.routes import anthropic_sessions
from tokenbus_services.gateway.routes.anthropic_sessions import HEADER
from tokenbus_services.gateway.routes.routing import HeaderRoute, answered
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface, model_answer, models_answer

PREFIX = "/anthropic"


def routes(gateway: Gateway) -> list[BaseRoute]:
    surface = AnthropicMessagesSurface()

    async def models(request: Request) -> Response:
        caller = await gateway.caller(request, surface)
        return answered(models_answer(caller.rules.models.names()))

    async def model(request: Request) -> Response:
        caller = await gateway.caller(request, surface)
        return answered(model_answer(caller.rules.models.resolve(request.path_params["name"]).name))

    list_models = gateway.guarded(surface.name, surface.refusal, models)
    show_model = gateway.guarded(surface.name, surface.refusal, model)
    return [
        *gateway.posted(surface),
        Route(f"{PREFIX}/v1/models", list_models, methods=["GET"]),
        Route(f"{PREFIX}/v1/models/{{name:path}}", show_model, methods=["GET"]),
        HeaderRoute("/v1/models", list_models, header=HEADER),
        HeaderRoute("/v1/models/{name:path}", show_model, header=HEADER),
        *anthropic_sessions.routes(gateway),
    ]
