"""Routes of the Responses API: create, look up, resume, cancel, delete, and the WebSocket on the same path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast
from uuid import UUID

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from tokenbus.client.decode import is_end
from tokenbus.errors import CursorTrimmed, RunNotFound
from tokenbus.events.public import PublicEvent, RunFailedEvent, Started
from tokenbus.events.requests import Message, is_run_id
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import headers_in
from tokenbus_services.gateway.problem import Problem, Refusal, invalid, of_run
from tokenbus_services.gateway.response_parts import Rest, answers_of, begun, decide, last_part, may_answer, of_part
from tokenbus_services.gateway.response_store import Published, ResponseStore
from tokenbus_services.gateway.routes import openai_conversations
from tokenbus_services.gateway.routes.openai_conversations import REFERENCE, continued, reference_in, stored
from tokenbus_services.gateway.routes.routing import awaited, rejoined
from tokenbus_services.gateway.routes.sockets.response_socket import ResponseSocket
from tokenbus_services.gateway.runs import GatewayRun, OwnedRun
from tokenbus_services.gateway.surfaces.contract import Answer, GatewayNote, GatewayRequest, Translated
from tokenbus_services.gateway.surfaces.fields import json_body
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface, starting_after
from tokenbus_services.gateway.surfaces.openai_responses.listing import items_of, listed
from tokenbus_services.gateway.surfaces.openai_responses.parts import response_id, run_and_part
from tokenbus_services.gateway.surfaces.openai_responses.response_log import ResponseSoFar
from tokenbus_services.gateway.surfaces.openai_responses.response_object import settings_of

PATHS = ("/v1/responses", "/responses")
CANCELLED = "cancelled by its client"
MAX_REFERENCES = 100
"""Responses whose items one request may name by their ids."""
CANCEL_WAIT_S = 5.0
"""How long a cancel waits for the run's end, to answer with it."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    api = ResponsesApi(gateway)
    found: list[BaseRoute] = []
    for path in PATHS:
        one = path + "/{id}"
        found += [
            Route(path, api.guarded(api.create), methods=["POST"]),
            Route(one, api.guarded(api.retrieve), methods=["GET"]),
            Route(one, api.guarded(api.delete), methods=["DELETE"]),
            Route(one + "/cancel", api.guarded(api.cancel), methods=["POST"]),
            Route(one + "/input_items", api.guarded(api.input_items), methods=["GET"]),
            WebSocketRoute(path, api.socket),
        ]
    return [*found, *openai_conversations.routes(gateway)]


