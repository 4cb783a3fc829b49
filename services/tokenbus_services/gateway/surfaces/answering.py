"""Request building shared by the Messages, Gemini, Responses and Images surfaces, and what encoders know. Pure."""

from __future__ import annotations

from typing import get_args

import msgspec

from tokenbus.events.public import RunEnd
from tokenbus.events.requests import Generate, OnFailure, Tool
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.request.build import deep_merged
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.models import ModelTable, ResolvedModel
from tokenbus_services.gateway.problem import unsupported
from tokenbus_services.gateway.surfaces.extension import Extension
from tokenbus_services.gateway.surfaces.fields import Json


class Echo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of `GatewayNote.echo` that encoders of several surfaces read."""

    api: ApiName
    """Of the provider that the request names."""
    apis: dict[str, ApiName] = {}
    """Of the providers that may answer in its place."""
    on_failure: OnFailure = "before_first_visible"
    bus_tools: bool = False
    """The bus runs the calls; the client does not see them."""

    def api_of(self, end: RunEnd) -> ApiName:
        """The API of the provider that answered."""
        return self.apis.get(end.provider or "", self.api)


def echo_of(model: ResolvedModel, models: ModelTable, asked: Extension) -> dict[str, object]:
    """The fields of `Echo` for a request."""
    apis = _fallback_apis(model, models)
    if apis:
        apis[model.provider] = model.api
    echo = Echo(
        api=model.api,
        apis=apis,
        on_failure=asked.on_failure or "before_first_visible",
        bus_tools=bool(asked.tools),
    )
    return msgspec.to_builtins(echo)


def options_of(model: ResolvedModel, models: ModelTable) -> frozenset[RequestOption]:
    """The optional request fields that every provider of the model has."""
    options = frozenset[RequestOption](get_args(RequestOption))
    for api in (model.api, *_fallback_apis(model, models).values()):
        provider = registry.get(api)
        if isinstance(provider, ProviderBase):  # of an API from another package the bus itself knows
            options &= provider.options
    return options


def _fallback_apis(model: ResolvedModel, models: ModelTable) -> dict[str, ApiName]:
    return {each.provider: models.resolve(f"{each.provider}/{each.model}").api for each in model.fallback}


def read_echo(echo: dict[str, object]) -> Echo:
    """Read what `echo_of` wrote. Unknown fields, of other surfaces, are ignored."""
    return msgspec.convert(echo, Echo)


def generate_of(model: ResolvedModel, asked: Extension, fields: Json, extra: Json, *, stream: bool) -> Generate:
    """Build the bus request. ``extra``: what the translator found for the provider's own body. Raises Refusal."""
    if stream and asked.on_failure == "restart":
        raise unsupported("tokenbus.on_failure", "'restart' takes back text, which this protocol cannot; do not stream")
    return Generate(
        provider=model.provider,
        model=model.model,
        fallback=None if asked.on_failure == "fail" else model.fallbacks,
        extra=deep_merged(extra, asked.extra or {}) or None,
        **fields,
        **asked.generate,
    )


def tool_fields(own: list[Tool], asked: Extension) -> Json:
    """Tools of the client, which runs the calls itself, or of the deployment. Raises Refusal."""
    if not asked.tools:
        if asked.max_tool_depth:
            raise unsupported("tokenbus.max_tool_depth", "this needs tools of the deployment: tokenbus.tools")
        return {"tools": own, "max_tool_depth": 0}
    if own:
        raise unsupported("tokenbus.tools", "a request names tools of the client or of the deployment, not both")
    depth = {} if asked.max_tool_depth is None else {"max_tool_depth": asked.max_tool_depth}
    return {"tools": asked.tools, **depth}
