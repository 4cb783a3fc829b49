"""What a run's calls wait for, as settings and request say it, and the decisions that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import wait_field
from tokenbus.bus.scripts.runs.waits import look_up, refuse
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import ToolWaits, WaitDecided
from tokenbus.events.requests import Answer, Approval, Generate, Tool, ToolResult, WaitDecision
from tokenbus.events.waits import ApprovalRule, Conditions, DecisionReply, WaitInfo
from tokenbus_services.json_schema import SchemaError, compile_schema
from tokenbus_services.settings import (
    DEFAULT_TOOL_TIMEOUT_S,
    ClientTool,
    McpSettings,
    Settings,
    ToolSettings,
)

_wait_decoder = msgspec.json.Decoder(WaitInfo)


def tool_waits(request: Generate, settings: Settings) -> dict[str, ToolWaits]:
    """What calls of each tool wait for. A request may ask for more approvals than the settings, never for fewer."""
    found = {tool.name: _waits_of(tool, _settings_of(tool.name, settings)) for tool in request.tools}
    return {name: waits for name, waits in found.items() if waits.approval or waits.client_ms}


def _settings_of(name: str, settings: Settings) -> ToolSettings | McpSettings | None:
    """The table that declares the tool, or the MCP server that lists it."""
    if name in settings.tools:
        return settings.tools[name]
    prefixes = settings.mcp_prefixes
    return next((settings.mcp[server] for server, prefix in prefixes.items() if name.startswith(prefix)), None)


def _waits_of(tool: Tool, declared: ToolSettings | McpSettings | None) -> ToolWaits:
    rules = _rules(tool.approval) + (_rules(declared.approval) if declared else [])
    schema = tool.parameters if not tool.format else None
    client = declared if isinstance(declared, ClientTool) else tool if tool.kind == "client" else None
    client_s = (client.timeout_s or DEFAULT_TOOL_TIMEOUT_S) if client else 0.0
    waits = ToolWaits(rules, schema=schema, client_ms=round(client_s * 1000), result=client.result if client else None)
    if declared is None:
        return waits
    timeout_ms = round(declared.approval_timeout_s * 1000)
    return msgspec.structs.replace(waits, approval_ms=timeout_ms, on_deadline=declared.approval_on_deadline)


def _rules(rule: ApprovalRule | None) -> list[Conditions]:
    match rule:
        case None | "never":
            return []
        case "always":
            return [{}]
        case list():
            return rule
        case _:
            return [rule]


def check_client_tools(request: Generate, settings: Settings) -> None:
    """Raise RequestInvalid for a client's tool that the deployment runs itself, or whose ``result`` is no schema."""
    for i, tool in enumerate(request.tools):
        declared = _settings_of(tool.name, settings)
        if tool.kind == "client" and declared is not None and not isinstance(declared, ClientTool):
            raise RequestInvalid(f"tools[{i}].kind", f"this deployment runs {tool.name!r} itself")
        if tool.kind is None and (tool.result is not None or tool.timeout_s is not None):
            raise RequestInvalid(f"tools[{i}].kind", "`result` and `timeout_s` are of tools of kind `client`")
        try:
            compile_schema(tool.result or {})
        except SchemaError as e:
            raise RequestInvalid(f"tools[{i}].result", str(e)) from None


class Decisions:
    """Takes decisions in: each becomes one script, which checks again what was read here."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def call(self, sent: WaitDecision) -> scripts.ScriptCall:
        """The call that decides, or that tells the sender why not. The run must be located."""
        run_key, field = self._keys.run(sent.run), wait_field(sent.wait)
        found: bytes | None = await retry_until_available(
            self._server, lambda: self._server.client.hget(run_key, field), what="look-up of a wait"
        )
        if found is None:  # if it is opened now, it was not looked at, and is not decided
            return look_up(self._keys, sent.run, sent.wait, sent.decision_id)
        info = _wait_decoder.decode(found)
        tenant = info.tenant or ""
        if (sent.metadata or {}).get("tenant", tenant) != tenant:
            return self.refuse(sent, DecisionReply())  # as if there were none
        try:
            event = _decided(sent, info)
        except RequestInvalid as e:
            return self.refuse(sent, DecisionReply(problem=str(e)))
        now_ms = self._server.clock.now_ms()
        return scripts.decision(self._keys, sent.run, tenant, event, at_ms=now_ms, durable=info.durable, held=info.held)

    def refuse(self, sent: WaitDecision, reply: DecisionReply) -> scripts.ScriptCall:
        """The call that tells the sender why it decides nothing."""
        return refuse(self._keys.decision(sent.run, sent.decision_id), answer=msgspec.json.encode(reply))


def _decided(sent: WaitDecision, info: WaitInfo) -> WaitDecided:
    """The event of a decision on this wait. Raises RequestInvalid if it does not fit."""
    if type(sent).__struct_config__.tag != info.what:
        raise RequestInvalid("type", f"the wait {info.wait} is decided by an {info.what!r}")
    schema = info.schema
    match sent:
        case Approval():
            arguments = None
            if sent.arguments is not None:
                if sent.decision == "deny":
                    raise RequestInvalid("arguments", "a denied call runs with none")
                if schema is None:
                    raise RequestInvalid(
                        "arguments",
                        "nobody can change the input of this call: it is free text, or its provider runs it",
                    )
                _check("arguments", sent.arguments, schema)
                arguments = msgspec.json.encode(sent.arguments).decode()
            reason = sent.reason or ""
            return WaitDecided(
                sent.wait,
                "approval",
                sent.decision,
                sent.decision_id,
                sent.by,
                sent.door,
                reason=reason,
                arguments=arguments,
            )
        case Answer():
            if sent.decision != "accept" and sent.content is not None:
                raise RequestInvalid("content", "only an accepted question has an answer")
            if sent.content is not None and info.url is not None:
                raise RequestInvalid("content", "this question is answered on its page, and has no content here")
            if sent.decision == "accept" and info.url is None:
                _check("content", sent.content or {}, schema)
            content = msgspec.json.encode(sent.content).decode() if sent.content is not None else ""
            return WaitDecided(
                sent.wait, "answer", sent.decision, sent.decision_id, sent.by, sent.door, content=content
            )
        case ToolResult():
            if not sent.is_error:
                _check("content", sent.content, schema)
            text = sent.content if isinstance(sent.content, str) else msgspec.json.encode(sent.content).decode()
            return WaitDecided(
                sent.wait,
                "tool_result",
                "result",
                sent.decision_id,
                sent.by,
                sent.door,
                content=text,
                is_error=sent.is_error,
            )


def _check(where: str, value: object, schema: Mapping[str, object] | None) -> None:
    """Raise RequestInvalid if the value does not match the schema."""
    if schema and (problems := compile_schema(dict(schema)).problems(cast("dict[str, object]", value), where)):
        raise RequestInvalid(where, "; ".join(problems))
