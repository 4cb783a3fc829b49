"""All recorded streams of the four APIs: what they say, and the same for any cutting of their bytes."""

from __future__ import annotations

import hashlib
import random
from typing import Any
from unittest.mock import ANY

import msgspec

from tests.rows import over_rows
from tests.unit.providers.corpus import APIS, Recording, needs_corpus, recordings
from tests.unit.providers.reading import answer, cut, read, read_pieces
from tokenbus.events import normalized as n

pytestmark = needs_corpus

ROWS = recordings(*APIS)

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
        "blocks": "the manifest has no blocks of Groq's executed_tools",
        "usage": "Groq's counts stand in x_groq alone, which the manifest has apart",
    },
    "vercel-ai__inline-preserve-structured-error-stream-parts.sse": {
        "terminated": "the error ends the attempt; [DONE] after it is nothing",
    },
    "vercel-ai__inline-handle-unparsable-stream-parts.sse": {
        "error": "an event that is not JSON ends the attempt (providers.md, For all four, 9)",
        "terminated": "the same",
    },
    "vercel-ai__inline-handle-both-url_citation-and-file_citation-annotations.sse": {
        "text": "the text stands in the end of its part alone; the manifest's reader knows only deltas",
    },
    "vercel-ai__openai-error.1.sse": {
        "finish": "the response failed: that is an error, and no finish",
        "terminated": "the same",
    },
    "vercel-ai__inline-expose-raw-finish-reason-from-late-response.failed-incomplete-details.sse": {
        "finish": "the error ends the attempt; what response.failed says after it is nothing",
        "terminated": "the same",
    },
    "vercel-ai__inline-send-streaming-tool-calls.sse": {
        "calls": "the fixture's calls change their call_id between added and done; a call is told by its first",
    },
    "vercel-ai__xai-x-search-tool.sse": {
        "calls": "xAI runs these itself: no tool of the request has their names (providers.md, For all four, 10)",
        "arguments": "the same",
        "blocks": "the same",
    },
    "pydantic-pydantic-ai__test_google_model_file_search_grounding_gemini_3-True.3.sse": {
        "blocks": "toolCall and toolResponse must go back at their place; the manifest has no blocks of them",
    },
    "FirebaseExtended-vertexai-sdk-test-data__streaming-failure-error-mid-stream.sse": {
        "finish": "the error ends the attempt, whatever finishReason came before",
        "error": "an error without any framing is one (providers.md, Framing)",
        "terminated": "the same",
    },
    "FirebaseExtended-vertexai-sdk-test-data__streaming-failure-unknown-model.sse": {
        "error": "the body is an error as JSON (providers.md, Framing)",
    },
    "FirebaseExtended-vertexai-sdk-test-data__streaming-failure-prompt-blocked-safety~2.sse": {
        "finish": "the reason why the prompt was blocked is the raw reason of this finish",
    },
}
"""Where we are right and the manifest is not, and why."""

BLOCK_KINDS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "tool_call",
    "redacted_thinking": "thinking",
    "message": "text",
    "reasoning": "thinking",
    "function_call": "tool_call",
    "custom_tool_call": "tool_call",
    "image_generation_call": "image",
    "functionCall": "tool_call",
}
CITATIONS = ("anthropic.citation", "openai-responses.annotation", "gemini.citationMetadata")


class Signed(msgspec.Struct):
    """A part of Gemini's that goes back as it came."""

    thoughtSignature: str | None = None  # noqa: N815


def marks(values: list[str]) -> list[str]:
    return [hashlib.sha256(value.encode()).hexdigest()[:16] for value in values]


def opaque(events: list[n.Normalized], name: str) -> list[str]:
    """The values of the blocks that stand, by ordinal."""
    void = max((getattr(event, "void_before", 0) for event in events), default=0)
    return [e.value for e in events if isinstance(e, n.Opaque) and e.name == name and e.block >= void]


def signatures(events: list[n.Normalized]) -> list[str]:
    """All that must go back, in order: of blocks, and inside of items."""
    found: list[str] = []
    for event in events:
        if isinstance(event, n.Opaque) and event.name in ("encrypted", "thought_signature"):
            found.append(event.value)
        elif isinstance(event, n.ItemStart) and event.item.startswith("gemini."):
            json = next(
                json.fragment for json in events if isinstance(json, n.ToolCallDelta) and json.block == event.block
            )
            found.append(msgspec.json.decode(json, type=Signed).thoughtSignature or "")
    return marks([signature for signature in [*opaque(events, "signature"), *found] if signature])


