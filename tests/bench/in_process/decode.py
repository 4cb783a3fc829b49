"""The decoder alone, without IO: a provider's stream to normalised events, beside a bare split and json.loads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

from tokenbus.events.quirks import Quirks
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus_services.mock_provider import Reply
from tokenbus_services.mock_provider.apis.anthropic import mock_api as anthropic
from tokenbus_services.mock_provider.apis.gemini import mock_api as gemini
from tokenbus_services.mock_provider.apis.openai_chat import mock_api as openai_chat
from tokenbus_services.mock_provider.apis.openai_responses import mock_api as openai_responses
from tokenbus_services.mock_provider.apis.provider_api import Composer
from tokenbus_services.mock_provider.request import ModelRequest

CHUNKS = 5_000
ROUNDS = 7
DIALECTS: dict[ApiName, Composer] = {
    "anthropic": anthropic,
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "gemini": gemini,
}


def decoding(api: ApiName) -> tuple[float, float]:
    """Chunks a second: our decoder fed event by event, as from a network, and the bare loop over the whole stream."""
    reads = reads_of(api)
    stream, blank = b"".join(reads), _blank(reads[0])

    def ours() -> None:
        decoder = registry.get(api).decoder(status=200, headers={}, stream=True, quirks=Quirks())
        for read in reads:
            decoder.feed(read)
        decoder.end()

    def bare() -> None:
        for event in stream.split(blank):
            _, found, data = event.partition(b"data: ")
            if found and data != b"[DONE]":
                json.loads(data)

    # In turn, so that a busy moment of the machine affects both.
    times = [(seconds(ours), seconds(bare)) for _ in range(ROUNDS)]
    return CHUNKS / median(t[0] for t in times), CHUNKS / median(t[1] for t in times)


def reads_of(api: ApiName) -> list[bytes]:
    """The events of a stream, one per read."""
    stream = _stream(api)
    blank = _blank(stream)
    return [event + blank for event in stream.split(blank) if event]


def _blank(stream: bytes) -> bytes:
    return b"\r\n\r\n" if b"\r\n\r\n" in stream else b"\n\n"  # Gemini's line ends


def _stream(api: ApiName) -> bytes:
    reply = Reply(text=" word" * CHUNKS)
    request = ModelRequest(
        api=api, headers={}, body={"model": "m", "messages": [{"role": "user", "content": "Go"}], "stream": True},
        model="m", stream=True, turn=0, user_text="Go", tool_results=(), key="0" * 32,
    )  # fmt: skip
    return DIALECTS[api].stream(reply, request)


def seconds(work: Callable[[], None]) -> float:
    """CPU seconds."""
    begin = time.process_time()
    work()
    return time.process_time() - begin
