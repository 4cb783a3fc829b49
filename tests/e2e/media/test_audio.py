"""A spoken answer through the running services: a block with its transcript, its sound in the blob store."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import ended
from tests.e2e.media.test_media import with_store
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.response import Response
from tokenbus.events.public import decode
from tokenbus.events.requests import Message, TextPart
from tokenbus_services.mock_provider import MockProvider, Recording, Script, Turn

SOUND = b"RIFF" + bytes(range(256)) * 300
PIECES = [SOUND[at : at + 256] for at in range(0, len(SOUND), 256)]
SAID = "The password is swordfish."
POLICY = """
[policies.hide]
use = "tokenbus.policy:RedactSecrets"
[policies.hide.options]
more = [{find = "swordfish", replace = "***"}]
[policies.see]
use = "tokenbus.policy:RedactSecrets"
"""


def chunk(finish: str | None = None, **audio: Any) -> bytes:
    delta = {"audio": audio} if audio else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "x_new": {"level": "choice"}}
    event = {"id": "c1", "model": "gpt-audio", "choices": [choice], "service_tier": "default"}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def test_a_spoken_answer_is_a_block_with_its_transcript_and_its_sound_in_a_blob(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    stream = [
        chunk(id="audio_1"),
        *(chunk(transcript=f"{word} " if word != SAID.rsplit(maxsplit=1)[-1] else word) for word in SAID.split()),
        *(chunk(data=b64encode(piece).decode()) for piece in PIECES),
        chunk(expires_at=1_900_000_000),
        chunk("stop"),
        b"data: [DONE]\n\n",
    ]
    (tmp_path / "spoken.sse").write_bytes(b"".join(stream))
    spoken = Script(name="spoken", turns=(Turn(says=Recording(stream=str(tmp_path / "spoken.sse"))),))
    async with (
        MockProvider([spoken]) as provider,
        with_store(tmp_path, server_url, keys, provider.url, POLICY) as (bus, blobs),
    ):
        await bus.start("policy")
        chosen: dict[str, list[str]] = {"plain": [], "hidden": ["hide"], "seen": ["see"]}
        for run, policies in chosen.items():
            await send("spoken", id=run, provider="openai-chat", max_tool_depth=0, policies=policies)
        logs: Any = await ended(server.client, keys, [*chosen])
        async with httpx.AsyncClient(base_url=blobs.url, timeout=60) as http:
            found = await http.get(f"/blobs/{blob_id_of(SOUND)}")
    assert found.content == SOUND
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
    sound = {"media_type": "audio/wav", "blob_id": blob_id_of(SOUND), "size_bytes": len(SOUND)}
    sound |= {"audio_id": "audio_1", "expires_at": 1_900_000_000}
    for run in ("plain", "seen"):
        [block] = [e for e in logs[run] if e["type"] == "block_complete"]
        assert (block["kind"], block["content"], block["audio"]) == ("audio", SAID, sound)
        assert block["provider_extra"] == [{"name": "openai-chat.choices.x_new", "json": '{"level":"choice"}'}]
        assert logs[run][-1]["provider_extra"] == [{"name": "openai-chat.service_tier", "json": '"default"'}]
        assert "".join(e["text"] for e in logs[run] if e["type"] == "chunk" and e["visible"]) == SAID
        response = Response.of([decode(msgspec.json.encode(event)) for event in logs[run]])
        assert response.messages == [Message(role="assistant", content=[TextPart(text=SAID)])]
    [hidden] = [e for e in logs["hidden"] if e["type"] == "block_complete"]
    assert (hidden["content"], hidden.get("audio")) == ("The password is ***.", None), "the sound still says it"
