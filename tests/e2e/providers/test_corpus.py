"""The recorded streams of real providers, through the running services: the output equals their content."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended
from tests.e2e.media.test_media import with_store
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Random, Recording, Reply, Script, Turn

CORPUS = Path(os.environ.get("TOKENBUS_CORPUS", Path(__file__).parents[4] / "shared" / "corpus"))
PROVIDERS = {
    "anthropic": "anthropic",
    "openai_chat": "openai-chat",
    "openai_responses": "openai-responses",
    "gemini": "gemini",
}

WE_DIFFER = {
    ("FirebaseExtended-vertexai-sdk-test-data__streaming-failure-prompt-blocked-safety~2.sse", "finish_reason"): (
        "the reason why the prompt was blocked is the raw reason of this finish"
    ),
    ("vercel-ai__xai-x-search-tool.sse", "tool_calls"): "xAI runs these itself: no tool of the request has their names",
}
"""Where we are right and the manifest is not, and why."""


def recordings() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (CORPUS / "manifest.jsonl").read_text().splitlines()]
    # Of streams with images none is as it was on the wire: their bytes were made short.
    real = [r for r in rows if r["provenance"] == "recorded-real" or r["expected"]["images"]]
    return [r for r in real if r["api"] in PROVIDERS and not r["expected"]["error"]]


@pytest.mark.skipif(not CORPUS.exists(), reason="no corpus: it lies beside the project, or where TOKENBUS_CORPUS says")
async def test_recorded_streams_give_the_recorded_answers(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    rows = recordings()
    assert len(rows) > 100
    assert {row["api"] for row in rows} == set(PROVIDERS)
    assert any(row["expected"]["images"] for row in rows)
    scripts = [
        Script(
            name=f"recording-{i}",
            turns=(
                Turn(
                    says=Recording(stream=str(CORPUS / row["file"])),
                    delivery=Delivery(cuts=Random(seed=i, largest=900)),
                ),
                # A turn that its provider paused is asked to continue.
                Turn(says=Reply(text="")),
            ),
        )
        for i, row in enumerate(rows)
    ]
    async with deployed(scripts, PIPELINE) as (_, running):
        runs = [
            await send(f"recording-{i}", provider=PROVIDERS[row["api"]], max_tool_depth=0) for i, row in enumerate(rows)
        ]
        logs = await ended(server.client, keys, runs)
        assert running
    wrong = [
        f"{row['file']}: {problem}" for row, run in zip(rows, runs, strict=True) for problem in compare(row, logs[run])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not CORPUS.exists(), reason="no corpus: it lies beside the project, or where TOKENBUS_CORPUS says")
async def test_recorded_images_lie_in_the_blob_store_and_one_whose_bytes_are_broken_is_inline_with_a_note(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    rows = {row["api"]: row for row in recordings() if final_images(row)}
    assert rows.keys() == {"gemini", "openai_responses"}
    scripts = [
        Script(name=api, turns=(Turn(says=Recording(stream=str(CORPUS / row["file"]))),)) for api, row in rows.items()
    ]
    async with (
        MockProvider(scripts) as provider,
        with_store(tmp_path, server_url, keys, provider.url) as (_, store),
        httpx.AsyncClient(base_url=store.url, timeout=60) as http,
    ):
        for api in rows:
            await send(api, id=api, provider=PROVIDERS[api], max_tool_depth=0)
        logs: Any = await ended(server.client, keys, [*rows])
        published = {
            api: [e for e in log if e["type"] == "block_complete" and e["kind"] == "image"] for api, log in logs.items()
        }
        [stored], [inline] = published["gemini"], published["openai_responses"]
        content = (await http.get(f"/blobs/{stored['image']['blob_id']}")).content
    for log in logs.values():
        judge.check(log)
    assert [mark(b64encode(content).decode())] == final_images(rows["gemini"])
    assert (stored["image"]["size_bytes"], "base64" in stored["image"]) == (len(content), False)
    # The corpus made this one's bytes short, so they are no longer base64.
    assert [mark(inline["image"]["base64"])] == final_images(rows["openai_responses"])
    assert [note["name"] for note in inline["provider_extra"]] == ["tokenbus.image_not_stored"] * 2


def final_images(row: dict[str, Any]) -> list[str]:
    """The marks of the images that a stream ends up with."""
    images = [image for image in row["expected"]["images"] if not image.get("partial")]
    return [image["sha"] for image in images if image.get("mime", "image/").startswith("image/")]


def compare(row: dict[str, Any], log: Any) -> list[str]:
    """What differs between the run's first turn and what the manifest expects of the stream."""
    judge.check(log)
    expected = row["expected"]
    turn = [e for e in log if e["turn"] == 0]
    done = [e for e in turn if e["type"] == "block_complete"]
    calls = [
        {"id": e["tool_id"], "name": e["tool_name"], "arguments": e["arguments"]}
        for e in done
        if e["kind"] == "tool_call"
    ]
    found: dict[str, Any] = {
        "text": "".join(e["content"] for e in done if e["kind"] == "text"),
        "thinking": "".join(e["content"] for e in done if e["kind"] == "thinking"),
        "tool_calls": calls,
        "images": [mark(e["image"]["base64"]) for e in done if e["kind"] == "image"],  # no blob service runs here
        "terminated": log[-1]["type"] == "completed",
    }
    wanted = {
        "text": expected["text"] + expected["refusal"],
        "thinking": expected["thinking"],
        "tool_calls": [_call(c) for c in expected["tool_calls"]],
        "images": final_images(row),
        "terminated": expected["terminated"],
    }
    for call, want in zip(calls, expected["tool_calls"], strict=False):
        if want["id"] is None:
            call["id"] = None  # the provider gave none, and the call got one here
        if not want.get("arg_deltas"):
            call["arguments"] = json.loads(call["arguments"] or "{}")
    if log[-1]["turn"] == 0 and log[-1]["type"] == "completed":
        found["finish_reason"], wanted["finish_reason"] = log[-1].get("finish_raw"), expected["finish_reason"]
    if expected["usage"] and log[-1]["type"] == "completed":
        [usage] = [e["usage"]["raw"] for e in turn if e["type"] == "usage"]
        found["usage"] = {name: usage.get(name) for name in expected["usage"]}
        wanted["usage"] = expected["usage"]
    return [
        f"{name}: {found[name]!r} but expected {wanted[name]!r}"
        for name in wanted
        if found[name] != wanted[name] and (Path(row["file"]).name, name) not in WE_DIFFER
    ]


def mark(base64: str) -> str:
    return hashlib.sha256(base64.encode()).hexdigest()[:16]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """The manifest re-serialised arguments that arrived whole, with other whitespace: these are compared as values."""
    arguments: Any = call["arguments"]
    if not call.get("arg_deltas"):
        arguments = json.loads(arguments or "{}")
    return {"id": call["id"], "name": call["name"], "arguments": arguments}
