"""Sessions in the words of Anthropic's managed agents: agents, sessions, and the events of one session. Pure.

https://platform.claude.com/docs/en/managed-agents/events-and-streaming

An agent is a configuration, and is stored as a session that is never written to. What an agent's object says is in the
configured request; its name and the like are in the request's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import cast, get_args

import msgspec

from tokenbus.events.normalized import FinishReason
from tokenbus.events.public import (
    TERMINAL,
    Answering,
    BlockComplete,
    BlockProgress,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    ImagePreview,
    Incomplete,
    PublicEvent,
    Restarted,
    Resumed,
    Retrying,
    RunFailedEvent,
    Started,
    UsageReported,
    Waiting,
)
from tokenbus.events.requests import (
    Base64Source,
    Configure,
    ContentPart,
    DocumentPart,
    Effort,
    Generate,
    ImagePart,
    Interrupt,
    Message,
    SessionMessage,
    TextPart,
    Tool,
    ToolResultPart,
    UrlSource,
)
from tokenbus.events.sessions import AnySessionEvent, Appended, Configured, Delivered, Returned, RunEnded, SessionInfo
from tokenbus.events.usage import Usage
from tokenbus.events.waits import WaitInfo, WaitKind
from tokenbus_services.gateway.problem import invalid, of_end, unsupported
from tokenbus_services.gateway.surfaces.anthropic_messages.content import result_of, user_content
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, GivenAnswer, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.hosted import Steps, output_value
from tokenbus_services.gateway.surfaces.parking import Parking
from tokenbus_services.gateway.surfaces.settling import Settling
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest, effort_thinking

AGENT, SESSION, EVENT, ENVIRONMENT = "agent_", "sesn_", "sevt_", "env_"
"""Beginnings of ids."""
KIND = "anthropic"
"""Key of the configured metadata that says what a session stands for; the others have the rest."""
_SAMPLE = Message(role="user", content="…")
_NOT_SENT = ("type", "id", "messages")
_NEVER = "1970-01-01T00:00:00Z"
_UNTOLD = ("mcp_servers", "skills", "vault_ids", "resources")
PREVIEWS = ("agent.message", "agent.thinking")
_ERRORS = {"overloaded": "model_overloaded_error", "rate_limit": "model_rate_limited_error"}
_KINDS: frozenset[WaitKind] = frozenset({"approval", "tool_result"})
"""What clients of this API can decide."""
_REFUSED: frozenset[FinishReason] = frozenset({"content_filter"})


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """What a session does, as it is configured."""

    id: str
    name: str
    version: int = 1
    model: str
    """As the client named it."""
    effort: str | None = None
    description: str | None = None
    metadata: dict[str, str] = {}


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In the metadata of the configured request."""

    anthropic: str
    """`agent` or `session`."""
    agent: Agent
    environment: str = ""
    title: str | None = None
    client: dict[str, str] = {}
    """The session's metadata."""
    archived_ms: int | None = None
    """When it was archived: from then on it can only be read."""


# --- what clients ask for ---------------------------------------------------------------------------------------------


def read_agent(asked: GatewayRequest, rules: TranslationRules, body: Fields, agent: str) -> Configure:
    """The configuration of a new agent. Raises Refusal."""
    name = body.needed("name", body.text("name"))
    model, effort = _model(body)
    about = Agent(
        id=agent,
        name=name,
        model=model,
        effort=effort,
        description=body.text("description"),
        metadata=_texts(body, "metadata"),
    )
    _only_none(body)
    body.only("multiagent")
    body.only("execution_identity", {"type": "service_account"})
    return _configured(asked, rules, body, about)


def model_agent(asked: GatewayRequest, rules: TranslationRules, name: str) -> Configure:
    """An agent that is a model and nothing else, for a session whose agent is the model's name. Raises Refusal."""
    return _configured(asked, rules, Fields({}), Agent(id=name, name=name, model=name))


def _configured(asked: GatewayRequest, rules: TranslationRules, body: Fields, about: Agent) -> Configure:
    ask = SurfaceRequest(asked, rules, body, model=about.model, stream=False)
    ask.refuse_hidden()
    tools = [_tool(fields) for fields in body.each("tools")]
    thinking = effort_thinking(about.effort)
    read = ask.translated({"messages": [_SAMPLE], "system": body.text("system"), "thinking": thinking}, tools=tools)
    return Configure(request=_request(read.generate, Note(anthropic="agent", agent=about)), when_busy="steer")


