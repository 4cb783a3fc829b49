"""Routes of OpenAI's conversations: lists of items that requests of the Responses API continue by name."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.conversation_store import Conversation, ConversationStore, Json
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.routes.routing import json_answer, surface_routes
from tokenbus_services.gateway.surfaces.fields import Fields, json_body
from tokenbus_services.gateway.surfaces.openai_responses import OpenAIResponsesSurface
from tokenbus_services.gateway.surfaces.openai_responses.input_items import messages_of
from tokenbus_services.gateway.surfaces.openai_responses.listing import listed

PATHS = ("/v1/conversations", "/conversations")
MOST_GIVEN = 20
"""Items that one request may add, as at OpenAI."""
MOST_METADATA, MOST_NAME, MOST_VALUE = 16, 64, 512
REFERENCE = re.compile(rb'"item_reference"|\{\s*"id"\s*:\s*"[^"]*"\s*\}')
"""In a body that may name items by their ids."""
PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of conversations."""
    api = _Conversations(gateway)
    served = (
        ("", api.create, "POST"),
        ("/{id}", api.retrieve, "GET"),
        ("/{id}", api.update, "POST"),
        ("/{id}", api.delete, "DELETE"),
        ("/{id}/items", api.items, "GET"),
        ("/{id}/items", api.add, "POST"),
        ("/{id}/items/{item}", api.item, "GET"),
        ("/{id}/items/{item}", api.remove, "DELETE"),
    )
    at_paths = [(path + end, handle, method) for path in PATHS for end, handle, method in served]
    return surface_routes(gateway, api.surface, at_paths)


async def continued(store: ConversationStore, caller: Caller, body: Json) -> tuple[str, list[Json], list[Json]] | None:
    """The conversation that a request continues: its name, its items, and the request's own items without those that
    refer to the former; None if it continues none. Raises Refusal.
    """
    given = body.get("conversation")
    name = cast("Json", given).get("id") if isinstance(given, dict) else given
    if given is None:
        return None
    if not isinstance(name, str):
        raise invalid("conversation", "must be the id of a conversation, or an object with it")
    if body.get("previous_response_id") is not None:
        raise invalid("conversation", "excludes 'previous_response_id'")
    conversation = await store.get(caller.tenant, name)
    asked = body.get("input")
    if isinstance(asked, str):
        asked = [{"type": "message", "role": "user", "content": asked}]
    there = {item["id"] for item in conversation.items}
    own = [item for item in _objects("input", asked) if reference_in(item) not in there]
    return name, conversation.items, own


def reference_in(item: object) -> str | None:
    """The id in an `item_reference`, which needs no type; None for any other item."""
    given = cast("Json", item) if isinstance(item, dict) else {}
    if given.get("type") == "item_reference" or given.keys() == {"id"}:
        return name if isinstance(name := given.get("id"), str) else None
    return None


def stored(items: Sequence[Json], there: Collection[str] = ()) -> list[Json]:
    """Items as a conversation keeps them: each with an id, and text as a list of parts."""
    kept: list[Json] = []
    known = set(there)
    for given in items:
        item: Json = dict(given)
        kind = item.setdefault("type", "message")
        if isinstance(item.get("content"), str) and kind == "message":
            part = Json(type="input_text")
            if item.get("role") == "assistant":
                part = Json(type="output_text", annotations=[], logprobs=[])
            item["content"] = [{**part, "text": item["content"]}]
        if kind in ("message", *PREFIXES):
            item.setdefault("status", "completed")
        name = item.get("id")
        if not isinstance(name, str) or name in known:
            name = f"{PREFIXES.get(kind, 'msg')}_{secrets.token_hex(16)}"
        known.add(name)
        kept.append({**item, "id": name})
    return kept


