"""docs/reference/hosted-tools.md: what a subscriber of `blocks` gets while a provider runs its tools, and when.

Its tables are made from recorded streams: `python -m tests.unit.docs.test_hosted_tools` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from tests.unit.core.run.script import Story
from tests.unit.docs.pages import ROOT
from tests.unit.providers.corpus import CORPUS, needs_corpus
from tests.unit.providers.reading import decoder
from tokenbus.events.public import BlockComplete, BlockProgress, BlockStarted, Chunk, ImagePreview, PublicEvent
from tokenbus.events.quirks import ApiName

PAGE = ROOT / "docs" / "reference" / "hosted-tools.md"
STREAMS: dict[str, tuple[ApiName, str]] = {
    "Anthropic: web search": ("anthropic", "anthropic/vercel-ai__anthropic-web-search-tool.1.sse"),
    "Anthropic: fetch": ("anthropic", "anthropic/vercel-ai__anthropic-web-fetch-tool.1.sse"),
    "Anthropic: MCP": ("anthropic", "anthropic/vercel-ai__anthropic-mcp.1.sse"),
    "OpenAI Responses: file search": ("openai-responses", "openai_responses/vercel-ai__openai-file-search-tool.1.sse"),
    "OpenAI Responses: code": ("openai-responses", "openai_responses/vercel-ai__openai-code-interpreter-tool.1.sse"),
    "OpenAI Responses: MCP": (
        "openai-responses",
        "openai_responses/pydantic-pydantic-ai__test_openai_responses_model_mcp_server_tool_stream.sse",
    ),
    "OpenAI Responses: shell": ("openai-responses", "openai_responses/vercel-ai__openai-shell-container.1.sse"),
    "OpenAI Responses: image": ("openai-responses", "openai_responses/vercel-ai__openai-image-generation-tool.1.sse"),
    "xAI on Responses: web search": ("openai-responses", "openai_responses/vercel-ai__xai-web-search-tool.1.sse"),
    "Gemini: code": ("gemini", "gemini/pydantic-pydantic-ai__test_code_execution_stream.sse"),
}
HEAD = ("| event | type | on `blocks` | pieces on `chunks` |", "|---|---|---|---|")
MOST_ROWS = 16
"""Rows of one table; the rest of its blocks are alike."""


def frames_of(data: bytes) -> list[bytes]:
    """The events of the stream."""
    return [frame + b"\n\n" for frame in re.split(rb"\r?\n\r?\n", data) if frame.strip()]


def name_of(frame: bytes) -> str:
    """The type of the provider's event; of an API without types, its number alone says which it is."""
    data = b"".join(line[5:] for line in frame.splitlines() if line.startswith(b"data:"))
    try:
        found = msgspec.json.decode(data).get("type", "")
    except (msgspec.DecodeError, AttributeError):
        found = ""
    return f"`{found}`" if found else ""


def described(event: PublicEvent) -> str:
    match event:
        case BlockStarted():
            words = ["`block_start`", str(event.block), event.kind, f"`{event.tool_name}`" if event.tool_name else ""]
        case BlockComplete():
            words = ["`block_complete`", str(event.block), "cut" if event.cut else ""]
        case BlockProgress():
            words = ["`block_progress`", str(event.block), f"`{event.status}`"]
        case ImagePreview():
            words = ["`image_preview`", str(event.block)]
        case _:
            return ""
    return " ".join(word for word in words if word)


def rows_of(api: ApiName, data: bytes) -> Iterator[tuple[int, str, str, int]]:
    """The number and type of each event of the provider that says something on `blocks`, what it says, and how many
    events brought content since the row before.
    """
    story, reader = Story(max_tool_depth=0), decoder(api)
    pieces = 0
    for number, frame in enumerate([*frames_of(data), b""], 1):
        normalized = reader.feed(frame) if frame else reader.end()
        events = [public for event in normalized for public in story.provider(event)]
        pieces += any(isinstance(event, Chunk) for event in events)
        if shown := [text for event in events if (text := described(event))]:
            yield number, name_of(frame) if frame else "the end of the body", ", ".join(shown), pieces
            pieces = 0


def tables() -> str:
    out: list[str] = []
    for title, (api, file) in STREAMS.items():
        data = (CORPUS / file).read_bytes()
        rows = list(rows_of(api, data))
        out += [f"## {title}", "", f"{len(frames_of(data))} events.", "", *HEAD]
        out += [f"| {number} | {name} | {what} | {pieces or ''} |" for number, name, what, pieces in rows[:MOST_ROWS]]
        if len(rows) > MOST_ROWS:
            out += ["", f"And {len(rows) - MOST_ROWS} rows more."]
        out.append("")
    return "\n".join(out)


def head() -> str:
    return PAGE.read_text().partition("\n## ")[0] + "\n"


@needs_corpus
def test_the_page_says_what_recorded_streams_of_hosted_tools_give() -> None:
    assert PAGE.read_text() == head() + tables()


if __name__ == "__main__":
    PAGE.write_text(head() + tables())
