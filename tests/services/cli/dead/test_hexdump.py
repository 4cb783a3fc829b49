"""Undecodable bytes shown as text."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from tokenbus_services.cli.dead import MOST_DUMPED, readable


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"", "empty", ""),
        (b"plain words", "text", "plain words"),
        (b'{"a":', "text", '{"a":'),
        (b"7", "text", "7"),
        ("héé".encode(), "text", "héé"),
        (b"\xff\x00 A", "binary", "00000000  ff 00 20 41" + " " * 38 + ".. A"),
        (b"\x91" * 5000, "binary", None),
        (b"[" * 5000, "text", "[" * 5000),
    ],
)
def test_bytes_are_shown_as_what_they_are(data: bytes, kind: str, text: str | None):
    found, shown = readable(data)
    assert found == kind
    assert text is None or shown == text


@pytest.mark.parametrize(("kind", "encode"), [("JSON", msgspec.json.encode), ("msgpack", msgspec.msgpack.encode)])
def test_structure_is_shown_as_indented_json(kind: str, encode: Callable[[object], bytes]):
    value = {"model": "m", "messages": [1, 2]}
    found, shown = readable(encode(value))
    assert (found, json.loads(shown)) == (kind, value)
    assert "\n" in shown


def test_a_dump_is_bounded_and_says_so():
    _, shown = readable(b"\xff" * (MOST_DUMPED + 10))
    assert len(shown.splitlines()) == MOST_DUMPED // 16 + 1
    assert "10 bytes more" in shown.splitlines()[-1]