class ResponsesApi:
    """The endpoints, on one gateway's parts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._surface = OpenAIResponsesSurface()
        self._store = ResponseStore(gateway.runs.server, gateway.runs.keys)

    def guarded(self, handle: Any) -> Any:
        """An endpoint whose problems have OpenAI's shape."""
        return self._gateway.guarded(self._surface.name, self._surface.refusal, handle)

    async def create(self, request: Request) -> Any:
        """Publish a request; answer with its stream, its end, or at once if it runs in the background."""
        caller = await self._gateway.caller(request, self._surface)
        asked = await self._gateway.read(request)
        runs = self._gateway.runs
        if may_answer(asked.body) and (rest := await decide(runs, caller, body := json_body(asked.body))):
            return await self._rest(caller, rest, body)
        translated = await self.translated(caller, asked)
        opened = await runs.publish(caller, self._surface, asked, translated)
        if not translated.background or translated.stream:
            until = partial(of_part, runs, opened.id, 0)
            return self._gateway.answer(opened, self._surface, asked, translated, until)
        try:
            return _answer(await self._begun(opened), opened.id, opened.headers)
        finally:
            runs.leave(opened)

    async def _rest(self, caller: Caller, rest: Rest, body: dict[str, Any]) -> Any:
        """Answer with the rest of a run that has waited for its client. It goes on without it."""
        run, part = rest.run, rest.part
        owned = await self._owned(caller, run)
        if body.get("background") is True and body.get("stream") is not True:
            await begun(self._gateway.runs, run, part, self._gateway.times.early_status_s)
            return _answer(await self._so_far(owned, part), run)
        surface, gateway, note = self._surface, self._gateway, owned.note
        events = of_part(gateway.runs, run, part, gateway.follow(surface, run, caller.key))
        if body.get("stream") is True:
            return rejoined(
                gateway,
                surface,
                run,
                lambda first: surface.encoder(None, note or foreign_note(run, first), run, part),
                events=events,
            )
        return awaited(
            gateway,
            surface,
            run,
            lambda first: surface.whole(note or foreign_note(run, first), run, part),
            events=events,
        )

    async def translated(self, caller: Caller, asked: GatewayRequest) -> Translated:
        """Translate a request. What its `conversation` has, or that of `previous_response_id`, goes before its input,
        and items take the place of references to them. Raises Refusal.
        """
        of = None
        if b'"conversation"' in asked.body:
            of = await continued(self._gateway.conversations, caller, body := json_body(asked.body))
            if of:
                asked = msgspec.structs.replace(asked, body=msgspec.json.encode({**body, "input": of[2]}))
        if REFERENCE.search(asked.body):
            asked = msgspec.structs.replace(asked, body=await self._with_items(caller, asked.body))
        if of:
            return self._in_conversation(caller, asked, of[0], of[1])
        translated = self._surface.translate(asked, caller.rules)
        settings: Any = translated.echo.get("response") or {}
        previous = settings.get("previous_response_id")
        if previous is None:
            return translated
        history = await self._history(caller, previous)
        generate = msgspec.structs.replace(translated.generate, messages=[*history, *translated.generate.messages])
        return msgspec.structs.replace(translated, generate=generate)

    def _in_conversation(
        self, caller: Caller, asked: GatewayRequest, name: str, before: Sequence[dict[str, Any]]
    ) -> Translated:
        """Translate a request that continues a conversation, which its run holds until it has ended."""
        body = json_body(asked.body)
        own = stored(body["input"], [item["id"] for item in before])
        body |= {"input": [*before, *own], "conversation": {"id": name}}
        whole = msgspec.structs.replace(asked, body=msgspec.json.encode(body))
        translated = self._surface.translate(whole, caller.rules)
        claim = partial(self._gateway.conversations.claim, caller.tenant, name, asked=own)
        return msgspec.structs.replace(translated, claim=claim)

    async def retrieve(self, request: Request) -> Any:
        """The response as it is now, or its stream from any point."""
        asked = GatewayRequest(body=b"", headers=headers_in(request), query=dict(request.query_params))
        caller = await self._gateway.caller(request, self._surface)
        after = starting_after(asked)
        name, part = _named_in(request)
        owned, is_known = await self._owned_or_published(caller, name)
        run, note = owned.id, owned.note
        if not is_stored(note):
            raise not_found(run)
        if asked.query.get("stream") != "true":
            return _answer(await self._so_far(owned, part, is_known), run)
        if part and part > last_part(await self._store.events_so_far(run)):
            raise not_found(run)
        if note and note.surface == self._surface.name and note.version != self._surface.version and after >= 0:
            why = "this response began under another version of the gateway: read it without 'starting_after'"
            raise Refusal(Problem(status=409, code="response_conflict", message=why, kind="invalid_request", run=run))
        return rejoined(
            self._gateway,
            self._surface,
            run,
            lambda first: self._surface.encoder(asked, note or foreign_note(run, first), run, part),
            events=of_part(self._gateway.runs, run, part, self._gateway.follow(self._surface, run, caller.key)),
        )

    async def cancel(self, request: Request) -> Response:
        """Cancel a response, background or not; answer with it as it is then. A second cancel changes nothing."""
        caller = await self._gateway.caller(request, self._surface)
        name, part = _named_in(request)
        owned = await self._owned(caller, name)
        run = owned.id
        await self._cancelled(run)
        await self._gateway.runs.changes.note(caller, self._surface.name, "cancel", run=run)
        return _answer(await self._so_far(owned, part), run)

    async def _cancelled(self, run: str) -> None:
        """Cancel a run and wait for its end, for a short time."""
        await self._gateway.runs.cancel(run, CANCELLED)
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S), aclosing(self._gateway.runs.follow(run)) as events:
                async for event in events:
                    if is_end(event):
                        break

    async def delete(self, request: Request) -> Response:
        """Delete a response: an open one is cancelled first. What its conversation took over stays there. The other
        parts of a run that waited go with it.
        """
        caller = await self._gateway.caller(request, self._surface)
        name, part = _named_in(request)
        owned = await self._owned(caller, name)
        run = owned.id
        if await self._store.is_open(run):
            await self._cancelled(run)
        match owned.note and owned.note.echo.get("conversation"):
            case {"id": str(name)}:
                with suppress(Refusal):  # it may be deleted by now
                    await self._gateway.conversations.get(caller.tenant, name)
            case _:
                pass
        deleted = await self._store.delete(run)
        if deleted is None:
            why = f"response {run} was cancelled and has not ended yet: delete it again"
            problem = Problem(status=409, code="response_not_ended", message=why, kind="invalid_request", run=run)
            raise Refusal(msgspec.structs.replace(problem, retry_after_s=1.0))
        await self._gateway.runs.archived.delete(deleted)
        await self._gateway.runs.changes.note(caller, self._surface.name, "erase", run=run)
        body = {"id": response_id(run, part), "object": "response", "deleted": True}
        return _answer(Answer(status=200, body=msgspec.json.encode(body)), run)

    async def input_items(self, request: Request) -> Response:
        caller = await self._gateway.caller(request, self._surface)
        name, part = _named_in(request)
        run = (await self._owned(caller, name, stored=True)).id
        messages = await self._store.messages(run)
        if messages is None:
            raise not_found(run)
        items = answers_of(run, part, await self._store.events_so_far(run)) if part else items_of(run, messages)
        page = listed(items, request.query_params)
        return _answer(Answer(status=200, body=msgspec.json.encode(page)), run)

    async def socket(self, websocket: Any) -> None:
        """Serve responses over a WebSocket."""
        await ResponseSocket(self._gateway, self._surface, self.translated, websocket).serve()

    # ----------------------------------------------------------------------------------------------------------

    async def _begun(self, opened: GatewayRun) -> Answer:
        """The response of a background request, once the bus has taken it in or after a short time."""
        so_far = ResponseSoFar(opened.note, opened.id)
        try:
            async with asyncio.timeout(self._gateway.times.early_status_s):
                async with aclosing(self._gateway.runs.follow(opened.id, new=not opened.joined)) as events:
                    first = await anext(events)
        except TimeoutError:
            published = Published(note=opened.note, tenant=opened.caller.tenant)
            await self._store.remember(opened.id, published)
            return so_far.answer()
        if isinstance(first, RunFailedEvent):
            raise Refusal(of_run(first.error, opened.id))
        return ResponseSoFar(opened.note_for(first), opened.id).answer()

    async def _so_far(self, owned: OwnedRun, part: int | None = 0, is_known: bool = True) -> Answer:
        """The response as the log has it now. ``part``: None for all parts of the run as one. Raises Refusal (404)."""
        run, note = owned.id, owned.note
        if note and not is_known:
            return ResponseSoFar(note, run).answer()
        events = await self._gateway.runs.stored(run)
        if events and events[0].seq != 0:
            raise not_found(run)
        if note is None and not events:
            raise not_found(run)
        if part and part > last_part(events):
            raise not_found(run)
        so_far = ResponseSoFar(note or foreign_note(run, events[0]), run, part)
        owner = note.key if note else None
        async with aclosing(self._gateway.media.filled(_each(events), owner)) as filled:
            async for event in filled:
                so_far.feed(event)
            so_far.settle()
            return so_far.answer()

    async def _owned_or_published(self, caller: Caller, run: str) -> tuple[OwnedRun, bool]:
        """As `_owned`, but also for a response that the bus has not taken in yet. The second value: whether it has."""
        try:
            return await self._owned(caller, run), True
        except Refusal:
            if await self._store.is_deleted(run):
                raise
            published = await self._store.published(run)
            if published is None or not caller.owns(published.tenant):
                raise
            return OwnedRun(run, published.note), False

    async def _owned(self, caller: Caller, run: str, *, stored: bool = False) -> OwnedRun:
        """A response that the caller may see. ``stored``: only one that may be read again. Raises Refusal (404)."""
        try:
            owned = await self._gateway.runs.owned(run, caller)
        except Refusal as e:
            raise (not_found(run) if e.problem.status == 404 else e) from None
        if (stored and not is_stored(owned.note)) or await self._store.is_deleted(owned.id):
            raise not_found(run)
        return owned

    async def _with_items(self, caller: Caller, data: bytes) -> bytes:
        """A request's body with the items that it names by their ids, as clients do whose responses are stored."""
        body = json_body(data)
        given = body.get("input")
        if not isinstance(given, list):
            return data
        items: list[Any] = cast("list[Any]", given)
        known: dict[str, Any] = {}
        places = {i: reference_in(item) for i, item in enumerate(items)}
        asked = 0
        for name in places.values():
            # Items of the provider's servers have ids of its own, and are found beside the others of their response.
            if name and name not in known:
                asked += 1
                if asked > MAX_REFERENCES:
                    raise invalid("input", f"may refer to items of at most {MAX_REFERENCES} responses")
                known |= await self._items_of(caller, name)
        for i, name in places.items():
            if name and name not in known:
                why = f"the item {name[:200]!r} was not found; send the item itself"
                problem = Problem(status=400, code="item_not_found", message=why, kind="invalid_request")
                raise Refusal(msgspec.structs.replace(problem, param=f"input[{i}].id"))
            items[i] = known[name] if name else items[i]
        return msgspec.json.encode(body)

    async def _items_of(self, caller: Caller, name: str) -> dict[str, Any]:
        """All items of the response that has this one, by their ids; empty if there is none."""
        run = name.partition("_")[2].rpartition("_")[0]
        try:
            owned = await self._owned(caller, run, stored=True)
        except Refusal as e:
            if e.problem.status != 404:
                raise
            return {}
        response: dict[str, Any] = msgspec.json.decode((await self._so_far(owned, None)).body)
        return {item["id"]: item for item in response["output"]}

    async def _history(self, caller: Caller, previous: str) -> list[Message]:
        """The conversation up to the end of a response. Raises Refusal."""
        run, _ = run_and_part(previous)
        try:
            run = (await self._owned(caller, run, stored=True)).id
            asked = await self._store.messages(run)
            if asked is None:
                raise not_found(run)
            if await self._store.is_open(run):
                why = f"response {previous[:200]!r} has not ended yet"
                raise _previous(why, "previous_response_not_ended")
            return [*asked, *await self._gateway.runs.messages(run, wait_s=self._gateway.times.early_status_s)]
        except (Refusal, RunNotFound, CursorTrimmed) as e:
            if isinstance(e, Refusal) and e.problem.status != 404:
                raise
            why = f"response {previous[:200]!r} was not found; send the whole conversation"
            raise _previous(why, "previous_response_not_found") from None


