"""The bus's own protocol over HTTP: requests and events as they are on the bus."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.core.request.parse import request_from
from tokenbus.errors import RequestInvalid
from tokenbus.events.public import TERMINAL, PublicEvent, RunFailedEvent
from tokenbus.events.requests import Generate
from tokenbus.events.topics import TopicEvent, as_written, type_of
from tokenbus.providers.request.build import extras_of_objects
from tokenbus_services.gateway.problem import (
    Problem,
    Refusal,
    extra_not_open,
    invalid,
    of_end,
    of_exception,
    tool_not_open,
)
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    Encoder,
    GatewayNote,
    GatewayRequest,
    Translated,
    TranslationRules,
    WholeAnswer,
    encode_line,
)
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import Surface

EVENT_STREAM = "text/event-stream"


class NativeSurface(Surface):
    """`POST /runs`, and a run's events as server-sent events whose ids are their seqs."""

    name = "native"
    keep_alive = b": \n\n"
    paths = ("/runs",)

    @staticmethod
    def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
        """The body is a request of the bus. It needs no ``provider`` if ``model`` is `PROVIDER/MODEL` or an alias."""
        generate = generate_from(body.value, rules)
        return Translated(
            generate=msgspec.structs.replace(generate, id=None),
            stream=EVENT_STREAM in asked.headers.get("accept", ""),
            model=str(body.value["model"]),
            run=generate.id,
            background=True,
            on_disconnect="continue",
        )

    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> NativeEncoder:
        return NativeEncoder()

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        return _Accepted(run)

    @staticmethod
    def refusal(problem: Problem) -> Answer:
        return Answer(status=problem.status, body=_error(problem))


class NativeEncoder(Encoder):
    """Every event as it is on the log, with its seq as the id. ``named``: its type is also the event's name."""

    def __init__(self, *, named: bool = True) -> None:
        self._over = False
        self._named = named

    def feed(self, event: PublicEvent) -> list[bytes]:
        if isinstance(event, TERMINAL):
            self._over = True
        return [lines_of(event, number=str(event.seq), named=self._named)]

    def broken(self, problem: Problem) -> list[bytes]:
        if self._over:
            return []
        self._over = True
        return [broken(problem) if self._named else b"data: " + _error(problem) + b"\n\n"]


def broken(problem: Problem) -> bytes:
    """The event that ends a stream which the gateway cannot continue."""
    return b"event: gateway_error\ndata: " + _error(problem) + b"\n\n"


def lines_of(event: TopicEvent, *, number: str | None, named: bool = True, path: Sequence[str] = ()) -> bytes:
    """One server-sent event with this id. ``path``: the runs above that of the event, and it."""
    fields = as_written(event)
    data = encode_line({**msgspec.to_builtins(fields), "path": path} if path else fields)
    of_number = b"id: " + number.encode() + b"\n" if number is not None else b""
    kind = b"event: " + type_of(event).encode() + b"\n" if named else b""
    return of_number + kind + b"data: " + data + b"\n\n"


class _Accepted(WholeAnswer):
    """The run's name, as soon as it is accepted."""

    def __init__(self, run: str) -> None:
        self._run = run

    def feed(self, event: PublicEvent) -> Answer | None:
        if isinstance(event, RunFailedEvent) and event.seq == 0:
            of = of_end(event)
            return Answer(status=of.status, body=_error(of))
        return accepted(self._run)


def accepted(run: str) -> Answer:
    body = {"run": run, "events": f"/runs/{run}/events"}
    return Answer(status=202, body=msgspec.json.encode(body), headers={"location": f"/runs/{run}"})


def generate_from(body: Json, rules: TranslationRules) -> Generate:
    """The request that a body is, with the provider and the model that it names. Raises Refusal."""
    name = body.get("model")
    if not isinstance(name, str):
        raise invalid("model", "must be a string" if "model" in body else "this field is required")
    provider = body.get("provider")
    resolved = rules.models.resolve(name if provider is None else f"{provider}/{name}")
    if "parent" in body:
        raise invalid("parent", "only a tool call of the bus begins a child run")
    given = {"type": "generate", **body, "provider": resolved.provider, "model": resolved.model}
    if resolved.fallback and "fallback" not in body:
        given["fallback"] = msgspec.to_builtins(resolved.fallback)
    try:
        request = request_from(given)
    except RequestInvalid as e:
        raise Refusal(of_exception(e)) from None
    if not isinstance(request, Generate):
        raise invalid("type", "must be 'generate'; a cancel is POST /runs/{id}/cancel")
    check_open(request, rules)
    return request


def check_open(request: Generate, rules: TranslationRules) -> None:
    """A key that may not use a tool, a model or a field must not reach it by this way either."""
    for i, tool in enumerate(request.tools):
        runs_on_the_bus = request.max_tool_depth > 0
        if runs_on_the_bus and rules.tools is not None and tool.name not in rules.tools:
            raise invalid(f"tools[{i}].name", f"{tool_not_open(tool.name)}; with max_tool_depth 0 no tool runs")
    extras = [
        ("extra", request.extra),
        *((f"fallback[{i}].extra", each.extra) for i, each in enumerate(request.fallback or ())),
    ]
    extras += (
        (f"{where}.{api[:100]}", fields)
        for where, by_api in extras_of_objects(request)
        for api, fields in by_api.items()
    )
    for where, extra in extras:
        for name in extra or {}:
            if name not in rules.allow_extra:
                raise extra_not_open(f"{where}.{name[:100]}")
    for each in request.fallback or ():
        rules.models.resolve(f"{each.provider}/{each.model}")


def _error(problem: Problem) -> bytes:
    error = {
        "code": problem.code,
        "class": problem.kind,
        "message": problem.message,
        "param": problem.param,
        "retryable": problem.should_retry,
        "run": problem.run,
    }
    return msgspec.json.encode({"error": {name: value for name, value in error.items() if value is not None}})


__all__ = ["NativeSurface"]