def _request(generate: Generate, note: Note) -> Json:
    request = cast("Json", msgspec.to_builtins(generate))
    for name in _NOT_SENT:
        request.pop(name, None)
    return {**request, "metadata": msgspec.to_builtins(note)}


def begun(config: Configure, body: Fields) -> Configure:
    """The configuration of a session of this agent. Raises Refusal."""
    note = msgspec.structs.replace(
        note_of(config),
        anthropic="session",
        environment=body.needed("environment_id", body.text("environment_id")),
        title=body.text("title"),
        client=_texts(body, "metadata"),
    )
    body.only("budget", why="is a setting of the client's key: gateway.keys.NAME.max_budget")
    _only_none(body)
    return noted(config, note)


def changed(config: Configure, body: Fields) -> Configure:
    """A session with another title or other metadata. Raises Refusal."""
    note = note_of(config)
    if body.has("title"):
        note = msgspec.structs.replace(note, title=body.text("title"))
    given = body.json("metadata") or {}
    kept = {**note.client, **given}
    body.put("metadata", {name: value for name, value in kept.items() if value is not None})
    note = msgspec.structs.replace(note, client=_texts(body, "metadata"))
    for name in ("agent", "budget"):
        body.only(name, why="of a session cannot be changed here")
    _only_none(body)
    body.end()
    return noted(config, note)


def noted(config: Configure, note: Note) -> Configure:
    """The configuration with another note."""
    return msgspec.structs.replace(config, request={**config.request, "metadata": msgspec.to_builtins(note)})


def note_of(config: Configure) -> Note:
    """What a session stands for. One that another client made is a session of its model."""
    request = config.request
    try:
        return msgspec.convert(request.get("metadata"), Note)
    except msgspec.ValidationError:
        model = f"{request.get('provider')}/{request.get('model')}"
        return Note(anthropic="session", agent=Agent(id=model, name=model, model=model))


def read_event(fields: Fields) -> SessionMessage | Interrupt | GivenAnswer:
    """What a client sends to a session; a result's call has the id of its event until the call is known. Raises
    Refusal.
    """
    match fields.needed("type", fields.text("type")):
        case "user.message":
            return SessionMessage(content=user_content(fields))
        case "user.interrupt":
            fields.only("session_thread_id", why="names a thread; a session has one")
            return Interrupt()
        case "user.custom_tool_result":
            use = fields.needed("custom_tool_use_id", fields.text("custom_tool_use_id"))
            fields.put("tool_use_id", use)
            return SessionMessage(messages=[Message(role="tool", id=use, content=[result_of(fields)])])
        case "user.tool_confirmation":
            fields.only("session_thread_id", why="names a thread; a session has one")
            use = fields.needed("tool_use_id", fields.text("tool_use_id"))
            allowed = fields.needed("result", fields.one_of("result", ("allow", "deny"))) == "allow"
            if allowed:
                fields.only("deny_message", why="is for a denial")
            why = fields.text("deny_message")
            return GivenAnswer(at=fields.path("tool_use_id"), name=use, approved=allowed, reason=why)
        case "user.tool_result" as kind:
            raise invalid(fields.path("type"), f"nothing in this session waits for a {kind!r}")
        case other:
            raise unsupported(fields.path("type"), f"events of type {other[:100]!r} are not supported")


def _model(body: Fields) -> tuple[str, str | None]:
    if body.is_text("model") or not body.has("model"):
        return body.needed("model", body.text("model")), None
    fields = body.needed("model", body.fields("model"))
    fields.only("speed", "standard")
    fields.only("inference_geo")
    effort = fields.peek("effort")
    if isinstance(effort, dict):
        fields.put("effort", cast("Json", effort).get("type"))
    return fields.needed("id", fields.text("id")), fields.one_of("effort", get_args(Effort))


def _tool(fields: Fields) -> Tool:
    kind = fields.needed("type", fields.text("type"))
    if kind == "custom":
        return Tool(
            name=fields.needed("name", fields.text("name")),
            description=fields.text("description"),
            parameters=fields.needed("input_schema", fields.json("input_schema")),
        )
    why = "the deployment's tools are named in `tokenbus.tools`, or by the header x-tokenbus-tools"
    raise unsupported(fields.path("type"), f"tools of type {kind[:100]!r} are not supported here; {why}")


