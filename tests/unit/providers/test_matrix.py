"""Provider and mode as one matrix: what each cell makes of the same request, letter by letter, in `golden/`.

`python -m tests.unit.providers.test_matrix` rewrites the files; a person reviews the difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from tests.unit.providers.test_sdk_types import CONVERSATION, PIXEL, sdk_accepts
from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import BUILT_IN, ApiName, Quirks
from tokenbus.events.requests import (
    Base64Source,
    DocumentPart,
    FileSource,
    Generate,
    ImageOptions,
    ImagePart,
    Message,
    Mode,
    PrefillOptions,
    TextPart,
    Thinking,
    Tool,
    ToolCallPart,
    ToolResultPart,
    UrlSource,
)
from tokenbus.providers import registry
from tokenbus_services.mock_provider.request import MULTIPART, read_form

GOLDEN = Path(__file__).parent / "golden"
SCHEMA: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MODELS: dict[ApiName, str] = {
    "anthropic": "claude-sonnet-4-5",
    "openai-chat": "gpt-5",
    "openai-responses": "gpt-5",
    "openai-images": "gpt-image-2",
    "gemini": "gemini-2.5-pro",
    "gemini-interactions": "gemini-3.5-flash",
}
CELLS: dict[str, tuple[ApiName, Mode, Quirks]] = {
    "anthropic-chat": ("anthropic", "chat", Quirks()),
    "anthropic-prefill": ("anthropic", "prefill", Quirks()),
    "openai-chat-chat": ("openai-chat", "chat", Quirks()),
    "openai-chat-prefill-message": ("openai-chat", "prefill", Quirks(continues="message")),
    "openai-chat-prefill-completions": ("openai-chat", "prefill", Quirks(continues="completions")),
    "openai-responses-chat": ("openai-responses", "chat", Quirks()),
    "openai-responses-chat-images": ("openai-responses", "chat", Quirks()),
    "openai-images-chat": ("openai-images", "chat", Quirks()),
    "openai-images-chat-edit": ("openai-images", "chat", Quirks()),
    "openai-images-chat-edit-by-url": ("openai-images", "chat", Quirks()),
    "gemini-chat": ("gemini", "chat", Quirks()),
    "gemini-chat-images": ("gemini", "chat", Quirks()),
    "anthropic-chat-files": ("anthropic", "chat", Quirks()),
    "anthropic-prefill-files": ("anthropic", "prefill", Quirks()),
    "openai-chat-chat-files": ("openai-chat", "chat", Quirks()),
    "openai-responses-chat-files": ("openai-responses", "chat", Quirks()),
    "gemini-chat-files": ("gemini", "chat", Quirks()),
    "gemini-interactions-chat": ("gemini-interactions", "chat", Quirks()),
    "gemini-interactions-chat-images": ("gemini-interactions", "chat", Quirks()),
    "gemini-interactions-chat-files": ("gemini-interactions", "chat", Quirks()),
    "gemini-prefill": ("gemini", "prefill", Quirks()),
    "gemini-prefill-of-a-model-that-takes-no-last-turn": ("gemini", "prefill", Quirks(models_continuing=())),
}
PAINTED = [
    Message(role="user", content="A cat."),
    Message(
        role="assistant",
        content=[
            TextPart(text="Here:"),
            ImagePart(
                source=Base64Source(media_type="image/png", data=PIXEL),
                opaque={"item_id": "ig_1", "thought_signature": "c2ln"},
            ),
        ],
    ),
    Message(role="user", content="Make it blue."),
]
EDITED = ImagePart(source=Base64Source(media_type="image/png", data=PIXEL))
BY_URL = ImagePart(source=UrlSource(url="https://example.com/y.png"))
IMAGES: dict[str, tuple[list[Message], ImageOptions]] = {
    "openai-responses-chat-images": (
        PAINTED,
        ImageOptions(
            size="1024x1024",
            quality="low",
            format="webp",
            background="opaque",
            model="gpt-image-2",
            previews=2,
            mask=EDITED,
        ),
    ),
    "openai-images-chat": (
        PAINTED[:1],
        ImageOptions(size="1024x1024", quality="low", format="png", background="transparent", count=2, previews=3),
    ),
    "openai-images-chat-edit": (
        [Message(role="user", content=[TextPart(text="Both, as one."), EDITED, EDITED])],
        ImageOptions(size="1024x1024", quality="low", format="png", count=2, previews=3, mask=EDITED),
    ),
    "openai-images-chat-edit-by-url": (
        [Message(role="user", content=[EDITED, TextPart(text="In the style of"), BY_URL])],
        ImageOptions(size="1024x1024", mask=EDITED),
    ),
    "gemini-chat-images": (PAINTED, ImageOptions(size="2K", aspect_ratio="16:9")),
    "gemini-interactions-chat-images": (PAINTED, ImageOptions(size="2K", aspect_ratio="16:9")),
}
"""Cells that ask for images."""
FILES = [
    Message(
        role="user",
        content=[
            TextPart(text="Look:"),
            ImagePart(source=FileSource(file_id="file-1", media_type="image/png"), cache=True),
            DocumentPart(source=FileSource(file_id="file-2", media_type="application/pdf"), title="a.pdf"),
        ],
    ),
    Message(role="assistant", content=[ToolCallPart(tool_id="t1", tool_name="draw", arguments="{}")]),
    Message(
        role="tool",
        content=[ToolResultPart(tool_id="t1", content=[ImagePart(source=FileSource(file_id="file-3"))])],
    ),
]
"""Media stored at the provider."""
NAMED = [
    Message(role="user", participant="Alice", content="Hello"),
    Message(role="user", participant="Bob", content="Hi"),
]
"""Where a cell has no place for media."""


def request_and_history(name: str) -> tuple[Generate, list[Message]]:
    """The request of a cell, and what the run's first turn brought."""
    api, mode, _ = CELLS[name]
    if name in IMAGES:
        messages, images = IMAGES[name]
        return Generate(provider=api, model=MODELS[api], messages=messages, images=images), []
    if name.endswith("-files"):
        # Chat Completions names documents so, and no images.
        messages = [Message(role="user", content=FILES[0].content[2:])] if api == "openai-chat" else FILES
        who = "Claude" if mode == "prefill" else None
        return Generate(provider=api, model=MODELS[api], mode=mode, participant=who, messages=messages), []
    call = '\n<function_calls>\n<invoke name="now"/>\n</function_calls>'
    result = Message(role="tool", content=[ToolResultPart(tool_id="t4", content="noon & <later>")])
    fields: dict[str, Any] = {}
    if mode == "prefill":
        fields = {"participant": "Claude", "prefill": PrefillOptions(names_once=True)}
    plain = name == "openai-chat-prefill-completions"
    request = Generate(
        provider=api,
        model=MODELS[api],
        mode=mode,
        messages=NAMED if plain else [*CONVERSATION, *NAMED],
        system=[TextPart(text="Be brief.", cache=True), TextPart(text="Be exact.")],
        tools=[Tool(name="weather", description="The weather.", parameters=SCHEMA), Tool(name="now")],
        max_tokens=4000,
        stop=["END"],
        thinking=Thinking(effort="low"),
        **fields,
    )
    return request, [Message(role="assistant", content=" Let me see." + call), result] if mode == "prefill" else []


