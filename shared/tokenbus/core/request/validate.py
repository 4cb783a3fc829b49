"""Validation rules of a request beyond its types: those that all providers share and that need no schema library.

`Provider.build` rejects what a single provider does not support.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tokenbus.core.request.bounds import MAX_MESSAGES, MAX_TENANT_CHARS, message_over_bounds, over_bounds, tenant_of
from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.events.child_runs import parent_call
from tokenbus.events.quirks import text_problem
from tokenbus.events.sessions import is_reserved


def check_request(request: requests.Request) -> None:
    """Raise RequestInvalid, naming the field, for the first rule that the request breaks.

    - No count or size exceeds its bound in `tokenbus.core.request.bounds`.
    - Names of models, tools and the tenant contain visible text only.
    - Tool names are unique; ``parameters`` is empty or a JSON schema of type object.
    - ``tool_choice`` names a listed tool; ``any`` needs at least one.
    - A system message holds text only. Only an assistant message holds thinking and tool calls. Only a user or tool
      message holds tool results, and a tool message holds nothing else. Calls and results have a ``tool_id``.
    - Inline media are base64, not data URLs, and have a media type.
    - ``metadata.tenant`` is text.
    - ``output_schema`` and ``json_object`` are exclusive.
    - ``fallback`` is incompatible with ``on_failure`` `fail`.
    - Prefill needs ``participant``, the name under which the model writes. It accepts no ``images``, ``output_schema``,
      ``json_object`` or ``strict`` tool, no ``tool_choice`` but ``auto``, and no ban on parallel calls. Its tool names
      must fit into tags.
    - ``prefill`` is valid in mode prefill only. Messages must be separated, the end-of-turn token must not be
      whitespace, and the model's own name can be omitted only if its turn is recognisable otherwise. If the request
      leaves the token open, the provider's applies, and `tokenbus.providers.request.transcript` checks that rule.
    """
    if isinstance(request, requests.Append):
        for where, problem in _append_problems(request):
            raise RequestInvalid(where, problem)
        return
    if isinstance(request, requests.WaitDecision):
        return
    if isinstance(request, requests.Cancel):
        if request.heard_characters is not None and (request.heard_through or -1) < 0:
            raise RequestInvalid("heard_characters", "needs heard_through, the event in whose text they are")
        return
    for where, problem in _problems(request):
        raise RequestInvalid(where, problem)


def _append_problems(append: requests.Append) -> Iterator[tuple[str, str]]:
    """The problems of an append that can be found without its session's configuration."""
    yield from _tenant(append.metadata)
    match append.item:
        case requests.SessionMessage() as item:
            if bool(item.content) == bool(item.messages):
                yield "item.content", "a message has content or messages, and not both"
            message = requests.Message(role=item.role, content=item.content, participant=item.participant)
            yield from _whole_message("item", message)
            yield from _messages_of("item.messages", item.messages)
            yield from _fields_of("item.request", item.request)
            if item.heard_through is not None and item.when_busy not in (None, "interrupt"):
                yield "item.heard_through", "only a message that interrupts cuts what was said"
            if item.now and item.when_busy not in (None, "steer"):
                yield "item.now", "only a message that steers can be in such a hurry"
            if not item.run and (item.when_busy in ("steer", "interrupt") or item.heard_through is not None):
                yield "item.when_busy", "a message that starts no run neither steers nor interrupts one"
        case requests.Configure() as item:
            if item.history and (item.history.provider is None) != (item.history.model is None):
                yield "item.history.model", "who summarises is named by provider and model"
            yield from _fields_of("item.request", item.request)
            yield from _messages_of("item.messages", item.messages)
        case requests.Rewrite() as item:
            yield from _messages_of("item.messages", item.messages)
        case _:
            pass
    if isinstance(append.item, requests.SessionMessage | requests.Interrupt):
        heard = append.item
        if heard.heard_characters is not None and (heard.heard_through or -1) < 0:
            yield "item.heard_characters", "needs heard_through, the event in whose text they are"