def _only_none(body: Fields) -> None:
    for name in _UNTOLD:
        body.only(name, [], why="is not supported by this gateway")


def _texts(body: Fields, name: str) -> dict[str, str]:
    found = body.json(name) or {}
    for key, value in found.items():
        if not isinstance(value, str):
            raise invalid(body.path(f"{name}.{key[:100]}"), "must be a string")
    return found


# --- what clients see -------------------------------------------------------------------------------------------------


def time_text(at_ms: int) -> str:
    """A time as the API writes it."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def agent_shown(info: SessionInfo, config: Configure) -> Json:
    """The object of an agent."""
    note = note_of(config)
    return {
        **_session_agent(note.agent, config),
        "metadata": note.agent.metadata,
        "created_at": time_text(info.begun_ms),
        "updated_at": time_text(info.last_ms),
        "archived_at": None if note.archived_ms is None else time_text(note.archived_ms),
    }


def session_shown(info: SessionInfo, config: Configure, *, waits: bool = False) -> Json:
    """The object of a session. ``waits``: its open run waits for somebody."""
    note = note_of(config)
    return {
        "id": info.session,
        "type": "session",
        "agent": _session_agent(note.agent, config),
        "environment_id": note.environment,
        "title": note.title,
        "metadata": note.client,
        "status": "running" if info.run and not waits else "idle",
        "created_at": time_text(info.begun_ms),
        "updated_at": time_text(info.last_ms),
        "archived_at": None if note.archived_ms is None else time_text(note.archived_ms),
        "budget": None,
        "deployment_id": None,
        "outcome_evaluations": [],
        "resources": [],
        "stats": {},
        "usage": {},
        "vault_ids": [],
    }


def environment_shown(name: str, environment: str) -> Json:
    """The object of an environment, which is a name: a session's tools run where the deployment has them."""
    return {
        "id": environment,
        "type": "environment",
        "name": name,
        "description": None,
        "config": {"type": "self_hosted"},
        "metadata": {},
        "created_at": _NEVER,
        "updated_at": _NEVER,
        "archived_at": None,
    }


def sent_shown(item: SessionMessage | Interrupt, event: str, at_ms: int | None = None) -> list[Json]:
    """What a client sent with one append; without ``at_ms`` it has not taken effect yet."""
    at = {"processed_at": None if at_ms is None else time_text(at_ms)}
    if isinstance(item, Interrupt):
        return [{"id": event, "type": "user.interrupt", **at}]
    said = item.messages or [Message(role=item.role, content=item.content)]
    shown: list[Json] = []
    for n, message in enumerate(said):
        name = event if len(said) == 1 else f"{event}.{n}"
        result = message.content[0] if message.role == "tool" and isinstance(message.content, list) else None
        if isinstance(result, ToolResultPart):
            about = {"custom_tool_use_id": message.id or "", "is_error": result.is_error}
            content = _blocks(cast("str | list[ContentPart]", result.content))
            shown.append({"id": name, "type": "user.custom_tool_result", "content": content, **about, **at})
        elif message.role in ("user", "system"):
            kind = "system.message" if message.role == "system" else "user.message"
            shown.append({"id": name, "type": kind, "content": _blocks(message.content), **at})
    return shown


def confirmation_shown(use: str, *, allowed: bool, reason: str | None, event: str, at_ms: int | None = None) -> Json:
    """A decision on a call; without ``at_ms`` it has not taken effect yet."""
    shown: Json = {"id": event, "type": "user.tool_confirmation", "tool_use_id": use}
    shown |= {"result": "allow" if allowed else "deny", "processed_at": None if at_ms is None else time_text(at_ms)}
    return shown if allowed or reason is None else {**shown, "deny_message": reason}


def decision_event(run: str, wait: str) -> str:
    """The id of the event with which a wait ends."""
    return f"{EVENT}{run}.decided.{wait}"


def has_own_tools(config: Configure) -> bool:
    """Whether the client runs the calls of the session's model."""
    return config.request.get("max_tool_depth") == 0


def _session_agent(agent: Agent, config: Configure) -> Json:
    effort = {"effort": {"type": agent.effort}} if agent.effort else {}
    return {
        "id": agent.id,
        "type": "agent",
        "name": agent.name,
        "version": agent.version,
        "description": agent.description,
        "model": {"id": agent.model, **effort},
        "system": config.request.get("system"),
        "tools": [_tool_shown(tool) for tool in _tools_of(config)],
        "mcp_servers": [],
        "skills": [],
        "multiagent": None,
        "execution_identity": {"type": "service_account"},
    }