def made(name: str) -> dict[str, Any]:
    """The call that a cell makes, as its file has it."""
    api, _, quirks = CELLS[name]
    built = registry.get(api).build(*request_and_history(name), quirks)
    call = built.call
    content_type = call.headers["content-type"]
    if content_type.startswith(MULTIPART):
        body = msgspec.json.decode(msgspec.json.encode(read_form(content_type, call.body)))
    else:
        body = msgspec.json.decode(call.body)
    return {"path": call.path, "query": call.query, "headers": call.headers, "body": body, "notes": list(built.notes)}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_makes_exactly_its_golden_call(name: str) -> None:
    assert made(name) == msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes())


@pytest.mark.parametrize("name", CELLS)
def test_the_sdks_types_take_what_a_cell_makes(name: str) -> None:
    sdk_accepts(CELLS[name][0], made(name)["body"])


def test_every_cell_of_the_matrix_is_here_and_the_others_are_refused_by_name() -> None:
    filled = {(api, mode) for api, mode, _ in CELLS.values()}
    for api in BUILT_IN:
        for mode in get_args(Mode):
            assert (mode in registry.get(api).formats) == ((api, mode) in filled)
            if (api, mode) not in filled:
                request = Generate(provider=api, model="m", mode=mode, messages=NAMED, participant="Claude")
                with pytest.raises(RequestInvalid, match=f"does not support {mode} requests"):
                    registry.get(api).build(request, [], Quirks())


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_a_pure_function(name: str) -> None:
    api, mode, quirks = CELLS[name]
    request, history = request_and_history(name)
    before = msgspec.json.encode((request, history))
    first, second = (registry.get(api).formats[mode](request, history, quirks) for _ in range(2))
    assert first == second
    assert msgspec.json.encode((request, history)) == before


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for cell in CELLS:
        (GOLDEN / f"{cell}.json").write_bytes(msgspec.json.format(msgspec.json.encode(made(cell)), indent=2) + b"\n")