def _fields_of(where: str, request: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name in ("id", "messages", "type", "traceparent"):
        if name in request:
            yield f"{where}.{name}", "it is no part of a configuration, for each run has its own"


def _messages_of(where: str, messages: Sequence[requests.Message]) -> Iterator[tuple[str, str]]:
    if len(messages) > MAX_MESSAGES:
        yield where, f"{len(messages)} messages, at most {MAX_MESSAGES}"
    for i, message in enumerate(messages):
        yield from _whole_message(f"{where}[{i}]", message)


def _whole_message(where: str, message: requests.Message) -> Iterator[tuple[str, str]]:
    yield from message_over_bounds(where, message)
    yield from _message(where, message)


def _tenant(metadata: Mapping[str, object] | None) -> Iterator[tuple[str, str]]:
    tenant = (metadata or {}).get("tenant", "")
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_CHARS:
        yield "metadata.tenant", f"must be a text of at most {MAX_TENANT_CHARS} characters"


def check_heard(request: requests.Cancel, newest: int) -> None:
    """Raise RequestInvalid if a listener cannot have heard so much. ``newest``: seq of the run's newest event."""
    if request.heard_through is not None and request.heard_through > newest:
        problem = f"{request.heard_through} is beyond the newest event of run {request.run}, {newest}"
        raise RequestInvalid("heard_through", problem)


def _problems(request: requests.Generate) -> Iterator[tuple[str, str]]:
    yield from over_bounds(request)
    yield from _names(request)
    yield from _tools(request.tools)
    match request.tool_choice:
        case requests.ToolChoice(name=name) if name not in {t.name for t in request.tools}:
            yield "tool_choice.name", f"no tool of the list is called {name!r}"
        case "any" if not request.tools:
            yield "tool_choice", "'any' needs a tool to choose from"
        case _:
            pass
    for i, message in enumerate(request.messages):
        yield from _message(f"messages[{i}]", message)
    yield from media_problems(request)
    if request.json_object and request.output_schema:
        yield "json_object", "`output_schema` asks for JSON already; set one of the two"
    if request.mode == "prefill":
        yield from _prefill(request)
    elif request.prefill:
        yield "prefill", "its options are for mode prefill alone"
    if request.fallback and request.on_failure == "fail":
        yield "fallback", "with on_failure 'fail' the first failure ends the run, so no fallback is ever tried"
    above = parent_call(request.id or "")
    if request.id and is_reserved(request.id) and not above:
        yield "id", "ids that begin like this are those of a session's runs"
    if request.parent is None and above:
        yield "id", "ids that end like this are those of child runs"
    elif request.parent is not None and (above is None or above[0] != request.parent):
        yield "parent", "only a tool call begins a child run, and gives it its id"
    yield from _tenant(request.metadata)


def _names(request: requests.Generate) -> Iterator[tuple[str, str]]:
    """Check names that are compared: invisible characters would make two names look the same."""
    named = [("model", request.model), *((f"tools[{i}].name", tool.name) for i, tool in enumerate(request.tools))]
    named += [(f"fallback[{i}].model", choice.model) for i, choice in enumerate(request.fallback or ())]
    if tenant := tenant_of(request.metadata):
        named.append(("metadata.tenant", tenant))
    for where, name in named:
        if problem := text_problem(name):
            yield where, problem


def _prefill(request: requests.Generate) -> Iterator[tuple[str, str]]:
    if not (request.participant or "").strip():
        yield "participant", "prefill needs the name under which the model writes"
    if request.tool_choice not in (None, "auto"):
        yield "tool_choice", "in prefill nothing can make the model call a tool, or keep it from it"
    if request.images:
        yield "images", "prefill has no form of answer but text"
    if request.output_schema:
        yield "output_schema", "prefill has no form of answer but text"
    if request.json_object:
        yield "json_object", "prefill has no form of answer but text"
    if request.parallel_tool_calls is False:
        yield "parallel_tool_calls", "in prefill nothing can keep the model from a second call"
    for i, tool in enumerate(request.tools):
        if tool.strict:
            yield f"tools[{i}].strict", "in prefill no API enforces a tool's schema"
        if any(char in tool.name for char in '<>"'):
            yield f"tools[{i}].name", "in prefill the name is part of a tag and cannot contain < > or a quotation mark"
    if request.prefill:
        yield from _options(request.prefill, request.participant or "")


def _options(options: requests.PrefillOptions, participant: str) -> Iterator[tuple[str, str]]:
    token, delimiter = options.end_of_turn, options.delimiter
    if token and not token.strip():
        yield "prefill.end_of_turn", "it is blank"
    if not token and delimiter == "":
        yield "prefill.delimiter", "without it and without end_of_turn, messages run into each other"
    if participant in options.unnamed and token == "" and not (delimiter or "").strip():
        yield "prefill.unnamed", "the model's own name can be left out only with end_of_turn or a delimiter that shows"


def _tools(tools: list[requests.Tool]) -> Iterator[tuple[str, str]]:
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            yield f"tools[{i}].name", f"{tool.name!r} is on the list twice"
        names.add(tool.name)
        yield from _schema(f"tools[{i}].parameters", tool.parameters)


def _schema(where: str, schema: dict[str, object]) -> Iterator[tuple[str, str]]:
    if schema and schema.get("type") != "object":
        yield f"{where}.type", f"must be 'object', is {schema.get('type')!r}"
    if not isinstance(schema.get("properties", {}), dict):
        yield f"{where}.properties", "must be an object"
    if not isinstance(schema.get("required", []), list):
        yield f"{where}.required", "must be a list"


def _message(where: str, message: requests.Message) -> Iterator[tuple[str, str]]:
    role = message.role
    if isinstance(message.content, str):
        if role == "tool":
            yield f"{where}.content", "a tool message holds tool_result parts, so that each names its call"
        return
    for i, part in enumerate(message.content):
        at = f"{where}.content[{i}]"
        kind = part.__struct_config__.tag
        allowed = True
        match part:
            case requests.TextPart():
                allowed = role != "tool"
            case requests.ThinkingPart() | requests.ToolCallPart():
                allowed = role == "assistant"
            case requests.ToolResultPart():
                allowed = role in ("user", "tool")
            case _:
                allowed = role in ("user", "assistant")
        if not allowed:
            yield at, f"a {kind} part has no place in a {role} message"
        if isinstance(part, requests.ToolCallPart | requests.ToolResultPart) and not part.tool_id:
            yield f"{at}.tool_id", "must not be empty"
        if isinstance(part, requests.ToolCallPart) and not part.tool_name:
            yield f"{at}.tool_name", "must not be empty"


_TYPE = re.compile(r"\s*[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*\s*(?:;.*)?", re.DOTALL)


def media_problems(request: requests.Generate) -> Iterator[tuple[str, str]]:
    """Each place with invalid media, with the problem."""
    for where, source in _inside(request):
        if not _TYPE.fullmatch(source.media_type):
            yield f"{where}.media_type", f"{source.media_type[:80]!r} is not a media type such as image/png"
        if problem := _base64_problem(source.data):
            yield f"{where}.data", problem


def _base64_problem(data: str) -> str | None:
    if not data:
        return "it is empty"
    if data[:5].lower() == "data:":
        return "it is a data URL: send what follows its comma, and its type as media_type"
    try:
        binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # binascii's own error, or non-ASCII text
        return "it is not base64"
    return None


def _inside(request: requests.Generate) -> Iterator[tuple[str, requests.Base64Source]]:
    """Each inline base64 source with its path."""
    if request.images and request.images.mask:
        yield from _of("images.mask", request.images.mask)
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{i}].content[{j}]"
            yield from _of(where, part)
            if isinstance(part, requests.ToolResultPart) and not isinstance(part.content, str):
                for k, inner in enumerate(part.content):
                    yield from _of(f"{where}.content[{k}]", inner)


