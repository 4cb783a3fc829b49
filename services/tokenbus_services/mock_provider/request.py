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

_TRANSCRIPT = re.compile(r"^[^\n:]+: (?P<said>[^\n]*?)(?:\n|<\|\w+\|>)", re.MULTILINE)
"""How a conversation written as one text begins: ``Name: text``, a line per message, or a token after each."""
_RESULTS_END = "</function_results>"
_RESULT = re.compile(r"<(?:result|error) [^>]*>(.*?)</(?:result|error)>", re.DOTALL)


class Refused(Exception):
    """The request is rejected with ``status`` and a message in the API's own error format."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One contribution to the history."""

    by: Literal["model", "user", "tool"]
    text: str = ""
    calls: tuple[str, ...] = ()
    """model: ids of the tool calls it made."""
    answers: str = ""
    """tool: id of the call that this is the result of."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A request as parsed by an API's module."""

    model: str
    stream: bool
    history: str
    """The body's field that holds the history."""
    said: list[tuple[Said, ...]]
    """Contributions of each item of that field; none for instructions."""
    stops: tuple[str, ...] = ()
    """The stop strings."""
    written: bool = False
    """The history is one text, in which instructions stand before the conversation."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
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
    """What tools gave back since the model last spoke."""
    key: str
    """Same for each try of one turn of one conversation: a digest of API and body, without a prefill at its end.

    Two conversations with the same words have the same key; tests that run in parallel say something of their own.
    """

    prefilled: str = ""
    """The text that the model is to continue: the beginning of its own message, or a conversation as one text."""
    stops: tuple[str, ...] = ()

    @property
    def token(self) -> str:
        """The last word of the user's last text, which tells runs of one script apart."""
        words = self.user_text.rsplit(maxsplit=1)
        return words[-1] if words else ""


def understand(api: ApiName, heard: RequestOptions, headers: Mapping[str, str], body: Mapping[str, Any]) -> Asked:
    """Interpret a request. Raises Refused if calls and results do not match."""
    said = list(heard.said)
    begun = ""
    while said and said[-1] and all(one.by == "model" for one in said[-1]):
        # A prefill: the requested turn has already begun.
        begun = joined(one.text for one in said.pop()) + begun
    history = list(chain.from_iterable(said))
    _check_results(history)
    asked_of = {**body, heard.history: body[heard.history][: len(said)]} if len(said) < len(heard.said) else body
    written = (_TRANSCRIPT.search if heard.written else _TRANSCRIPT.match)(begun)
    if written or _RESULTS_END in begun:  # after an image in it the text goes on in the middle
        return _continuing(api, heard, (headers, body, asked_of), begun, written["said"] if written else "")
    return Asked(
        api=api,
        headers=headers,
        body=body,
        model=heard.model,
        stream=heard.stream,
        turn=sum(before.by == "model" != after.by for before, after in pairwise(history)),
        user_text=next((one.text for one in reversed(history) if one.by == "user" and one.text), ""),
        tool_results=_latest_results(history),
        key=blake2b(msgspec.json.encode((api, asked_of), order="sorted"), digest_size=16).hexdigest(),
        prefilled=begun,
    )


def _continuing(
    api: ApiName,
    heard: RequestOptions,
    sent: tuple[Mapping[str, str], Mapping[str, Any], Mapping[str, Any]],
    text: str,
    line: str,
) -> Asked:
    """Interpret a request whose text to continue is the whole conversation. Its turn is the number of results in it.

    ``sent``: headers, body, and the body without that text; ``line``: the content of the text's first line.
    """
    headers, body, asked_of = sent
    settled, results, _ = text.rpartition(_RESULTS_END)
    of_turn = settled if results else line
    given = settled.rpartition("<function_results>")[2]
    return Asked(
        api=api,
        headers=headers,
        body=body,
        model=heard.model,
        stream=heard.stream,
        turn=text.count(_RESULTS_END),
        user_text=line,
        tool_results=tuple(unescape(found[1]) for found in _RESULT.finditer(given)),
        key=blake2b(msgspec.json.encode((api, asked_of, of_turn), order="sorted"), digest_size=16).hexdigest(),
        prefilled=text,
        stops=heard.stops,
    )


def read_as(json: object, shape: type[T], *, strict: bool = True) -> T:
    """Decoded JSON as a type with the fields that matter here; not ``strict``: numbers and truth may be texts. Raises
    Refused, saying which field is wrong."""
    try:
        return msgspec.convert(json, shape, strict=strict)
    except msgspec.ValidationError as e:
        raise Refused(400, str(e)) from None


def joined(texts: Iterable[str]) -> str:
    """The text of a message made of parts."""
    return "\n".join(text for text in texts if text)


def _check_results(history: Sequence[Said]) -> None:
    """Check that each call is answered before anything else, and that each result answers such a call.

    Anthropic and OpenAI both reject anything else, so a client that passes has not lost a call.
    """
    open_calls: set[str] = set()
    before = None
    for one in history:
        if one.by == "tool":
            if one.answers and one.answers not in open_calls:
                raise Refused(400, f"a tool result answers {one.answers!r}, which is no call of the turn before it")
            open_calls.discard(one.answers)
        elif open_calls and not before == one.by == "model":
            break
        open_calls.update(one.calls)
        before = one.by
    if open_calls:
        raise Refused(400, f"tool calls without a result right after them: {', '.join(sorted(open_calls))}")


def _latest_results(history: Sequence[Said]) -> tuple[str, ...]:
    last = max((i for i, one in enumerate(history) if one.by == "model"), default=-1)
    return tuple(one.text for one in history[last + 1 :] if one.by == "tool")