class _Conversations:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = OpenAIResponsesSurface()
        self._gateway = gateway
        self._store = gateway.conversations

    async def create(self, request: Request) -> Response:
        """A new conversation, with items perhaps."""
        caller, fields = await self._posted(request)
        conversation = Conversation(
            id=f"conv_{secrets.token_hex(24)}",
            created=int(time.time()),
            metadata=_metadata(fields) or {},
            items=_given(fields),
        )
        fields.end()
        await self._store.create(caller.tenant, conversation)
        return json_answer(conversation.shown())

    async def retrieve(self, request: Request) -> Response:
        """The conversation, without its items."""
        caller, name = await self._named(request)
        return json_answer((await self._store.get(caller.tenant, name)).shown())

    async def update(self, request: Request) -> Response:
        """Other metadata."""
        caller, fields = await self._posted(request)
        metadata = _metadata(fields)
        if metadata is None:
            raise invalid("metadata", "this field is required")
        fields.end()
        name = request.path_params["id"]
        changed = await self._store.change(
            caller.tenant, name, lambda found: msgspec.structs.replace(found, metadata=metadata)
        )
        await self._gateway.runs.changes.note(caller, self.surface.name, "conversation.change", conversation=name)
        return json_answer(changed.shown())

    async def delete(self, request: Request) -> Response:
        """Remove it with its items. Responses stay."""
        caller, name = await self._named(request)
        await self._store.delete(caller.tenant, name)
        await self._gateway.runs.changes.note(caller, self.surface.name, "conversation.delete", conversation=name)
        return json_answer({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request) -> Response:
        """A page of its items."""
        caller, name = await self._named(request)
        conversation = await self._store.get(caller.tenant, name)
        return json_answer(listed(conversation.items, request.query_params))

    async def add(self, request: Request) -> Response:
        """Items at its end."""
        caller, fields = await self._posted(request)
        given = _given(fields)
        if not given:
            raise invalid("items", "must have at least one item")
        fields.end()
        name = request.path_params["id"]
        added: list[Json] = []

        def more(found: Conversation) -> Conversation:
            added[:] = stored(given, [item["id"] for item in found.items])
            return msgspec.structs.replace(found, items=[*found.items, *added])

        await self._store.change(caller.tenant, name, more)
        return json_answer(listed(added, {"order": "asc", "limit": str(MOST_GIVEN)}))

    async def item(self, request: Request) -> Response:
        """One item."""
        caller, name = await self._named(request)
        conversation = await self._store.get(caller.tenant, name)
        wanted = request.path_params["item"]
        for item in conversation.items:
            if item["id"] == wanted:
                return json_answer(item)
        raise _no_item(wanted)

    async def remove(self, request: Request) -> Response:
        """The conversation without one item."""
        caller, name = await self._named(request)
        wanted = request.path_params["item"]

        def without(found: Conversation) -> Conversation:
            left = [item for item in found.items if item["id"] != wanted]
            if len(left) == len(found.items):
                raise _no_item(wanted)
            return msgspec.structs.replace(found, items=left)

        shown = (await self._store.change(caller.tenant, name, without)).shown()
        facts = {"conversation": name, "item": wanted}
        await self._gateway.runs.changes.note(caller, self.surface.name, "conversation.delete_item", **facts)
        return json_answer(shown)

    async def _named(self, request: Request) -> tuple[Caller, str]:
        return await self._gateway.caller(request, self.surface), request.path_params["id"]

    async def _posted(self, request: Request) -> tuple[Caller, Fields]:
        caller = await self._gateway.caller(request, self.surface)
        await self._gateway.access.admit_write(caller)
        asked = await self._gateway.read(request)
        return caller, Fields(json_body(asked.body) if asked.body else {})


def _given(fields: Fields) -> list[Json]:
    """The items of a request, which are those that a response could have. Raises Refusal."""
    items = _objects("items", fields.take("items"))
    if len(items) > MOST_GIVEN:
        raise invalid("items", f"must be a list of at most {MOST_GIVEN} items")
    if items:
        messages_of(Fields({"input": items}))
    return stored(items)


def _objects(name: str, value: object) -> list[Json]:
    """A list of objects; none if the field is absent. Raises Refusal."""
    found: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    if not (value is None or isinstance(value, list)) or not all(isinstance(item, dict) for item in found):
        raise invalid(name, "must be a list of items")
    return found


def _metadata(fields: Fields) -> dict[str, str] | None:
    found = fields.json("metadata")
    if found is None:
        return None
    fits = len(found) <= MOST_METADATA and all(
        isinstance(value, str) and len(name) <= MOST_NAME and len(value) <= MOST_VALUE for name, value in found.items()
    )
    if not fits:
        why = f"must have at most {MOST_METADATA} texts of {MOST_VALUE} characters under names of {MOST_NAME}"
        raise invalid("metadata", why)
    return found


def _no_item(name: str) -> Refusal:
    why = f"the conversation has no item {name[:200]!r}"
    return Refusal(Problem(status=404, code="item_not_found", message=why, kind="not_found"))