def _of(where: str, part: object) -> Iterator[tuple[str, requests.Base64Source]]:
    if isinstance(part, requests.ImagePart | requests.DocumentPart) and isinstance(part.source, requests.Base64Source):
        yield f"{where}.source", part.source


def request_for(request: requests.Generate, choice: int) -> requests.Generate:
    """The request for this choice: 0 is the request's own provider and model, n its n-th fallback.

    The request's `extra` is for its own provider: a fallback uses it only with the same provider, unless the fallback
    has its own `extra`.
    """
    if not choice:
        return request
    assert request.fallback
    fallback = request.fallback[choice - 1]
    extra = fallback.extra
    if extra is None and fallback.provider == request.provider:
        extra = request.extra
    return msgspec.structs.replace(request, provider=fallback.provider, model=fallback.model, extra=extra)


def all_choices(request: requests.Generate) -> list[requests.Generate]:
    """The request for each choice, in the order in which they are tried."""
    return [request_for(request, n) for n in range(1 + len(request.fallback or ()))]


def left_from(request: requests.Generate, choice: int) -> requests.Generate:
    """The request of a run that continues with this choice, without the earlier fallbacks."""
    if not choice:
        return request
    return msgspec.structs.replace(request_for(request, choice), fallback=(request.fallback or [])[choice:])
