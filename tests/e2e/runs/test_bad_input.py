"""Bad input: each a named error with what and where; nothing hangs, nothing else stops."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, Reply, Script, Status, Turn

HELLO = Script(name="hello", turns=(Turn(says=Reply(text="Hello there")),))
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))
REFUSED = Script(name="refused", turns=(Turn(says=Reply(text=""), fault=Status(status=401)),))

FLOOD = 600

GOOD: dict[str, Any] = {
    "type": "generate",
    "provider": "anthropic",
    "model": "hello",
    "messages": [{"role": "user", "content": "hi"}],
}
REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown provider": ({**GOOD, "provider": "nobody"}, "request_invalid", "provider"),
    "model missing": ({k: v for k, v in GOOD.items() if k != "model"}, "request_invalid", "model"),
    "wrong type": ({**GOOD, "max_tokens": "many"}, "request_invalid", "max_tokens"),
    "no schema": (
        {**GOOD, "tools": [{"name": "t", "parameters": {"type": "object", "properties": {"x": {"type": "no"}}}}]},
        "request_invalid",
        "tools[0].parameters",
    ),
    "no schema of the answer": (
        {**GOOD, "output_schema": {"schema": {"type": "no"}}},
        "request_invalid",
        "output_schema.schema",
    ),
    "no number": ({**GOOD, "temperature": float("nan")}, "request_invalid", "temperature"),
    "half a character": ({**GOOD, "system": "\ud800"}, "request_invalid", "system"),
    "no durability here": ({**GOOD, "durability": "replicated"}, "request_invalid", "durability"),
    "too large": ({**GOOD, "system": "x" * 10 * 2**20}, "request_too_large", ""),
}


async def test_each_bad_request_is_reported_by_name_and_valid_ones_continue(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([HELLO, REFUSED], PIPELINE):
        for name, (request, _, _) in REJECTED.items():
            data = json.dumps({"id": name.replace(" ", "-"), **request})
            await server.client.xadd(keys.requests, {"__data__": data})
        garbage = [b"\xff\x00 no json", b'{"type":"generate",', b"[]", b"", b'{"type":"wish"}']
        for data in garbage:
            await server.client.xadd(keys.requests, {"__data__": data})
        await server.client.xadd(keys.requests, {"other": "field"})
        refused = await send("refused")
        good = await send("hello")
        runs = [name.replace(" ", "-") for name in REJECTED]
        logs: Any = await ended(server.client, keys, [*runs, refused, good])

        async def is_dead_letter() -> bool:
            return await server.client.xlen(keys.dead) == len(REJECTED) + len(garbage) + 1

        await eventually(is_dead_letter)
        dead = [json.loads(f[b"__data__"]) for _, f in await server.client.xrange(keys.dead)]
    assert [e["type"] for e in logs[good]][-1] == "completed"
    end = logs[refused][-1]
    assert (end["type"], end["error"]["class"], end["error"]["status"]) == ("failed", "auth", 401)
    for name, (_, code, where) in REJECTED.items():
        [end] = logs[name.replace(" ", "-")]
        assert (end["type"], end["error"]["code"]) == ("failed", code), name
        assert end["error"].get("where", "").endswith(where), (name, end)
    assert all(entry["stage"] == "intake" and entry["stream"] == keys.requests for entry in dead)
    kept = [base64.b64decode(entry["bytes"]) for entry in dead]
    assert all(data in kept for data in garbage), "nothing is lost"


async def test_a_flood_of_bad_and_huge_requests_keeps_no_good_one_out(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    bad = [json.dumps({**GOOD, "max_tokens": n, "model": ""}) for n in range(FLOOD)]
    huge = json.dumps({**GOOD, "system": "x" * 5 * 2**20})
    good: list[str] = []
    async with deployed([HELLO], PIPELINE) as (provider, _):
        for part in range(4):
            for data in (*bad[part::4], huge, huge):
                await server.client.xadd(keys.requests, {"__data__": data})
            good.append(await send("hello"))
        logs = await ended(server.client, keys, good)

        async def is_refused() -> bool:
            return await server.client.xlen(keys.dead) == FLOOD + 8

        await eventually(is_refused, timeout=60)
        assert await server.client.xlen(keys.requests) == 0
        assert len(provider.requests) == len(good)
    assert {log[-1]["type"] for log in logs.values()} == {"completed"}


async def test_poison_on_any_internal_stream_ends_its_run_and_nothing_else(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([HELLO, SILENT], PIPELINE):
        await ended(server.client, keys, [await send("hello")])
        for topic in ("raw", "events", "turns"):
            # A run that its partition knows and that waits for its provider.
            run = await send("silent", id=f"poisoned-{topic}", provider="anthropic")
            await eventually(lambda run=run: server.client.xlen(keys.log(run)))
            await server.client.xadd(keys.topic(keys.partition_of(run), topic), {run: b"\xc1 poison"})
            log: Any = (await ended(server.client, keys, [run]))[run]
            assert log[-1]["type"] == "failed", topic
        after = await send("hello")
        log = (await ended(server.client, keys, [after]))[after]
        assert log[-1]["type"] == "completed"
        reasons = [json.loads(f[b"__data__"]) for _, f in await server.client.xrange(keys.dead)]
    assert {entry["stage"] for entry in reasons} == {"normalizer", "parser", "fetcher"}
