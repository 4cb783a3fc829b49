"""Routes of Anthropic's managed agents: agents, environments, sessions, and the events of a session, as its SDK asks.

Sessions are those of the bus, by the same names, so a session that another client made is one here, too. The stream
begins now, as at Anthropic: a client opens it first, then lists what was before.
"""

from __future__ import annotations

import binascii
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus import SessionStep
from tokenbus.client.sessions.listing import list_sessions, session_filter
from tokenbus.errors import SessionNotFound
from tokenbus.events.public import BlockComplete, Waiting
from tokenbus.events.requests import (
    Configure,
    Delete,
    Interrupt,
    Message,
    SessionMessage,
    TextPart,
    ToolCallPart,
    ToolResultPart,
    WaitDecision,
)
from tokenbus.events.sessions import session_ref, session_run
from tokenbus_services.gateway import idempotency
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway, Handler
from tokenbus_services.gateway.parked import decision_of
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.gateway.routes.native import live_stream
from tokenbus_services.gateway.routes.routing import HeaderRoute, json_answer
from tokenbus_services.gateway.routes.run_list import ListPage, limit_in, position_in
from tokenbus_services.gateway.surfaces.anthropic_messages import AnthropicMessagesSurface, sessions
from tokenbus_services.gateway.surfaces.anthropic_messages.session_events import PREVIEWS, SessionEvents
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, GivenAnswer, encode_line
from tokenbus_services.gateway.surfaces.errors import anthropic_error
from tokenbus_services.gateway.surfaces.fields import Fields, Json, is_whole, json_body

HEADER = "anthropic-version"
"""Sent by every client of this API, and by no other."""
MOST_EVENTS = 1000
"""Events in one page of a list."""
MOST_SENT = 64
"""Events in one request."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes, below `/anthropic/v1`, and below `/v1` for requests with the API's own header."""
    api = _Sessions(gateway)
    served: list[tuple[str, Handler, str]] = [
        ("/agents", api.make_agent, "POST"),
        ("/agents", api.agents, "GET"),
        ("/agents/{id}", api.agent, "GET"),
        ("/agents/{id}/archive", api.archive_agent, "POST"),
        ("/environments", api.make_environment, "POST"),
        ("/environments/{id}", api.environment, "GET"),
        ("/sessions", api.make, "POST"),
        ("/sessions", api.all, "GET"),
        ("/sessions/{id}", api.one, "GET"),
        ("/sessions/{id}", api.change, "POST"),
        ("/sessions/{id}", api.delete, "DELETE"),
        ("/sessions/{id}/archive", api.archive, "POST"),
        ("/sessions/{id}/events", api.send, "POST"),
        ("/sessions/{id}/events", api.events, "GET"),
        ("/sessions/{id}/events/stream", api.stream, "GET"),
    ]
    found: list[BaseRoute] = []
    for path, handle, method in served:
        endpoint = gateway.guarded(api.surface.name, api.surface.refusal, handle)
        found.append(Route(f"/anthropic/v1{path}", endpoint, methods=[method]))
        found.append(HeaderRoute(f"/v1{path}", endpoint, header=HEADER, method=method))
    return found


