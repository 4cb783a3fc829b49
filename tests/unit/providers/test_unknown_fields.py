"""Nothing of an answer is dropped in silence: an unknown field at any level comes out, or is named here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.unit.providers.corpus import APIS, Recording, further_recordings, needs_corpus, recordings
from tests.unit.providers.reading import items, read
from tokenbus.events.normalized import Done, Extra, Failed, Opaque, ToolCallDelta, UsageSeen

FIELD = "x_unheard_of"
STREAMS_OF_A_HOST = 4
"""How many of the recordings of one host are tried."""

DROPPED = {
    "openai-chat": (
        r"\.error\b",
        r"\.reasoning_details\[\]",  # sent back as a whole if they are signed
        r"\.x_groq\.usage",  # the usage once more
    ),
    "anthropic": (
        r"ping$",
        r"\.error\b",
        r"content_block\.input",  # empty: the deltas have the input
    ),
    "openai-responses": (
        r"\.error\b|incomplete_details",
        # the start of a response, an item or a part: its end has all of it
        r"^response\.(created|in_progress|queued)\.response(\.|$)",
        r"^response\.output_item\.added\.item",
        r"^response\.(content_part|reasoning_summary_part)\.added\.part",
        r"^response\.(completed|incomplete|failed)\.response\.output\[\]",
        # the end of a part repeats what its deltas had
        r"\.(done|item|part)\b.*\.(annotations|logprobs)\[\]",
        # settings of the request
        r"\.(tools|text|reasoning|tool_choice|metadata|instructions|prompt|input)(\[\])?(\.|$)",
        r"keepalive$",
    ),
    "gemini": (r"\.error\b",),
}
"""Where a field is dropped on purpose, by its place: the type of the event, and the names on the way."""


def objects_in(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects of a JSON value, with their places."""
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from objects_in(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            yield from objects_in(inner, f"{path}[]")


def with_unknown_fields(data: bytes) -> tuple[bytes, dict[str, str]]:
    """The body with a further field in each of its objects; and the place of each by the field's value."""
    places: dict[str, str] = {}

    def changed(json: bytes) -> bytes:
        try:
            value = msgspec.json.decode(json)
        except msgspec.DecodeError:
            return json
        for path, inner in list(objects_in(value, str(value.get("type", "")) if isinstance(value, dict) else "")):
            inner[FIELD] = f"mark-{len(places)}-"
            places[inner[FIELD]] = path
        return msgspec.json.encode(value)

    if (whole := changed(data)) != data:
        return whole, places
    lines = data.split(b"\n")
    for at, line in enumerate(lines):
        if found := re.match(rb"data: ?(.*?)\r?$", line):
            lines[at] = b"data: " + changed(found[1])
    return b"\n".join(lines), places


def said_in(events: list[Any]) -> str:
    """Everything that the events say."""
    said: list[str] = []
    for event in events:
        match event:
            case Extra():
                said.append(event.json)
            case Opaque():
                said.append(event.value)
            case ToolCallDelta():
                said.append(event.fragment)
            case UsageSeen() | Done():
                said.append(str(event.usage and event.usage.raw))
            case Failed():
                said.append(str(event.error))
            case _:
                pass
    return "".join(said) + str(list(items(events)))


def some_recordings() -> list[Recording]:
    """A few of each host, streamed and whole."""
    chosen: dict[tuple[str, str, bool], list[Recording]] = {}
    for row in recordings(*APIS) + further_recordings(*APIS):
        chosen.setdefault((row.api, row.vendor, row.file.endswith(".sse")), []).append(row)
    return [row for rows in chosen.values() for row in rows[:STREAMS_OF_A_HOST]]


@needs_corpus
@pytest.mark.parametrize("row", some_recordings(), ids=lambda row: row.file)
def test_an_unknown_field_at_any_level_comes_out_or_is_named(row: Recording) -> None:
    data, places = with_unknown_fields(row.data)
    said = said_in(read(row.api_name, data))
    heard = {place for mark, place in places.items() if mark in said}  # where a value is repeated, the last one counts
    missing = set(places.values()) - heard
    rules = DROPPED[row.api_name]
    assert {place for place in missing if not any(re.search(rule, place) for rule in rules)} == set()
