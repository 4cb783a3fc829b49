"""What holds of any bytes from any provider: the check that the fuzzer runs.

No exception; exactly one terminal event, the last; every event can travel; the same events however the bytes are cut,
with the decoder saved and restored between any two pieces; and a state that is bounded by what came in.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tests.unit.providers.reading import answer, cut
from tokenbus.events.normalized import Normalized
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.providers import registry
from tokenbus.providers.response.sse import SseDecoder

APIS: tuple[ApiName, ...] = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
QUIRKS = (Quirks(), Quirks(inline_thinking=("think",)))
STATUSES = (200, 200, 200, 200, 200, 429, 503, 302)
SMALL_LIMIT = 200
"""Bytes of an event, for some inputs, so that its limit is met."""
HEAD = 3
"""Bytes of an input that choose how its rest is read."""


def seed(api: ApiName, data: bytes) -> bytes:
    """An input that reads this data as an answer of this API, all else usual."""
    return bytes([APIS.index(api), 0, 1]) + data


def check(given: bytes) -> None:
    """Read an input, whole and in pieces. Raises AssertionError, or any error that a decoder must not raise."""
    if len(given) < HEAD:
        return
    api, way, cuts = given[:HEAD]
    data = given[HEAD:]
    name = APIS[api % len(APIS)]
    reader = _decoder(name, way)
    whole = reader.feed(data)
    size = len(msgspec.msgpack.encode(reader))
    assert size <= 16_384 + 16 * len(data), f"{size} bytes of state after {len(data)} of input"
    whole += reader.end()
    answer(whole)
    assert reader.feed(data) + reader.end() == [], "nothing comes after the terminal event"
    for event in whole:
        msgspec.msgpack.encode(event)
    chance = random.Random(cuts)
    places = [chance.randint(0, len(data)) for _ in range(cuts % 8)]
    assert _in_pieces(name, way, cut(data, places)) == whole


def _decoder(api: ApiName, way: int) -> Any:
    quirks = QUIRKS[(way >> 4) % len(QUIRKS)]
    reader: Any = registry.get(api).decoder(
        status=STATUSES[way % len(STATUSES)], headers={}, stream=not way & 8, quirks=quirks
    )
    if way & 32:
        reader.sse = SseDecoder(limit=SMALL_LIMIT)
    return reader


def _in_pieces(api: ApiName, way: int, pieces: list[bytes]) -> list[Normalized]:
    reader = _decoder(api, way)
    events: list[Normalized] = []
    for piece in pieces:
        events += reader.feed(piece)
        reader = registry.get(api).restore(msgspec.msgpack.encode(reader))
    return events + reader.end()