class _Sessions:
    def __init__(self, gateway: Gateway) -> None:
        self.surface = AnthropicMessagesSurface()
        self._gateway = gateway
        self._door = gateway.runs.sessions

    # --- agents and environments ----------------------------------------------------------------------------------

    async def make_agent(self, request: Request) -> Response:
        """Store a configuration."""
        caller, asked, body = await self._posted(request)
        agent = sessions.AGENT + secrets.token_hex(12)
        config = sessions.read_agent(asked, caller.rules, body, agent)
        await self._door.append(caller, self.surface.name, agent, config)
        return json_answer(await self._agent(caller, agent))

    async def agent(self, request: Request) -> Response:
        """One of them."""
        caller = await self._gateway.caller(request, self.surface)
        return json_answer(await self._agent(caller, request.path_params["id"]))

    async def archive_agent(self, request: Request) -> Response:
        """No session begins with it any more."""
        caller = await self._gateway.caller(request, self.surface)
        agent = request.path_params["id"]
        await self._archive(caller, agent, await self._config_of_agent(caller, agent))
        return json_answer(await self._agent(caller, agent))

    async def _archive(self, caller: Caller, name: str, config: Configure) -> None:
        note = sessions.note_of(config)
        if note.archived_ms is None:
            now = self._gateway.runs.deployment.server.clock.now_ms()
            archived = sessions.noted(config, msgspec.structs.replace(note, archived_ms=now))
            await self._door.append(caller, self.surface.name, name, archived)

    async def agents(self, request: Request) -> Response:
        """Those of the tenant."""
        return await self._listed(request, "agent")

    async def make_environment(self, request: Request) -> Response:
        """A name, which the id holds: nothing is stored."""
        _, _, body = await self._posted(request)
        name = body.needed("name", body.text("name"))
        if not 0 < len(name) <= 200:
            raise invalid("name", "must have 1 to 200 characters")
        body.only("config", *_NO_CONTAINER, why="asks for a container, and this gateway runs none")
        for field in ("description", "metadata", "scope"):
            body.hint(field, {}, "organization")
        body.end()
        encoded = urlsafe_b64encode(name.encode()).decode().rstrip("=")
        return json_answer(sessions.environment_shown(name, sessions.ENVIRONMENT + encoded))

    async def environment(self, request: Request) -> Response:
        """What its id says."""
        await self._gateway.caller(request, self.surface)
        environment: str = request.path_params["id"]
        encoded = environment.removeprefix(sessions.ENVIRONMENT)
        try:
            name = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
        except (binascii.Error, ValueError):
            raise _not_found("environment", environment) from None
        return json_answer(sessions.environment_shown(name, environment))

    async def _agent(self, caller: Caller, agent: str) -> Json:
        config = await self._config_of_agent(caller, agent)
        return sessions.agent_shown(await self._door.info(caller, agent), config)

    async def _config_of_agent(self, caller: Caller, agent: str) -> Configure:
        try:
            config = await self._door.configuration(caller, agent)
        except SessionNotFound:
            raise _not_found("agent", agent) from None
        if sessions.note_of(config).anthropic != "agent":
            raise _not_found("agent", agent)
        return config

    # --- sessions -------------------------------------------------------------------------------------------------

    async def make(self, request: Request) -> Response:
        """Begin a session of an agent; a model's name is one, too."""
        caller, asked, body = await self._posted(request)
        config = sessions.begun(await self._asked_agent(caller, asked, body), body)
        first = [sessions.read_event(fields) for fields in body.each("initial_events")]
        body.end()
        for item in first:
            if isinstance(item, GivenAnswer):
                raise invalid("initial_events", "nothing in a new session waits to be confirmed")
        name = sessions.SESSION + secrets.token_hex(12)
        await self._door.append(caller, self.surface.name, name, config)
        for item in first:
            assert not isinstance(item, GivenAnswer)
            await self._door.append(caller, self.surface.name, name, item, append=_new_event())
        return json_answer(await self._session(caller, name))

    async def _asked_agent(self, caller: Caller, asked: GatewayRequest, body: Fields) -> Configure:
        given = body.take("agent")
        if given is None:
            raise invalid("agent", "this field is required")
        fields = Fields(cast("Json", given) if isinstance(given, dict) else {"type": "agent", "id": given}, "agent")
        fields.needed("type", fields.one_of("type", ("agent",)))
        agent, version = fields.needed("id", fields.text("id")), fields.whole("version", least=1)
        fields.end()
        if not agent.startswith(sessions.AGENT):
            return sessions.model_agent(asked, caller.rules, agent)
        config = await self._config_of_agent(caller, agent)
        if sessions.note_of(config).archived_ms is not None:
            raise invalid("agent", "it is archived")
        if version not in (None, sessions.note_of(config).agent.version):
            raise invalid("agent.version", "there is no such version of this agent")
        return config

    async def one(self, request: Request) -> Response:
        """One of them."""
        caller = await self._gateway.caller(request, self.surface)
        return json_answer(await self._session(caller, request.path_params["id"]))

    async def all(self, request: Request) -> Response:
        """Those of the tenant that clients of this API made."""
        return await self._listed(request, "session")

    async def change(self, request: Request) -> Response:
        """Another title, or other metadata."""
        caller, _, body = await self._posted(request)
        name = request.path_params["id"]
        config = sessions.changed(await self._open(caller, name), body)
        await self._door.append(caller, self.surface.name, name, config)
        return json_answer(await self._session(caller, name))

    async def archive(self, request: Request) -> Response:
        """Let nobody write to it any more."""
        caller = await self._gateway.caller(request, self.surface)
        name = request.path_params["id"]
        config = await self._door.configuration(caller, name)
        if (await self._door.info(caller, name)).run:
            raise invalid("session", "it is running: interrupt it, or wait until it is idle")
        await self._archive(caller, name, config)
        return json_answer(await self._session(caller, name))

    async def _open(self, caller: Caller, name: str) -> Configure:
        """The configuration of a session that may be written to. Raises Refusal."""
        config = await self._door.configuration(caller, name)
        if sessions.note_of(config).archived_ms is not None:
            raise invalid("session", "it is archived, and can only be read")
        return config

    async def delete(self, request: Request) -> Response:
        """Remove it with its runs."""
        caller = await self._gateway.caller(request, self.surface)
        name = request.path_params["id"]
        await self._door.info(caller, name)
        await self._door.append(caller, self.surface.name, name, Delete())
        return json_answer({"id": name, "type": "session_deleted"})

    async def _session(self, caller: Caller, name: str) -> Json:
        config = await self._door.configuration(caller, name)
        info = await self._door.info(caller, name)
        waits = bool(info.run and await self._gateway.runs.waits.of_run(info.run))
        return sessions.session_shown(info, config, waits=waits)

    async def _listed(self, request: Request, kind: str) -> Response:
        caller = await self._gateway.caller(request, self.surface)
        for name in request.query_params:
            if name not in ("limit", "page", "include_archived"):
                raise invalid(name, "is not supported here; supported: limit, page, include_archived")
        limit = limit_in(request.query_params.get("limit"))
        wanted = session_filter(tenant=caller.tenant or None, metadata={sessions.KIND: kind})
        archived = request.query_params.get("include_archived", "false")
        if archived not in ("true", "false"):
            raise invalid("include_archived", "must be true or false")
        after = position_in(request.query_params.get("page"))
        show = sessions.agent_shown if kind == "agent" else sessions.session_shown
        page = ListPage[Json](limit)
        async for info in page.of(list_sessions(self._gateway.runs.deployment, wanted, after=after, limit=limit)):
            config = await self._door.configuration(caller, info.session)
            if archived == "true" or sessions.note_of(config).archived_ms is None:
                page.found.append(show(info, config))
        return json_answer({"data": page.found, "next_page": page.next})

    # --- events ---------------------------------------------------------------------------------------------------

    async def send(self, request: Request) -> Response:
        """Append events, in order; all are read before the first is appended."""
        caller, asked, body = await self._posted(request)
        given = [sessions.read_event(fields) for fields in body.each("events")]
        body.end()
        if not 0 < len(given) <= MOST_SENT:
            raise invalid("events", f"must be a list of 1 to {MOST_SENT} events")
        key, name = asked.headers.get(idempotency.HEADER), request.path_params["id"]
        await self._open(caller, name)
        of_key = idempotency.run_of(caller.tenant, key, f"events of {name}") if key else None
        headers: dict[str, str] = {}
        sent: list[Json] = []
        for n, item in enumerate(await self._with_calls(caller, name, await self._decisions(caller, name, given))):
            if isinstance(item, _Decision):
                await self._gateway.runs.waits.decide(caller, "anthropic", item.sent)
                sent.append(item.shown)
                continue
            event = f"{sessions.EVENT}{of_key}.{n}" if of_key else _new_event()
            receipt, headers_of_it = await self._door.append(caller, self.surface.name, name, item, append=event)
            headers |= headers_of_it
            if receipt.fate.state == "returned" and receipt.fate.reason != "nothing_open":
                raise _returned(f"events[{n}]", str(receipt.fate.reason), receipt.fate.problem)
            sent += sessions.sent_shown(item, event)
        return json_answer({"data": sent}, headers=headers)

    async def _decisions(
        self, caller: Caller, name: str, items: list[SessionMessage | Interrupt | GivenAnswer]
    ) -> list[SessionMessage | Interrupt | _Decision]:
        """The items, with the decisions on what the session's open run waits for. Raises Refusal."""
        found: list[SessionMessage | Interrupt | _Decision] = []
        for n, item in enumerate(items):
            given = item if isinstance(item, GivenAnswer) else _result_given(item, f"events[{n}].custom_tool_use_id")
            wait = await self._wait(caller, name, given.name) if given else None
            if given and wait:
                run, waiting = wait
                found.append(_decision(run, waiting, given))
            elif isinstance(item, GivenAnswer):
                raise invalid(item.at, f"nothing in this session waits for {item.name[:200]!r} to be confirmed")
            else:
                found.append(item)
        return found

    async def _wait(self, caller: Caller, name: str, event: str) -> tuple[str, Waiting] | None:
        """The newest wait of the call of an event; None if that is of no run of this session, or waited for nobody."""
        run, _, block = event.removeprefix(sessions.EVENT).removesuffix(".allowed").rpartition(".")
        known = session_run(run)
        if known is None or known.ref != session_ref(caller.tenant, name):
            return None
        events = await self._gateway.runs.stored(run)
        waits = [each for each in events if isinstance(each, Waiting) and str(each.block) == block]
        return (run, waits[-1]) if waits else None

    async def _with_calls(
        self, caller: Caller, name: str, items: list[SessionMessage | Interrupt | _Decision]
    ) -> list[SessionMessage | Interrupt | _Decision]:
        """The items, with the model's call of each result. The next run begins with the last result that is owed, so
        those that follow each other are one append. Raises Refusal.
        """
        found: list[SessionMessage | Interrupt | _Decision] = []
        owed: set[str] | None = None
        for n, item in enumerate(items):
            if not isinstance(item, SessionMessage) or not item.messages:
                found.append(item)
                continue
            if owed is None:
                owed = _unanswered(await self._door.messages(caller, name))
            (message,) = item.messages
            call = await self._call(str(message.id))
            if call not in owed:
                why = "nothing in this session waits for the result of this event"
                raise invalid(f"events[{n}].custom_tool_use_id", why)
            owed.discard(call)
            parts = [
                msgspec.structs.replace(part, tool_id=call) for part in cast("list[ToolResultPart]", message.content)
            ]
            message = msgspec.structs.replace(message, content=[*parts])
            before = found[-1] if found and isinstance(found[-1], SessionMessage) else None
            results = before.messages if before else []
            if results:
                found.pop()
            found.append(SessionMessage(messages=[*results, message], run=not owed))
        return found

    async def _call(self, event: str) -> str:
        """The call of an event `agent.custom_tool_use`; empty if there is none."""
        run, _, block = event.removeprefix(sessions.EVENT).rpartition(".")
        if session_run(run) is None:
            return ""
        for each in await self._gateway.runs.stored(run):
            if isinstance(each, BlockComplete) and each.kind == "tool_call" and str(each.block) == block:
                return each.tool_id or ""
        return ""

    async def events(self, request: Request) -> Response:
        """A page of the events that are stored."""
        caller = await self._gateway.caller(request, self.surface)
        ask, kinds = request.query_params, request.query_params.getlist("types[]")
        for name in ask:
            if name not in ("order", "limit", "page", "types[]"):
                raise invalid(name, "is not supported here; supported: limit, order, page, types")
        order, page, limit = ask.get("order", "asc"), ask.get("page", "0"), ask.get("limit", str(MOST_EVENTS))
        if order not in ("asc", "desc"):
            raise invalid("order", "must be asc or desc")
        if not is_whole(page) or not is_whole(limit) or not 0 < int(limit) <= MOST_EVENTS:
            raise invalid("limit" if is_whole(page) else "page", "is no page of events")
        name, first, count = request.path_params["id"], int(page), int(limit)
        own_tools = sessions.has_own_tools(await self._door.configuration(caller, name))
        fold = SessionEvents((await self._door.info(caller, name)).begun_ms, own_tools=own_tools)
        found: list[Json] = []
        whole = True
        steps = await self._door.follow(caller, name, after=None, live=False)
        async with aclosing(steps):
            async for step in steps:
                found += [each for each in fold.feed(step.event) if not kinds or each["type"] in kinds]
                if order == "asc" and len(found) > first + count:
                    whole = False
                    break
        now = await self._parked(fold) if whole else []
        found += [each for each in now if not kinds or each["type"] in kinds]
        if order == "desc":
            found.reverse()
        more = str(first + count) if len(found) > first + count else None
        return json_answer({"data": found[first : first + count], "next_page": more})

    async def stream(self, request: Request) -> Any:
        """The events from now on."""
        caller = await self._gateway.caller(request, self.surface)
        name, previews = request.path_params["id"], request.query_params.getlist("event_deltas[]")
        for kind in previews:
            if kind not in PREVIEWS:
                raise invalid("event_deltas", f"{kind[:100]!r} has no previews; supported: {', '.join(PREVIEWS)}")
        info = await self._door.info(caller, name)
        now = await self._door.now(caller, name)
        steps = await self._door.follow(caller, name, after=now, live=True)
        own_tools = sessions.has_own_tools(await self._door.configuration(caller, name))
        fold = SessionEvents(info.last_ms, own_tools=own_tools, previews=frozenset(previews))
        for event in await self._gateway.runs.stored(info.run) if info.run else ():
            if event.seq <= now.run_seq:  # what was told before: later events name its calls
                fold.feed(event)
        await self._parked(fold)

        async def shown() -> AsyncGenerator[list[Json]]:
            async with aclosing(_until_deleted(steps)) as read:
                async for step in read:
                    yield [_DELETED] if step is None else [*fold.feed(step.event), *await self._parked(fold)]

        return live_stream(
            self._gateway.times,
            shown(),
            lambda found: b"".join(map(_frame, found)),
            check=lambda: self._gateway.caller(request, self.surface),
            broken=_broken,
        )

    async def _parked(self, fold: SessionEvents) -> list[Json]:
        """What the session tells of a run that does nothing but wait."""
        run = fold.open_run
        return fold.parked(await self._gateway.runs.waits.of_run(run)) if run else []

    async def _posted(self, request: Request) -> tuple[Caller, GatewayRequest, Fields]:
        caller = await self._gateway.caller(request, self.surface)
        asked = await self._gateway.read(request)
        return caller, asked, Fields(json_body(asked.body) if asked.body else {})


