"""Each character of every recorded answer comes out once and under one kind.

What an answer says is found without the decoders: the strings under the keys of content, wherever they are in the JSON.
The strings of one path are one voice. Providers repeat a text under several paths. So a voice that is part of another
is a repetition, and the others are all that the answer says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec

from tests.rows import over_rows
from tests.unit.providers.corpus import APIS, Recording, further_recordings, needs_corpus, recordings
from tests.unit.providers.reading import answer, items, read
from tokenbus.events.normalized import Extra

pytestmark = needs_corpus

CONTENT = ("text", "content", "thinking", "reasoning", "reasoning_content", "refusal", "delta")
TELL_APART = ("type", "thought", "object")
"""Neighbouring values that make two strings of one path two voices."""

BY_HAND = "its deltas were cut out by hand"
SHORTENED = {
    "anthropic/vercel-ai__spliced-message-start.sse": "a second message_start voids what came before it",
    "openai_responses/vercel-ai__inline-send-finish-reason-for-incomplete-response.sse": BY_HAND,
    "openai_responses/vercel-ai__openai-shell-container.1.sse": BY_HAND,
}
"""Where the deltas contradict the final forms: what was emitted stays."""
ROWS = [row for row in recordings(*APIS) + further_recordings(*APIS) if row.file not in SHORTENED]


def voices_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """All strings of content, each with its path."""
    if isinstance(value, list):
        for inner in value:  # pyright: ignore[reportUnknownVariableType]
            yield from voices_of(inner, path)
    elif isinstance(value, dict):
        marks = [value.get(key) for key in (*TELL_APART, *(["index"] if path.endswith(".choices") else []))]
        here = f"{path}{marks}"
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(inner, str) and key in CONTENT:
                yield f"{here}.{key}", inner
            yield from voices_of(inner, f"{here}.{key}")


def leaves_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:  # pyright: ignore[reportUnknownVariableType]
            yield from leaves_of(inner)


def solid(text: str) -> str:
    return "".join(text.split())


def events_of(data: bytes) -> list[Any]:
    """The JSON of a body, or of each event of a stream."""
    try:
        return [msgspec.json.decode(data)]
    except msgspec.DecodeError:
        pass
    found: list[Any] = []
    for line in data.replace(b"\r", b"").splitlines():
        try:
            found.append(msgspec.json.decode(line.removeprefix(b"data:")))
        except msgspec.DecodeError:
            continue
    return found


def said_in(data: bytes) -> dict[str, list[str]]:
    """The voices without whitespace, each with its pieces."""
    found: dict[str, list[str]] = {}
    for path, text in voices_of(events_of(data)):
        if solid(text):
            found.setdefault(path, []).append(solid(text))
    return {"".join(pieces): pieces for pieces in found.values()}


def without_repetitions(voices: list[str]) -> str:
    found: list[str] = []
    for voice in sorted(voices, key=len, reverse=True):
        if not any(voice in other for other in found):
            found.append(voice)
    return "".join(found)


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_each_character_of_a_recorded_answer_is_emitted_once_and_under_one_kind(row: Recording) -> None:
    events = read(row.api_name, row.data)
    said = answer(events)
    kinds = [solid(text) for text in (said.text, said.thinking, said.refusal)]
    jsons = [*(e.json for e in events if isinstance(e, Extra)), *(json for *_, json in items(events))]
    leaves = [leaf for json in jsons for leaf in leaves_of(msgspec.json.decode(json))]
    beside = "".join(map(solid, [*leaves, *(arguments for *_, arguments in said.calls)]))
    homes: list[list[tuple[str, int]]] = []
    for voice, pieces in said_in(row.data).items():
        if home := [(voice, at) for at, text in enumerate(kinds) if voice in text]:
            homes.append(home)
        else:
            assert not [piece for piece in pieces if piece not in beside]
    ways = (
        [Counter(without_repetitions([voice for voice, at in way if at == kind])) for kind in range(len(kinds))]
        for way in product(*homes)
    )
    assert any(way == [Counter(text) for text in kinds] for way in ways)
