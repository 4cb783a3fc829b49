"""Sessions in the words of Anthropic's managed agents: agents, sessions, and what clients send to one. Pure.

`session_events` has the events of a session.

https://platform.claude.com/docs/en/managed-agents/events-and-streaming

An agent is a configuration, and is stored as a session that is never written to. What an agent's object says is in the
configured request; its name and the like are in the request's metadata.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import cast, get_args

import msgspec

from tokenbus.events import requests
from tokenbus.events.sessions import SessionInfo
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.anthropic_messages.content import result_of, user_content
from tokenbus_services.gateway.surfaces.contract import GatewayRequest, GivenAnswer, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json
from tokenbus_services.gateway.surfaces.surface import SurfaceRequest, effort_thinking

AGENT, SESSION, EVENT, ENVIRONMENT = "agent_", "sesn_", "sevt_", "env_"
"""Beginnings of ids."""
KIND = "anthropic"
"""Key of the configured metadata that says what a session stands for; the others have the rest."""
_SAMPLE = requests.Message(role="user", content="…")
_NOT_SENT = ("type", "id", "messages")
_NEVER = "1970-01-01T00:00:00Z"
_UNTOLD = ("mcp_servers", "skills", "vault_ids", "resources")


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


def read_agent(asked: GatewayRequest, rules: TranslationRules, body: Fields, agent: str) -> requests.Configure:
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


def model_agent(asked: GatewayRequest, rules: TranslationRules, name: str) -> requests.Configure:
    """An agent that is a model and nothing else, for a session whose agent is the model's name. Raises Refusal."""
    return _configured(asked, rules, Fields({}), Agent(id=name, name=name, model=name))


def _configured(asked: GatewayRequest, rules: TranslationRules, body: Fields, about: Agent) -> requests.Configure:
    ask = SurfaceRequest(asked, rules, body, model=about.model, stream=False)
    ask.refuse_hidden()
    tools = [_tool(fields) for fields in body.each("tools")]
    thinking = effort_thinking(about.effort)
    read = ask.translated({"messages": [_SAMPLE], "system": body.text("system"), "thinking": thinking}, tools=tools)
    return requests.Configure(request=_request(read.generate, Note(anthropic="agent", agent=about)), when_busy="steer")


def _request(generate: requests.Generate, note: Note) -> Json:
    request = cast("Json", msgspec.to_builtins(generate))
    for name in _NOT_SENT:
        request.pop(name, None)
    return {**request, "metadata": msgspec.to_builtins(note)}


def begun(config: requests.Configure, body: Fields) -> requests.Configure:
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


def changed(config: requests.Configure, body: Fields) -> requests.Configure:
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


def noted(config: requests.Configure, note: Note) -> requests.Configure:
    """The configuration with another note."""
    return msgspec.structs.replace(config, request={**config.request, "metadata": msgspec.to_builtins(note)})


def note_of(config: requests.Configure) -> Note:
    """What a session stands for. One that another client made is a session of its model."""
    request = config.request
    try:
        return msgspec.convert(request.get("metadata"), Note)
    except msgspec.ValidationError:
        model = f"{request.get('provider')}/{request.get('model')}"
        return Note(anthropic="session", agent=Agent(id=model, name=model, model=model))


def read_event(fields: Fields) -> requests.SessionMessage | requests.Interrupt | GivenAnswer:
    """What a client sends to a session; a result's call has the id of its event until the call is known. Raises
    Refusal.
    """
    match fields.needed("type", fields.text("type")):
        case "user.message":
            return requests.SessionMessage(content=user_content(fields))
        case "user.interrupt":
            fields.only("session_thread_id", why="names a thread; a session has one")
            return requests.Interrupt()
        case "user.custom_tool_result":
            use = fields.needed("custom_tool_use_id", fields.text("custom_tool_use_id"))
            fields.put("tool_use_id", use)
            return requests.SessionMessage(
                messages=[requests.Message(role="tool", id=use, content=[result_of(fields)])]
            )
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
    return fields.needed("id", fields.text("id")), fields.one_of("effort", get_args(requests.Effort))


def _tool(fields: Fields) -> requests.Tool:
    kind = fields.needed("type", fields.text("type"))
    if kind == "custom":
        return requests.Tool(
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


def agent_shown(info: SessionInfo, config: requests.Configure) -> Json:
    """The object of an agent."""
    note = note_of(config)
    return {
        **_session_agent(note.agent, config),
        "metadata": note.agent.metadata,
        "created_at": time_text(info.begun_ms),
        "updated_at": time_text(info.last_ms),
        "archived_at": None if note.archived_ms is None else time_text(note.archived_ms),
    }


def session_shown(info: SessionInfo, config: requests.Configure, *, waits: bool = False) -> Json:
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


def sent_shown(item: requests.SessionMessage | requests.Interrupt, event: str, at_ms: int | None = None) -> list[Json]:
    """What a client sent with one append; without ``at_ms`` it has not taken effect yet."""
    at = {"processed_at": None if at_ms is None else time_text(at_ms)}
    if isinstance(item, requests.Interrupt):
        return [{"id": event, "type": "user.interrupt", **at}]
    said = item.messages or [requests.Message(role=item.role, content=item.content)]
    shown: list[Json] = []
    for n, message in enumerate(said):
        name = event if len(said) == 1 else f"{event}.{n}"
        result = message.content[0] if message.role == "tool" and isinstance(message.content, list) else None
        if isinstance(result, requests.ToolResultPart):
            about = {"custom_tool_use_id": message.id or "", "is_error": result.is_error}
            content = _blocks(cast("str | list[requests.ContentPart]", result.content))
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


def has_own_tools(config: requests.Configure) -> bool:
    """Whether the client runs the calls of the session's model."""
    return config.request.get("max_tool_depth") == 0


def _session_agent(agent: Agent, config: requests.Configure) -> Json:
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


def _tools_of(config: requests.Configure) -> list[requests.Tool]:
    return msgspec.convert(config.request.get("tools", []), list[requests.Tool]) if has_own_tools(config) else []


def _tool_shown(tool: requests.Tool) -> Json:
    schema = {"type": "object", **tool.parameters}
    return {"type": "custom", "name": tool.name, "description": tool.description or "", "input_schema": schema}


def _blocks(content: str | list[requests.ContentPart]) -> list[Json]:
    if isinstance(content, str):
        return [text_block(content)]
    return [_block(part) for part in content]


def _block(part: requests.ContentPart) -> Json:
    match part:
        case requests.TextPart(text=text):
            return text_block(text)
        case requests.ImagePart(source=source) | requests.DocumentPart(source=source):
            kind = "image" if isinstance(part, requests.ImagePart) else "document"
            match source:
                case requests.Base64Source(media_type=media_type, data=data):
                    return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": data}}
                case requests.UrlSource(url=url):
                    return {"type": kind, "source": {"type": "url", "url": url}}
                case _:
                    return {"type": "redacted"}  # in the blob store
        case _:
            return {"type": "redacted"}


def text_block(text: str) -> Json:
    return {"type": "text", "text": text}