class _Decision(msgspec.Struct, frozen=True):
    """A decision on what a run of the session waits for, and the event of it."""

    sent: WaitDecision
    shown: Json


def _decision(run: str, wait: Waiting, given: GivenAnswer) -> _Decision:
    """Raises Refusal if the event is of another kind than the wait."""
    event = sessions.decision_event(run, wait.wait)
    if wait.what == "approval" and given.approved is not None:
        shown = sessions.confirmation_shown(given.name, allowed=given.approved, reason=given.reason, event=event)
    elif wait.what == "tool_result" and given.approved is None:
        content = [{"type": "text", "text": given.content}]
        about = {"custom_tool_use_id": given.name, "is_error": given.is_error, "content": content}
        shown = {"id": event, "type": "user.custom_tool_result", "processed_at": None, **about}
    else:
        raise invalid(given.at, f"this call waits for another kind of event: {wait.what}")
    return _Decision(decision_of(run, wait, given), shown)


def _result_given(item: SessionMessage | Interrupt, at: str) -> GivenAnswer | None:
    """The result of a custom tool, as an answer to a run that waits for it."""
    if isinstance(item, Interrupt) or not item.messages:
        return None
    (message,) = item.messages
    (result,) = cast("list[ToolResultPart]", message.content)
    content = result.content
    text = content if isinstance(content, str) else "".join(p.text for p in content if isinstance(p, TextPart))
    return GivenAnswer(at=at, name=str(message.id), content=text, is_error=result.is_error)


