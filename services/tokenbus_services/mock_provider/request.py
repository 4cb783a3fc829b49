"""Parses requests: model, turn of the conversation, streaming or not.

The turn is derived from the history in the request's body, so the server is stateless: parallel runs do not interfere,
and a retry gets the same turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from html import unescape
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar

import msgspec

from tokenbus.providers.api import ApiName

T = TypeVar("T")

_TRANSCRIPT = re.compile(r"^[^\n:]+: (?P<content>[^\n]*?)(?:\n|<\|\w+\|>)", re.MULTILINE)
"""How a conversation written as one text begins: ``Name: text``, a line per message, or a token after each."""
_RESULTS_END = "</function_results>"
_RESULT = re.compile(r"<(?:result|error) [^>]*>(.*?)</(?:result|error)>", re.DOTALL)


class HttpError(Exception):
    """The request is rejected with ``status`` and a message in the API's own error format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class HistoryItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of the history: what the model or the user wrote, or a tool returned."""

    role: Literal["model", "user", "tool"]
    text: str = ""
    calls: tuple[str, ...] = ()
    """model: ids of the tool calls it made."""
    call_id: str = ""
    """tool: id of the call that this is the result of."""


class ParsedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A request as parsed by an API's module."""

    model: str
    stream: bool
    history_field: str
    """The body's field that holds the history."""
    messages: list[tuple[HistoryItem, ...]]
    """The history items of each message in that field; none for instructions."""
    stop_strings: tuple[str, ...] = ()
    """The stop strings."""
    is_transcript: bool = False
    """The history is one text, in which instructions stand before the conversation."""


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request after interpretation."""

    api: ApiName
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Mapping[str, Any]
    model: str
    stream: bool
    turn: int
    """0 for the first; one more for each time that the model spoke and was answered."""
    user_text: str
    """The user's last text."""
    tool_results: tuple[str, ...]
    """The results that tools returned since the model last spoke."""
    key: str
    """Same for each try of one turn of one conversation: a digest of API and body, without a prefill at its end.

    Two conversations with the same words have the same key; tests that run in parallel say something of their own.
    """

    prefill: str = ""
    """The text that the model continues: the beginning of its own message, or a conversation as one text."""
    stop_strings: tuple[str, ...] = ()

    @property
    def token(self) -> str:
        """The last word of the user's last text, which distinguishes runs of one script."""
        words = self.user_text.rsplit(maxsplit=1)
        return words[-1] if words else ""


def interpret(api: ApiName, parsed: ParsedBody, headers: Mapping[str, str], body: Mapping[str, Any]) -> ModelRequest:
    """Interpret a request. Raises Rejected if calls and results do not match."""
    messages = list(parsed.messages)
    prefill = ""
    while messages and messages[-1] and all(item.role == "model" for item in messages[-1]):
        # A prefill: the requested turn has already begun.
        prefill = join_texts(item.text for item in messages.pop()) + prefill
    history = list(chain.from_iterable(messages))
    _check_results(history)
    without_prefill = (
        {**body, parsed.history_field: body[parsed.history_field][: len(messages)]}
        if len(messages) < len(parsed.messages)
        else body
    )
    transcript = (_TRANSCRIPT.search if parsed.is_transcript else _TRANSCRIPT.match)(prefill)
    if transcript or _RESULTS_END in prefill:  # after an image the text continues in the middle of a conversation
        first_line = transcript["content"] if transcript else ""
        return _interpret_transcript(api, parsed, (headers, body, without_prefill), prefill, first_line)
    return ModelRequest(
        api=api,
        headers=headers,
        body=body,
        model=parsed.model,
        stream=parsed.stream,
        turn=sum(before.role == "model" != after.role for before, after in pairwise(history)),
        user_text=next((item.text for item in reversed(history) if item.role == "user" and item.text), ""),
        tool_results=_latest_results(history),
        key=blake2b(msgspec.json.encode((api, without_prefill), order="sorted"), digest_size=16).hexdigest(),
        prefill=prefill,
    )