def _tools_of(config: Configure) -> list[Tool]:
    return msgspec.convert(config.request.get("tools", []), list[Tool]) if has_own_tools(config) else []


def _tool_shown(tool: Tool) -> Json:
    schema = {"type": "object", **tool.parameters}
    return {"type": "custom", "name": tool.name, "description": tool.description or "", "input_schema": schema}


def _blocks(content: str | list[ContentPart]) -> list[Json]:
    if isinstance(content, str):
        return [_text(content)]
    return [_block(part) for part in content]


def _block(part: ContentPart) -> Json:
    match part:
        case TextPart(text=text):
            return _text(text)
        case ImagePart(source=source) | DocumentPart(source=source):
            kind = "image" if isinstance(part, ImagePart) else "document"
            match source:
                case Base64Source(media_type=media_type, data=data):
                    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}
                case UrlSource(url=url):
                    return {"type": kind, "source": {"type": "url", "url": url}}
                case _:
                    return {"type": "redacted"}  # in the blob store
        case _:
            return {"type": "redacted"}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


class SessionEvents:
    """The events of a session, fed with those of its one order. An event of a run has the time of the session's event
    before it: a run's own events have none.
    """

    def __init__(self, at_ms: int, *, own_tools: bool, previews: frozenset[str] = frozenset()) -> None:
        """``at_ms``: until the first event of the session. ``own_tools``: the client runs the model's calls.
        ``previews``: which events are shown while they are made.
        """
        self._at_ms = at_ms
        self._own_tools = own_tools
        self._previews = previews
        self._waiting: dict[str, SessionMessage | Interrupt] = {}
        self._run: _RunEvents | None = None
        self._stop: Json = {"type": "end_turn"}

    def feed(self, event: AnySessionEvent | PublicEvent) -> list[Json]:
        """The events for this one; those of previews are `event_start` and `event_delta`."""
        match event:
            case Configured():
                self._at_ms = event.at_ms
                return []
            case Appended(append=append, item=SessionMessage() | Interrupt() as item):
                self._at_ms, self._waiting[append] = event.at_ms, item
                return sent_shown(item, append)
            case Delivered(append=append):
                self._at_ms = event.at_ms
                item = self._waiting.pop(append, None)
                shown = sent_shown(item, append, event.at_ms) if item else []
                return shown if isinstance(item, Interrupt) else [*self._began(event), *shown]
            case RunEnded():
                self._at_ms = event.at_ms
                return self._ended(event)
            case Returned(append=append):
                self._at_ms = event.at_ms
                self._waiting.pop(append, None)
                return []
            case Appended():
                self._at_ms = event.at_ms
                return []
            case _:
                return self._of_run(event)

    def _began(self, event: Delivered) -> list[Json]:
        if event.run is None or event.turn or (self._run and self._run.id == event.run):
            return []
        self._run = _RunEvents(event.run, self._previews, own_tools=self._own_tools)
        return [self._status("running", f"{event.run}.running")]

    def _of_run(self, event: PublicEvent) -> list[Json]:
        if self._run is None or self._run.id != event.run:
            self._run = _RunEvents(event.run, self._previews, own_tools=self._own_tools)
        found = self._run.feed(event)
        if isinstance(event, TERMINAL):
            self._stop = self._run.stop
        return [self._timed(each) for each in found]

    @property
    def open_run(self) -> str | None:
        """The run that waits for somebody, as far as its events say."""
        return self._run.id if self._run and self._run.parking.first else None

    def parked(self, open_now: Sequence[WaitInfo]) -> list[Json]:
        """The events for a run that does nothing but wait; ``open_now``: what for."""
        if self._run is None or not self._run.parking.is_parked(open_now, _KINDS):
            return []
        return [self._timed(each) for each in self._run.idle()]

    def _ended(self, event: RunEnded) -> list[Json]:
        self._run = None
        stop, self._stop = self._stop, {"type": "end_turn"}
        if event.status == "lost":
            stop = {"type": "retries_exhausted"}
        if self._waiting:  # the next run begins
            return []
        return [{**self._status("idle", f"{event.run}.idle"), "stop_reason": stop}]

    def _status(self, status: str, name: str) -> Json:
        return self._timed({"type": f"session.status_{status}", "id": EVENT + name})

    def _timed(self, event: Json) -> Json:
        return event if event["type"].startswith("event_") else {**event, "processed_at": time_text(self._at_ms)}


