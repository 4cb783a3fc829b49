"""All recorded streams of the two APIs: what they say, and the same for any cutting of their bytes."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from tests.unit.providers.corpus import Recording, needs_corpus, recordings
from tests.unit.providers.reading import answer, cut, read, read_pieces
from tokenbus.events.normalized import Cut, Done, Extra, Failed, Normalized, Opaque, UsageSeen

pytestmark = needs_corpus

ROWS = recordings("anthropic", "openai_chat")

WE_DIFFER: dict[str, dict[str, str]] = {
    "vercel-ai__anthropic-programmatic-tool-calling.1.resp3.sse": {
        "arguments": "the input came whole: its raw text is kept, where the manifest wrote it anew with spaces",
    },
    "vercel-ai__inline-use-non-empty-input-from-content_block_start-for-deferred-tool-calls.sse": {
        "arguments": "the input came whole: its raw text is kept, where the manifest wrote it anew with spaces",
        "finish": "the stream has no message_stop: cut, and a cut stream has no finish",
    },
    "vercel-ai__inline-include-caller-info-when-tool_use-has-caller-field-from-code_execution.sse": {
        "finish": "the stream has no message_stop: cut, and a cut stream has no finish",
    },
    "vercel-ai__inline-NOT-prepend-empty-input-when-deltas-follow-content_block_start.sse": {
        "finish": "the stream has no message_stop: cut, and a cut stream has no finish",
    },
    "pydantic-pydantic-ai__test_groq_model_thinking_part_iter.sse": {
        "usage": "Groq's counts stand in x_groq alone, which the manifest has apart",
    },
    "pydantic-pydantic-ai__test_groq_model_web_search_tool_stream.sse": {
        "usage": "Groq's counts stand in x_groq alone, which the manifest has apart",
    },
    "vercel-ai__inline-preserve-structured-error-stream-parts.sse": {
        "terminated": "the error ends the attempt; [DONE] after it is nothing",
    },
    "vercel-ai__inline-handle-unparsable-stream-parts.sse": {
        "error": "an event that is no JSON ends the attempt (providers.md, For all four, 9)",
        "terminated": "the same",
    },
}
"""Where we are right and the manifest is not, and why."""

BLOCK_KINDS = {"tool_use": "tool_call", "redacted_thinking": "thinking", "text": "text", "thinking": "thinking"}


def marks(values: list[str]) -> list[str]:
    return [hashlib.sha256(value.encode()).hexdigest()[:16] for value in values]


def opaque(events: list[Normalized], name: str) -> list[str]:
    """The values of the blocks that stand, by ordinal."""
    void = max((getattr(event, "void_before", 0) for event in events), default=0)
    return [e.value for e in events if isinstance(e, Opaque) and e.name == name and e.block >= void]


def kind_of(block: dict[str, Any]) -> str:
    kind: str = block["type"]
    return "tool_call" if kind.startswith("tool:") else BLOCK_KINDS.get(kind, f"anthropic.{kind}")


def found_in(events: list[Normalized]) -> dict[str, Any]:
    said = answer(events)
    usages = [event.usage.raw for event in events if isinstance(event, UsageSeen)]
    return {
        "model": said.model,
        "text": said.text,
        "thinking": said.thinking,
        "refusal": said.refusal,
        "calls": [call[:2] for call in said.calls],
        "arguments": [call[2] for call in said.calls],
        "blocks": said.kinds,
        "signatures": marks(opaque(events, "signature")),
        "redacted": marks(opaque(events, "redacted")),
        "citations": sum(isinstance(event, Extra) and event.name == "anthropic.citation" for event in events),
        "finish": said.terminal.finish_raw or None if isinstance(said.terminal, Done) else None,
        "usage": usages[-1] if usages else {},
        "error": isinstance(said.terminal, Failed),
        "terminated": isinstance(said.terminal, Done),
    }


def wanted_of(row: Recording) -> dict[str, Any]:
    expected = row.expected
    return {
        "model": expected["model"],
        "text": expected["text"],
        "thinking": expected["thinking"],
        "refusal": expected["refusal"],
        "calls": [(call["id"], call["name"]) for call in expected["tool_calls"]],
        "arguments": [call["arguments"] for call in expected["tool_calls"]],
        "blocks": [kind_of(block) for block in expected["blocks"]],
        "signatures": expected["signatures"],
        "redacted": expected["redacted"],
        "citations": expected["citations"],
        "finish": expected["finish_reason"],
        "usage": expected["usage"] or {},
        "error": expected["error"] is not None,
        "terminated": expected["terminated"],
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.file)
def test_a_recorded_stream_says_what_its_provider_said(row: Recording) -> None:
    found, wanted = found_in(read(row.api_name, row.data)), wanted_of(row)
    differ = WE_DIFFER.get(row.file.split("/")[1], {})
    assert {name for name in wanted if found[name] != wanted[name]} == set(differ)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.file)
def test_a_recorded_stream_says_the_same_however_it_is_cut(row: Recording) -> None:
    data = row.data
    whole = read(row.api_name, data)
    chance = random.Random(row.file)
    few = sorted(chance.sample(range(len(data)), min(len(data), 40)))
    assert read_pieces(row.api_name, cut(data, few), restored=True) == whole
    size = chance.randint(1, 40)
    assert read_pieces(row.api_name, (data[i : i + size] for i in range(0, len(data), size))) == whole


@pytest.mark.parametrize("row", [row for row in ROWS if row.bytes < 1500], ids=lambda row: row.file)
def test_a_small_stream_says_the_same_cut_at_every_byte_and_at_any_byte(row: Recording) -> None:
    data = row.data
    whole = read(row.api_name, data)
    assert read_pieces(row.api_name, (data[i : i + 1] for i in range(len(data))), restored=True) == whole
    for place in range(0, len(data), 7):
        assert read_pieces(row.api_name, cut(data, [place])) == whole


@pytest.mark.parametrize("row", [row for row in ROWS if row.bytes < 1500], ids=lambda row: row.file)
def test_a_stream_broken_off_anywhere_is_cut_and_nothing_else(row: Recording) -> None:
    data = row.data
    whole = answer(read(row.api_name, data)).terminal
    for place in range(0, len(data), 5):
        terminal = answer(read(row.api_name, data[:place])).terminal
        if isinstance(terminal, Done):
            # All but the counts or [DONE] had come.
            assert isinstance(whole, Done)
            assert (terminal.finish, terminal.finish_raw) == (whole.finish, whole.finish_raw)
        else:
            assert isinstance(terminal, Cut) or (isinstance(terminal, Failed) and isinstance(whole, Failed))
