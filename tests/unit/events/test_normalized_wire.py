"""The msgpack of normalised events: arrays with the tag first, so that workers of two versions read each other."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.usage import Usage

GOLDEN: list[tuple[n.Normalized, list[Any]]] = [
    (
        n.Start("m", "msg_1", 2, "gemini", "g", 5, "req_1", steers=True),
        ["start", "m", "msg_1", 2, "gemini", "g", 5, "req_1", True],
    ),
    (n.BlockStart(0, "text", "", "q"), ["open", 0, "text", "", "q"]),
    (n.TextDelta(0, "Hel"), ["text", 0, "Hel"]),
    (n.RefusalDelta(0, "No"), ["refusal", 0, "No"]),
    (n.ThinkingDelta(1, "hm"), ["thinking", 1, "hm"]),
    (n.BlockStop(0), ["close", 0]),
    (n.ToolCallStart(2, "t1", "weather", derived=True), ["call", 2, "t1", "weather", True, False]),
    (n.ToolCallDelta(2, '{"ci'), ["args", 2, '{"ci']),
    (n.ToolCallDone(2), ["called", 2, ""]),
    (n.Opaque(1, "encrypted", "s", "sha256:0"), ["opaque", 1, "encrypted", "s", "sha256:0"]),
    (
        n.Image(3, "image/png", "aGk=", True, "a cat", True, "cat", "gpt-image-2", "8x8", "low", "sha256:0", 2, 8, 9),
        ["image", 3, "image/png", "aGk=", True, "a cat", True, "cat", "gpt-image-2", "8x8", "low", "sha256:0", 2, 8, 9],
    ),
    (n.TranscriptDelta(4, "Hi"), ["transcript", 4, "Hi"]),
    (
        n.Audio(4, "audio/wav", "aGk=", "a1", 5, "sha256:0", 2),
        ["audio", 4, "audio/wav", "aGk=", "a1", 5, "sha256:0", 2],
    ),
    (n.ItemProgress(2, "searching"), ["progress", 2, "searching"]),
    (n.Extra("citation", "{}", 0), ["extra", "citation", "{}", 0]),
    (n.ItemStart(2, "a.b", "web_search", "s"), ["item", 2, "a.b", "web_search", "s"]),
    (
        n.ApprovalAsked(2, "m1", "del", "{}", "files", "a.b", allow="1", deny="0"),
        ["asks", 2, "m1", "del", "{}", "files", "a.b", "1", "0"],
    ),
    (n.UsageSeen(Usage(input=1)), ["usage", {"input": 1}]),
    (
        n.Done("tool_use", "tool_calls", Usage(output=2), "END"),
        ["done", "tool_use", "tool_calls", {"output": 2}, "END"],
    ),
    (
        n.Failed(ErrorInfo(code="c", kind="rate_limit", message="m", retryable=True), 5),
        ["failed", {"code": "c", "class": "rate_limit", "message": "m", "retryable": True}, 5],
    ),
    (
        n.Cut("lost", ErrorInfo(code="worker_lost", kind="internal", message="m"), 5),
        ["cut", "lost", {"code": "worker_lost", "class": "internal", "message": "m"}, 5],
    ),
]


@pytest.mark.parametrize(("event", "golden"), GOLDEN)
def test_a_normalised_event_is_exactly_its_golden_array_both_ways(event: n.Normalized, golden: list[Any]):
    data = msgspec.msgpack.encode(event)
    assert data == msgspec.msgpack.encode(golden)
    assert msgspec.msgpack.decode(data, type=n.Normalized) == event


def test_every_normalised_event_has_a_golden_form():
    assert {type(event) for event, _ in GOLDEN} == set(get_args(n.Normalized))


@pytest.mark.parametrize(("event", "golden"), GOLDEN)
def test_a_field_that_a_later_version_adds_at_the_end_is_ignored(event: n.Normalized, golden: list[Any]):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([*golden, "later"]), type=n.Normalized) == event