def _interpret_transcript(
    api: ApiName,
    parsed: ParsedBody,
    request: tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]],
    text: str,
    first_line: str,
) -> ModelRequest:
    """Interpret a request whose text to continue is the whole conversation. Its turn is the number of results in it.

    ``request``: headers, body, and the body without that text; ``first_line``: the content of the text's first line.
    """
    headers, body, without_prefill = request
    answered, results, _ = text.rpartition(_RESULTS_END)
    of_turn = answered if results else first_line
    latest = answered.rpartition("<function_results>")[2]
    return ModelRequest(
        api=api,
        headers=headers,
        body=body,
        model=parsed.model,
        stream=parsed.stream,
        turn=text.count(_RESULTS_END),
        user_text=first_line,
        tool_results=tuple(unescape(found[1]) for found in _RESULT.finditer(latest)),
        key=blake2b(msgspec.json.encode((api, without_prefill, of_turn), order="sorted"), digest_size=16).hexdigest(),
        prefill=text,
        stop_strings=parsed.stop_strings,
    )


def decode_as(json: object, shape: type[T], *, strict: bool = True) -> T:
    """Decoded JSON as a type with the fields that matter here; not ``strict``: numbers and truth may be texts. Raises
    Rejected, saying which field is wrong."""
    try:
        return msgspec.convert(json, shape, strict=strict)
    except msgspec.ValidationError as e:
        raise HttpError(400, str(e)) from None


def join_texts(texts: Iterable[str]) -> str:
    """The text of a message made of parts."""
    return "\n".join(text for text in texts if text)


def _check_results(history: Sequence[HistoryItem]) -> None:
    """Check that each call is answered before anything else, and that each result answers such a call.

    Anthropic and OpenAI both reject anything else, so a client that passes has not lost a call.
    """
    open_calls: set[str] = set()
    before = None
    for item in history:
        if item.role == "tool":
            if item.call_id and item.call_id not in open_calls:
                raise HttpError(400, f"a tool result answers {item.call_id!r}, which is no call of the turn before it")
            open_calls.discard(item.call_id)
        elif open_calls and not before == item.role == "model":
            break
        open_calls.update(item.calls)
        before = item.role
    if open_calls:
        raise HttpError(400, f"tool calls without a result right after them: {', '.join(sorted(open_calls))}")


def _latest_results(history: Sequence[HistoryItem]) -> tuple[str, ...]:
    last = max((i for i, item in enumerate(history) if item.role == "model"), default=-1)
    return tuple(item.text for item in history[last + 1 :] if item.role == "tool")


MULTIPART = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_NAME = re.compile(r'(?<!file)name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r'filename="([^"]*)"', re.IGNORECASE)
_ESCAPED = {"%22": '"', "%0D": "\r", "%0A": "\n"}


def read_form(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields: a text as str, a file as its ``filename``, ``media_type`` and ``data``, and a list if a name ends
    with ``[]``. Raises Rejected."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise HttpError(400, "the form has no boundary")
    first, *parts = (b"\r\n" + body).split(b"\r\n--" + (found[1] or found[2]).encode())
    if first or not parts or parts.pop().rstrip(b"\r\n") != b"--":
        raise HttpError(400, "the form does not begin and end with its boundary")
    fields: dict[str, Any] = {}
    for part in parts:
        name, value = _read(part)
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise HttpError(400, f"Duplicate parameter: {name!r}")
        else:
            fields[name] = value
    return fields


def _read(part: bytes) -> tuple[str, Any]:
    head, blank, content = part.partition(b"\r\n\r\n")
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n")[1:]:
        header, _, value = line.partition(":")
        headers[header.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
    if not (blank and name):
        raise HttpError(400, "a part of the form has no name")
    if filename is None:
        return _plain(name[1]), content.decode("utf-8", "replace")
    media_type = headers.get("content-type", "application/octet-stream")
    return _plain(name[1]), {"filename": _plain(filename[1]), "media_type": media_type, "data": content}


def _plain(name: str) -> str:
    for escaped, character in _ESCAPED.items():
        name = name.replace(escaped, character)
    return name