_NO_CONTAINER: tuple[Json, ...] = (
    {"type": "self_hosted"},
    {"type": "cloud"},
    {"type": "cloud", "networking": {"type": "unrestricted"}},
)
_DELETED: Json = {"type": "session.deleted", "id": "sevt_deleted", "processed_at": sessions.time_text(0)}


async def _until_deleted(steps: AsyncGenerator[SessionStep]) -> AsyncGenerator[SessionStep | None]:
    """The steps; None at last if the session was deleted."""
    try:
        async with aclosing(steps):
            async for step in steps:
                yield step
    except SessionNotFound:
        yield None


def _unanswered(messages: list[Message]) -> set[str]:
    """The calls of a conversation that have no result."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    answered = {part.tool_id for part in parts if isinstance(part, ToolResultPart)}
    return {part.tool_id for part in parts if isinstance(part, ToolCallPart)} - answered


def _frame(event: Json) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + encode_line(event) + b"\n\n"


def _broken(problem: Problem) -> bytes:
    return b"event: error\ndata: " + anthropic_error(problem) + b"\n\n"


def _new_event() -> str:
    return sessions.EVENT + secrets.token_hex(12)


def _not_found(what: str, name: str) -> Refusal:
    why = f"{what} {name[:200]!r} was not found"
    return Refusal(Problem(status=404, code=f"{what}_not_found", message=why, kind="not_found"))


def _returned(param: str, reason: str, problem: str | None) -> Refusal:
    if reason == "rejected":
        return Refusal(Problem(status=400, code=reason, message=problem or "", kind="invalid_request", param=param))
    full = reason == "queue_full"
    why = "too many messages of this session wait" if full else f"it was returned: {reason}"
    kind = "rate_limit" if full else "invalid_request"
    return Refusal(Problem(status=429 if full else 409, code=reason, message=why, kind=kind, param=param))