class _RunEvents:
    """The events of one run. Calls are told once their turn is over: a retry may void them."""

    def __init__(self, run: str, previews: frozenset[str], *, own_tools: bool) -> None:
        self.id = run
        self._own_tools = own_tools
        self._owed: list[str] = []
        """The events of calls that the client runs."""
        self.stop: Json = {"type": "end_turn"}
        self._previews = previews
        self._settling = Settling(hold_thinking=True, hold_calls=True)
        self._steps = Steps()
        self._request: str | None = None
        """The id of the model's request that is under way."""
        self._uses: dict[str, str] = {}
        """The event of each call, by the call's id."""
        self.parking = Parking()
        self._results: set[str] = set()
        """Calls that the client runs while the run waits."""
        self._calls: list[BlockComplete] = []
        """Calls of which it is not known yet whether they wait for somebody."""
        self._asks: dict[str, str] = {}
        """The event of the call that each open wait is for."""
        self._idle_for: list[str] = []
        """The events that the session has told it waits for."""

    def feed(self, event: PublicEvent) -> list[Json]:
        """The events of this one, without their times."""
        out: list[Json] = []
        if not isinstance(event, Waiting):
            out += self.idle()
        self.parking.feed(event)
        if isinstance(event, Retrying | Restarted):
            out += self._close(None, failed=True)
        elif _is_of_model(event) and self._request is None:
            self._request = self._name(f"{event.turn}.{event.attempt}.request")
            out.append({"type": "span.model_request_start", "id": self._request})
        for each in self._settling.feed(event):
            out += self._settled(each)
        return out

    def idle(self) -> list[Json]:
        """The session waits for somebody, if it has not told so."""
        if self.parking.first is None or self._idle_for == [*self._asks.values()]:
            return []
        self._idle_for = [*self._asks.values()]
        name = self._name(f"idle.{'.'.join(self._asks)}")
        stop: Json = {"type": "requires_action", "event_ids": self._idle_for}
        return [*self._told(), {"type": "session.status_idle", "id": name, "stop_reason": stop}]

    def _told(self, until: int | None = None, *, asks: str = "") -> list[Json]:
        """The events of calls up to a block. ``asks``: what that one waits for."""
        calls = [call for call in self._calls if until is None or call.block <= until]
        self._calls = [call for call in self._calls if call not in calls]
        told: list[Json] = []
        for call in calls:
            use = self._use(call.tool_id or "", call.tool_name or "", call.input or {}, self._name(call.block))
            if call.block == until and asks == "approval":
                use["evaluated_permission"] = "ask"
            elif call.block == until and asks == "tool_result":
                del use["evaluated_permission"]
                use["type"] = "agent.custom_tool_use"
            told.append(use)
        return told

    def _waits(self, event: Waiting) -> list[Json]:
        told = self._told(event.block, asks=event.what)
        name = self._uses.get(event.tool_id, self._name(event.block))
        if event.what == "tool_result" and not told:  # it was allowed before
            name = f"{name}.allowed"
            given: object = msgspec.json.decode(event.arguments or "{}")
            told.append({"type": "agent.custom_tool_use", "id": name, "name": event.tool_name, "input": given})
        self._asks[event.wait] = name
        if event.what == "tool_result":
            self._results.add(event.tool_id)
            self._uses[event.tool_id] = name
        return told

    def _resumed(self, event: Resumed) -> list[Json]:
        use = self._asks.pop(event.wait, None)
        out: list[Json] = []
        if use and event.what == "approval":
            allowed, name = event.decision == "allow", decision_event(self.id, event.wait)
            out.append(confirmation_shown(use, allowed=allowed, reason=event.reason, event=name, at_ms=event.at_ms))
        if self._idle_for and not self._asks:
            self._idle_for = []
            out.append({"type": "session.status_running", "id": self._name(f"running.{event.wait}")})
        return out

    def _settled(self, event: PublicEvent) -> list[Json]:
        match event:
            case Waiting():
                return self._waits(event)
            case Resumed():
                return self._resumed(event)
            case BlockStarted(kind="text" | "thinking" as kind, block=block):
                return self._preview("agent.message" if kind == "text" else "agent.thinking", block)
            case Chunk(kind="text", visible=True) if "agent.message" in self._previews:
                delta = {"type": "content_delta", "index": 0, "content": _text(event.text)}
                return [{"type": "event_delta", "event_id": self._name(event.block), "delta": delta}]
            case BlockComplete():
                return self._block(event)
            case UsageReported(usage=usage):
                return self._close(usage)
            case Completed() | Incomplete() | RunFailedEvent() | Cancelled():
                return self._end(event)
            case _:
                return []

    def _preview(self, kind: str, block: int) -> list[Json]:
        if kind not in self._previews:
            return []
        return [{"type": "event_start", "event": {"type": kind, "id": self._name(block)}}]

    def _block(self, event: BlockComplete) -> list[Json]:
        name = self._name(event.block)
        match event.kind:
            case "text" | "audio" if event.content:
                return [{"type": "agent.message", "id": name, "content": [_text(event.content)]}]
            case "thinking" if not event.cut:
                return [{"type": "agent.thinking", "id": name}]
            case "tool_call" if not event.cut and self._own_tools:
                self._owed.append(name)
                about = {"name": event.tool_name or "", "input": event.input or {}}
                return [{"type": "agent.custom_tool_use", "id": name, **about}]
            case "tool_call" if not event.cut:
                self._calls.append(event)
                return []
            case "tool_result" if event.tool_id in self._results:
                about = {"is_error": bool(event.is_error), "content": [_text(event.content or "")]}
                use = self._uses.get(event.tool_id, "")
                return [{"type": "user.custom_tool_result", "id": name, "custom_tool_use_id": use, **about}]
            case "tool_result":
                return [
                    *self._told(),
                    self._result(event.tool_id or "", event.content or "", name, failed=bool(event.is_error)),
                ]
            case "server_tool" if step := self._steps.read(event):
                said = [] if step.called is None else [self._use(step.id, step.name, step.called, name)]
                if step.output:
                    text = msgspec.json.encode(output_value(step.output)).decode()
                    said.append(self._result(step.id, text, f"{name}.result", failed=step.output.failed))
                return said
            case _:
                return []

    def _use(self, call: str, tool: str, given: Mapping[str, object], name: str) -> Json:
        self._uses[call] = name
        return {"type": "agent.tool_use", "id": name, "name": tool, "input": given, "evaluated_permission": "allow"}

    def _result(self, call: str, text: str, name: str, *, failed: bool) -> Json:
        use = self._uses.get(call, "")
        return {
            "type": "agent.tool_result",
            "id": name,
            "tool_use_id": use,
            "content": [_text(text)],
            "is_error": failed,
        }

    def _end(self, event: Completed | Incomplete | RunFailedEvent | Cancelled) -> list[Json]:
        failed = isinstance(event, Incomplete | RunFailedEvent)
        out = self._told()
        out += self._close(None, failed=failed)
        if failed:
            problem = of_end(event)
            error = {"type": _ERRORS.get(problem.kind, "model_request_failed_error"), "message": problem.message}
            self.stop = {"type": "retries_exhausted"}
            retry = {"retry_status": {"type": "exhausted"}}
            out.append({"type": "session.error", "id": self._name("error"), "error": {**error, **retry}})
        elif event.finish in _REFUSED:
            self.stop = {"type": "refusal"}
        elif isinstance(event, Completed) and self._owed:
            self.stop = {"type": "requires_action", "event_ids": self._owed}
        return out

    def _close(self, usage: Usage | None, *, failed: bool = False) -> list[Json]:
        request, self._request = self._request, None
        if request is None:
            return []
        used = usage or Usage()
        counts = {
            "input_tokens": used.input or 0,
            "output_tokens": used.output or 0,
            "cache_read_input_tokens": used.cache_read or 0,
            "cache_creation_input_tokens": used.cache_write or 0,
        }
        about: Json = {"model_request_start_id": request, "model_usage": counts, "is_error": failed}
        return [{"type": "span.model_request_end", "id": f"{request}.end", **about}]

    def _name(self, place: object) -> str:
        return f"{EVENT}{self.id}.{place}"


def _is_of_model(event: PublicEvent) -> bool:
    """Whether a request of the model is under way: not while a tool runs or somebody decides."""
    if isinstance(event, BlockStarted | BlockComplete | Chunk):
        return event.kind != "tool_result"
    return isinstance(event, Started | Answering | ImagePreview | BlockProgress)