async def _each(events: Iterable[PublicEvent]) -> AsyncGenerator[PublicEvent]:
    for event in events:
        yield event


def is_stored(note: GatewayNote | None) -> bool:
    """Whether a response may be read again: not if its request said `store: false`."""
    return note is None or settings_of(note).response.get("store") is not False


def foreign_note(run: str, first: PublicEvent) -> GatewayNote:
    """A note for a run that another service published."""
    model = f"{first.provider}/{first.model}" if isinstance(first, Started) else ""
    return GatewayNote(surface="", version=0, created=_created(run), model=model)


def not_found(run: str) -> Refusal:
    """No such response, or not one of this caller."""
    why, known = "no such response", run if is_run_id(run) else None
    return Refusal(Problem(status=404, code="response_not_found", message=why, kind="not_found", run=known))


def _created(run: str) -> int:
    """The time in a run's id, if it is a UUIDv7; else 0."""
    try:
        parsed = UUID(run)
    except ValueError:
        return 0
    return (parsed.int >> 80) // 1000 if parsed.version == 7 else 0


def _previous(why: str, code: str) -> Refusal:
    problem = Problem(status=400, code=code, message=why, kind="invalid_request", param="previous_response_id")
    return Refusal(problem)


def _named_in(request: Request) -> tuple[str, int]:
    """The run of the response that a request names, and the part."""
    return run_and_part(str(request.path_params["id"]))


def _answer(answer: Answer, run: str, headers: Mapping[str, str] | None = None) -> Response:
    sent_headers = {"x-tokenbus-run": run, "x-content-type-options": "nosniff", **(headers or {}), **answer.headers}
    return Response(answer.body, answer.status, sent_headers, media_type=answer.media_type)
