"""Routes of what is no run: the forwarded paths, token counts that the gateway estimates, and the rest of each API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.forward.bodies import JsonBody
from tokenbus_services.gateway.forward.call import CallFailed
from tokenbus_services.gateway.forward.form import is_form
from tokenbus_services.gateway.forward.forward import UPLOAD
from tokenbus_services.gateway.forward.table import BASES, NOT_THERE, TABLE, Family, ForwardedPath
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import Refuse
from tokenbus_services.gateway.models import RoutedModel
from tokenbus_services.gateway.problem import UNSUPPORTED, Problem, Refusal
from tokenbus_services.gateway.routes.gemini import check_key
from tokenbus_services.gateway.routes.openai_responses import ResponsesApi
from tokenbus_services.gateway.routes.routing import HeaderRoute
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.errors import anthropic_refusal, gemini_refusal, openai_refusal
from tokenbus_services.gateway.surfaces.fields import Fields, json_body
from tokenbus_services.gateway.surfaces.gemini import GeminiSurface
from tokenbus_services.pricing import estimated_input
from tokenbus_services.settings import SurfaceName

ESTIMATED = "x-tokenbus-estimated"
"""Header of an answer whose count is no provider's: what is estimated."""
REFUSALS: Mapping[Family, Refuse] = {
    "openai": openai_refusal,
    "anthropic": anthropic_refusal,
    "gemini": gemini_refusal,
}
SURFACE: Mapping[Family, SurfaceName] = {
    "openai": "openai_responses",
    "anthropic": "anthropic_messages",
    "gemini": "gemini",
}
"""Whose requests the token counts of a family are for."""
REST: Mapping[Family, tuple[str, ...]] = {
    "openai": ("/v1/responses", "/responses"),
    "anthropic": ("/anthropic", "/v1/messages", "/v1/v1"),
    "gemini": ("/gemini", "/v1beta", "/upload"),
}
"""Where every other path is of this family."""
_METHODS = ["GET", "POST", "PATCH", "DELETE"]
Translate = Callable[[Caller, GatewayRequest], Awaitable[Translated]]


def routes(gateway: Gateway) -> list[BaseRoute]:
    """All of them. They come after the routes of the surfaces."""
    found = [route for path in TABLE for route in _routes_of(gateway, path)]
    for family, prefixes in REST.items():
        refuse = gateway.guarded("rest", REFUSALS[family], _nothing(gateway))
        found += [Route(f"{prefix}/{{rest:path}}", refuse, methods=_METHODS) for prefix in prefixes]
    return found


def _routes_of(gateway: Gateway, path: ForwardedPath) -> list[BaseRoute]:
    handle = _forward(gateway, path)
    if path.kind == "token_counts":
        if (surface := SURFACE[path.family]) not in gateway.settings.surfaces:
            return []
        handle = _count(gateway, path, surface, _translators(gateway)[path.family])
    endpoint = gateway.guarded(path.kind, REFUSALS[path.family], handle)
    if path.header:
        return [HeaderRoute(route, endpoint, header=path.header, method=path.method) for route in paths_of(path)]
    return [Route(route, endpoint, methods=[path.method]) for route in paths_of(path)]


def paths_of(path: ForwardedPath) -> list[str]:
    """Where clients find it, as Starlette writes paths."""
    bases = (*BASES[path.family], *(("/v1",) if "{model}" in path.path else ()))
    return [path.below(base).replace("{model}", "{model:path}") for base in bases]


def _forward(gateway: Gateway, path: ForwardedPath) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        if path.family == "gemini":
            check_key(request)
        ticket = request.query_params.get(UPLOAD, "") if path.body == "content" else ""
        upload = await gateway.forwarder.owners.upload(ticket) if ticket else None
        caller = await gateway.caller(request, upload=upload)
        gateway.forwarder.check(path, caller, request.url.path)
        if path.body == "content":
            if upload is None:
                why = "there is no upload with this ticket: begin another"
                raise Refusal(Problem(status=404, code="not_found", message=why, kind="not_found", param=UPLOAD))
            return await gateway.forwarder.form(path, request, caller, gateway.bodies, upload)
        if path.body == "file" or (path.body == "form" and is_form(request.headers.get("content-type", ""))):
            return await gateway.forwarder.form(path, request, caller, gateway.bodies)
        body = None if path.body == "none" else JsonBody((await gateway.read(request)).body)
        return await gateway.forwarder.json(path, request, caller, body)

    return handle


def _nothing(gateway: Gateway) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        await gateway.caller(request)
        why = (
            f"{request.method} {request.url.path[:200]} is not served by this gateway, which has the requests for "
            "answers of this API, and of the others those of docs/guides/gateway.md"
        )
        raise Refusal(Problem(status=404, code="not_found", message=why, kind="not_found"))

    return handle


# --- token counts ---------------------------------------------------------------------------------------------------


def _count(
    gateway: Gateway, path: ForwardedPath, surface: SurfaceName, translate: Translate
) -> Callable[[Request], Awaitable[Any]]:
    """Ask the provider, if the deployment forwards this and the provider has it; else estimate."""

    async def handle(request: Request) -> Any:
        if path.family == "gemini":
            check_key(request)
        caller = await gateway.caller(request, name=surface)
        asked = await gateway.read(request)
        admitted: Mapping[str, str] | None = None
        if gateway.forwarder.forwards(path, caller):
            try:
                return await gateway.forwarder.json(path, request, caller, JsonBody(asked.body))
            except CallFailed as e:
                if e.status not in NOT_THERE:
                    raise
                admitted = {}
            except Refusal as e:
                if e.problem.code not in ("unsupported_provider", UNSUPPORTED):
                    raise
        translated = await translate(caller, asked)
        generate = translated.generate
        if admitted is None:
            model = RoutedModel(provider=generate.provider, model=generate.model)
            admitted = await gateway.forwarder.admit_estimate(caller, path.kind, model)
        count = estimated_input(generate)
        headers = {**admitted, ESTIMATED: "input_tokens", "x-content-type-options": "nosniff"}
        body = msgspec.json.encode(_COUNTED[path.family](count))
        return Response(body, headers=headers, media_type="application/json")

    return handle


_COUNTED: Mapping[Family, Callable[[int], object]] = {
    "openai": lambda n: {"object": "response.input_tokens", "input_tokens": n, "estimated": True},
    "anthropic": lambda n: {"input_tokens": n, "estimated": True},
    "gemini": lambda n: {"totalTokens": n},
}


def _translators(gateway: Gateway) -> Mapping[Family, Translate]:
    messages, gemini, responses = AnthropicMessagesSurface(), GeminiSurface(), ResponsesApi(gateway)

    async def of_anthropic(caller: Caller, asked: GatewayRequest) -> Translated:
        body = {"max_tokens": 1, **json_body(asked.body)}
        return messages.translate(msgspec.structs.replace(asked, body=msgspec.json.encode(body)), caller.rules)

    async def of_gemini(caller: Caller, asked: GatewayRequest) -> Translated:
        whole = Fields(json_body(asked.body))
        inner = whole.json("generateContentRequest") or json_body(asked.body)
        path = {"model": asked.path["model"], "method": "generateContent"}
        data = msgspec.json.encode({name: value for name, value in inner.items() if name != "model"})
        return gemini.translate(msgspec.structs.replace(asked, body=data, path=path), caller.rules)

    return {"anthropic": of_anthropic, "gemini": of_gemini, "openai": responses.translated}
