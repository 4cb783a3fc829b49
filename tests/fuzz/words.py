"""Words of the provider APIs, for a fuzzer to put together: from the types that the decoders know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import msgspec

from tokenbus.providers.anthropic import wire as anthropic
from tokenbus.providers.gemini import wire as gemini
from tokenbus.providers.openai_chat import wire as openai_chat
from tokenbus.providers.openai_responses import wire as openai_responses

FRAMING = (b"data: ", b"\n\n", b"\r\n\r\n", b"event: error\n", b"[DONE]", b"error: ", b": ", b"<think>", b"</think>")
VALUES = (b"null", b"true", b"{}", b"[]", b'""', b"0", b"-1", b"1e99", b'"\\ud83d"', b"\xff")


def words() -> Iterator[bytes]:
    """All of them; some may come twice."""
    yield from FRAMING
    yield from VALUES
    for union in (anthropic.Event, anthropic.Block, anthropic.Delta, openai_responses.Event):
        for struct in get_args(union):
            yield f'{{"type":"{struct.__struct_config__.tag}",'.encode()
            yield from _fields(struct)
    for module in (anthropic, gemini, openai_chat, openai_responses):
        for struct in vars(module).values():
            if isinstance(struct, type) and issubclass(struct, msgspec.Struct):
                yield from _fields(struct)
    for item in ("message", "reasoning", "function_call", "custom_tool_call", "image_generation_call"):
        yield f'"item":{{"type":"{item}",'.encode()


def _fields(struct: type[msgspec.Struct]) -> Iterator[bytes]:
    for name in struct.__struct_encode_fields__:
        yield f'"{name}":'.encode()
