"""UI messages of the AI SDK as messages of the bus. Pure.

An assistant's message holds its steps one after the other, each begun by `step-start`; a step becomes the model's
message and the results of its calls. What only the screen needs is left out (sources, data parts, unfinished calls),
and so is what a retry voided. A part of an unknown type is refused by its place.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import msgspec

from tokenbus.events import requests
from tokenbus_services.gateway.problem import invalid, unsupported
from tokenbus_services.gateway.surfaces.ai_sdk_ui.parts import ITEM, METADATA
from tokenbus_services.gateway.surfaces.contract import GivenAnswer
from tokenbus_services.gateway.surfaces.hosted import originals

Json = dict[str, Any]
_IGNORED = ("source-url", "source-document", "reasoning-file")
DENIED = "Tool call execution denied."


def messages_of(values: list[object]) -> list[requests.Message]:
    """The conversation. Raises Refusal, naming the message or part at fault."""
    messages: list[requests.Message] = []
    for i, value in enumerate(values):
        at = f"messages[{i}]"
        message = _object(value, at)
        parts = [_object(part, f"{at}.parts[{n}]") for n, part in enumerate(_list(message.get("parts"), f"{at}.parts"))]
        match message.get("role"):
            case "system":
                content = "".join(_text(part, f"{at}.parts[{n}]") for n, part in enumerate(parts))
                messages.append(requests.Message(role="system", content=content))
            case "user":
                collected = list(_user_parts(parts, at))
                if collected:
                    messages.append(requests.Message(role="user", content=collected))
            case "assistant":
                messages += _assistant(parts, at)
            case other:
                raise invalid(f"{at}.role", f"must be system, user or assistant, not {other!r:.100}")
    return messages


def given_in(values: list[Json], *, results: bool) -> tuple[list[GivenAnswer], bool]:
    """What the last step of the model's last message answers to its run, and whether nothing was said after it.

    ``results``: the results of the page's tools too.
    """
    at = next((n for n in range(len(values) - 1, -1, -1) if values[n].get("role") == "assistant"), None)
    if at is None:
        return [], False
    metadata, parts = values[at].get("metadata"), cast("list[Json]", values[at]["parts"])
    run = cast("Json", metadata).get("run") if isinstance(metadata, dict) else None
    begins = max((n for n, part in enumerate(parts) if part.get("type") == "step-start"), default=0)
    given: list[GivenAnswer] = []
    for n, part in enumerate(parts[begins:], begins):
        kind, where = str(part.get("type")), f"messages[{at}].parts[{n}]"
        if not (kind == "dynamic-tool" or kind.startswith("tool-")):
            continue
        match part.get("state"):
            case "approval-responded":
                given.append(_approval(part, where))
            case "output-available" | "output-error" as state if results and not part.get("providerExecuted"):
                failed = state == "output-error"
                given.append(
                    GivenAnswer(
                        at=where,
                        run=run if isinstance(run, str) else "",
                        tool_id=_required(part, "toolCallId", where),
                        content=part.get("errorText") if failed else part.get("output"),
                        is_error=failed,
                    )
                )
            case _:
                pass
    return given, at == len(values) - 1


def _approval(part: Json, where: str) -> GivenAnswer:
    at = f"{where}.approval"
    approval = _object(part.get("approval"), at)
    approved, reason = approval.get("approved"), approval.get("reason")
    if not isinstance(approved, bool):
        raise invalid(f"{at}.approved", "must be true or false")
    if not isinstance(reason, str | None):
        raise invalid(f"{at}.reason", "must be a string")
    return GivenAnswer(at=f"{at}.id", name=_required(approval, "id", at), approved=approved, reason=reason)


def _user_parts(parts: list[Json], at: str) -> Iterator[requests.ContentPart]:
    for n, part in enumerate(parts):
        where = f"{at}.parts[{n}]"
        match part.get("type"):
            case "text":
                yield requests.TextPart(text=_text(part, where))
            case "file":
                yield _file(part, where)
            case str(kind) if kind.startswith("data-"):
                pass
            case other:
                raise unsupported(
                    f"{where}.type", f"a part of type {other!r:.100} is not supported in a user's message"
                )


def _assistant(parts: list[Json], at: str) -> list[requests.Message]:
    """Each step's message and its results."""
    messages: list[requests.Message] = []
    content: list[requests.ContentPart] = []
    results: list[requests.ContentPart] = []

    def step() -> None:
        if content:
            messages.append(requests.Message(role="assistant", content=[*content]))
        if results:
            messages.append(requests.Message(role="tool", content=[*results]))
        content.clear()
        results.clear()

    for n, part in enumerate(parts):
        where = f"{at}.parts[{n}]"
        kind = part.get("type")
        back = _provider_values(part.get("providerMetadata"), f"{where}.providerMetadata")
        if back.pop("void", False) or back.pop("shown", False):
            continue
        cut = back.pop("cut", False)
        match kind:
            case "step-start":
                step()
            case "text":
                if text := _text(part, where):
                    content.append(requests.TextPart(text=text, **_without(back, "signature")))
            case "reasoning":
                if not cut:
                    content.append(requests.ThinkingPart(text=_text(part, where), **back))
            case "file":
                content.append(_file(part, where))
            case str() if kind == "dynamic-tool" or kind.startswith("tool-"):
                if called := _tool(part, where):
                    content.append(called[0])
                    results.append(called[1])
            case str() if kind == ITEM:
                content += originals([part.get("data")])
            case str() if kind in _IGNORED or kind.startswith("data-"):
                pass
            case _:
                raise unsupported(f"{where}.type", f"a part of type {kind!r:.100} is not supported")
    step()
    return messages