def kinds_of(row: Recording) -> list[str]:
    """The blocks as we call them. A message without text is none."""
    kinds: list[str] = []
    images = [image["mime"] for image in row.expected["images"] if "mime" in image]
    for block in row.expected["blocks"]:
        kind: str = block["type"]
        if kind == "inlineData" and images.pop(0).startswith("image/"):
            kind = "image_generation_call"
        if kind.startswith("tool:"):
            kinds.append("tool_call")
        elif kind != "message" or block["text"] or block.get("done_text"):
            kinds.append(BLOCK_KINDS.get(kind, f"{row.api_name}.{kind}"))
    return kinds


def found_in(events: list[n.Normalized]) -> dict[str, Any]:
    result = answer(events)
    usages = [event.usage.raw for event in events if isinstance(event, n.UsageSeen)]
    return {
        "model": result.model or None,
        "text": result.text,
        "thinking": result.thinking,
        "refusal": result.refusal,
        "calls": [call[:2] for call in result.calls],
        "arguments": [call[2] for call in result.calls],
        "blocks": result.kinds,
        "signatures": signatures(events),
        "redacted": marks(opaque(events, "redacted")),
        "citations": sum(isinstance(event, n.Extra) and event.name in CITATIONS for event in events),
        "images": [(marks([event.base64])[0], not event.final) for event in events if isinstance(event, n.Image)],
        "finish": result.terminal.finish_raw or None if isinstance(result.terminal, n.Done) else None,
        "usage": usages[-1] if usages else {},
        "error": isinstance(result.terminal, n.Failed),
        "terminated": isinstance(result.terminal, n.Done),
    }


def wanted_of(row: Recording) -> dict[str, Any]:
    expected = row.expected
    return {
        "model": expected["model"] or None,
        "text": expected["text"],
        "thinking": expected["thinking"],
        "refusal": expected["refusal"],
        "calls": [(call["id"] or ANY, call["name"]) for call in expected["tool_calls"]],
        "arguments": [call["arguments"] for call in expected["tool_calls"]],
        "blocks": kinds_of(row),
        "signatures": expected["signatures"],
        "redacted": expected["redacted"],
        "citations": expected["citations"],
        "images": [
            (image["sha"], image.get("partial", False))
            for image in expected["images"]
            if image.get("mime", "image/").startswith("image/")
        ],
        "finish": expected["finish_reason"],
        "usage": expected["usage"] or {},
        "error": expected["error"] is not None,
        "terminated": expected["terminated"],
    }


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_a_recorded_stream_replays_its_providers_content(row: Recording) -> None:
    found, wanted = found_in(read(row.api_name, row.data)), wanted_of(row)
    differ = WE_DIFFER.get(row.file.split("/")[1], {})
    assert {name for name in wanted if found[name] != wanted[name]} == set(differ)


@over_rows("row", ROWS, ids=lambda row: row.file)
def test_a_recorded_stream_says_the_same_however_it_is_cut(row: Recording) -> None:
    data = row.data
    whole = read(row.api_name, data)
    chance = random.Random(row.file)
    few = sorted(chance.sample(range(len(data)), min(len(data), 40)))
    assert read_pieces(row.api_name, cut(data, few), restored=True) == whole
    size = chance.randint(1, 40)
    assert read_pieces(row.api_name, (data[i : i + size] for i in range(0, len(data), size))) == whole


@over_rows("row", [row for row in ROWS if row.bytes < 1500], ids=lambda row: row.file)
def test_a_small_stream_says_the_same_cut_at_every_byte_and_at_any_byte(row: Recording) -> None:
    data = row.data
    whole = read(row.api_name, data)
    assert read_pieces(row.api_name, (data[i : i + 1] for i in range(len(data))), restored=True) == whole
    for place in range(0, len(data), 7):
        assert read_pieces(row.api_name, cut(data, [place])) == whole


@over_rows("row", [row for row in ROWS if row.bytes < 1500], ids=lambda row: row.file)
def test_a_stream_that_breaks_at_any_point_ends_with_cut_only(row: Recording) -> None:
    data = row.data
    whole = answer(read(row.api_name, data)).terminal
    for place in range(0, len(data), 5):
        terminal = answer(read(row.api_name, data[:place])).terminal
        if isinstance(terminal, n.Done):
            if row.api == "gemini" and data[place:].find(b"finishReason") >= 0:
                continue  # several finish reasons: that another follows, only the rest of the body tells
            # All but the counts or [DONE] had come.
            assert isinstance(whole, n.Done)
            assert (terminal.finish, terminal.finish_raw) == (whole.finish, whole.finish_raw)
        else:
            assert isinstance(terminal, n.Cut) or (isinstance(terminal, n.Failed) and isinstance(whole, n.Failed))