def _tool(part: Json, where: str) -> tuple[requests.ToolCallPart, requests.ToolResultPart] | None:
    """A call and its result; None for a call that has none."""
    back = _provider_values(part.get("callProviderMetadata"), f"{where}.callProviderMetadata")
    given = _provider_values(part.get("resultProviderMetadata"), f"{where}.resultProviderMetadata")
    if back.get("void") or given.get("void") or back.get("shown") or part.get("preliminary"):
        return None
    match part.get("state"):
        case "output-available":
            output, failed = part.get("output"), False
        case "output-error":
            output, failed = part.get("errorText"), True
        case "output-denied":
            output, failed = DENIED, True
        case _:
            return None
    tool_id = _required(part, "toolCallId", where)
    kind = str(part["type"])
    tool_name = _required(part, "toolName", where) if kind == "dynamic-tool" else kind.removeprefix("tool-")
    arguments = part.get("rawInput") if part.get("input") is None else part.get("input")
    call = requests.ToolCallPart(
        tool_id=tool_id,
        tool_name=tool_name,
        arguments="{}" if arguments is None else _as_text(arguments),
        **_without(back, "signature", "cut"),
    )
    content = "" if output is None else _as_text(output)
    return call, requests.ToolResultPart(tool_id=tool_id, tool_name=tool_name, content=content, is_error=failed)


def _file(part: Json, where: str) -> requests.ImagePart | requests.DocumentPart:
    if part.get("providerReference") is not None:
        raise unsupported(f"{where}.providerReference", "a file stored with a provider is not supported")
    media_type = _required(part, "mediaType", where)
    back = _provider_values(part.get("providerMetadata"), f"{where}.providerMetadata")
    blob_id = back.pop("blob_id", None)
    source = (
        requests.BlobSource(blob_id=blob_id, media_type=media_type) if blob_id else _source(part, media_type, where)
    )
    if media_type.startswith("image/"):
        return requests.ImagePart(source=source, **_without(back, "signature", "cut", "void"))
    title = part.get("filename")
    return requests.DocumentPart(source=source, title=title if isinstance(title, str) else None)


def _source(part: Json, media_type: str, where: str) -> requests.Source:
    url = _required(part, "url", where)
    if url.startswith(("https://", "http://")):
        return requests.UrlSource(url=url)
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise invalid(f"{where}.url", "must be a data: url, or one of http or https")
    if not head.endswith(";base64"):
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return requests.Base64Source(media_type=media_type, data=data)


def _provider_values(value: object, where: str) -> Json:
    """Our own values in a part's provider metadata, as the encoder wrote them. Raises Refusal."""
    if not isinstance(value, dict):
        return {}
    ours = cast("Json", value).get(METADATA)
    if ours is None:
        return {}
    try:
        read = msgspec.convert(ours, _Kept)
    except msgspec.ValidationError as e:
        raise invalid(f"{where}.{METADATA}", str(e)) from None
    return {name: each for name, each in msgspec.structs.asdict(read).items() if each}


class _Kept(msgspec.Struct, frozen=True):
    """What `parts.provider_metadata` and the encoder write."""

    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    blob_id: str | None = None
    cut: bool = False
    void: bool = False


def _without(values: Json, *names: str) -> Json:
    return {name: value for name, value in values.items() if name not in (*names, "blob_id")}


def _text(part: Json, where: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", "must be a string")
    return text


def _required(part: Json, name: str, where: str) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}", "must be a string that is not empty")
    return value


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _object(value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(where, "must be an object")
    return cast("Json", value)


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise invalid(where, "must be a list")
    return cast("list[object]", value)
