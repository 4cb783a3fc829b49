"""Cancel: the provider's socket closes, the partial output stays, nothing follows the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, Kind, ended, fleet, provider_table
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import RequestInvalid, RunCancelled
from tokenbus.events.public import Chunk
from tokenbus.events.requests import TextPart
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Stall, Status, ToolCall, Turn

SLOW = Script(name="slow", turns=(Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),))
HEARD = Script(name="heard", turns=(Turn(says=Reply(text="one two three four"), first=(Stall(after_text="three"),)),))
CALLING = Script(
    name="calling",
    turns=(
        Turn(says=Reply(text="Let me see.", tool_calls=(ToolCall(name="endless", arguments={}),))),
        Turn(says=Reply(text="never said")),
    ),
)
BUSY = Script(
    name="busy", turns=(Turn(says=Reply(text="late"), first=(Status(status=429, headers={"retry-after": "29"}),)),)
)
SILENT = Script(name="silent", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))


ENDLESS = """
import asyncio, os, pathlib

async def endless():
    marks = pathlib.Path(os.environ["MARKS"])
    (marks / "begun").touch()
    try:
        await asyncio.sleep(3600)
    finally:
        (marks / "stopped").touch()
"""
"""A tool, as a module of its own."""


def claude(url: str) -> str:
    return provider_table("claude", "anthropic", url, 'quirks = { models_continuing = [""] }')


async def cancel(server: Server, keys: Keys, run: str, **fields: Any) -> None:
    request = {"type": "cancel", "run": run, **fields}
    await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})


@pytest.mark.parametrize(
    ("model", "stream"), [("slow", True), ("silent", True), ("silent", False)], ids=["mid-stream", "before", "whole"]
)
async def test_a_cancel_closes_the_providers_socket(
    server: Server, keys: Keys, send: Send, model: str, stream: bool, deployed: Deploy
) -> None:
    async with deployed([SLOW, SILENT], PIPELINE) as (provider, _):
        run = await send(model, stream=stream)
        exchange = await provider.requested()
        if model == "slow":

            async def received() -> bool:
                return b"two" in b"".join([f[b"__data__"] for _, f in await server.client.xrange(keys.log(run))])

            await eventually(received)
        heard = 2 if model == "slow" else 0
        await cancel(server, keys, run, reason="enough", heard_through=heard)
        await provider.disconnected(exchange)
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    end = log[-1]
    assert (end["type"], end["reason"], end["heard_through"]) == ("cancelled", "enough", heard)
    assert judge.text(log) == ("one two three" if model == "slow" else "")
    assert await server.client.hget(keys.run(run), "status") == b"cancelled"


@pytest.mark.parametrize("mode", ["chat", "prefill"])
@pytest.mark.parametrize("policies", [[], ["watch"]], ids=["", "judged"])
async def test_the_messages_of_a_cancelled_run_end_where_its_listener_stopped(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path, mode: str, policies: list[str]
) -> None:
    toml = '[policies.watch]\nuse = "tokenbus.policy:RedactSecrets"\n'
    fields: dict[str, Any] = {"mode": mode, "policies": policies, "provider": "claude"}
    if mode == "prefill":
        fields |= {"participant": "Bot", "messages": [{"role": "user", "participant": "Ann", "content": "hello"}]}
    services: list[Kind] = [*PIPELINE, *(["policy"] if policies else [])]
    async with (
        MockProvider([HEARD]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, services, toml + claude(provider.url)),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        run = await send("heard", **fields)
        heard: Chunk | None = None
        text = ""
        async for event in bus.follow(run):
            if isinstance(event, Chunk):
                heard, text = event, text + event.text
            if "three" in text:
                break
        assert heard
        with pytest.raises(RequestInvalid, match="heard_through: 999 is beyond the newest event"):
            await bus.cancel(run, heard_through=999)
        await cancel(server, keys, run, heard_through=999)  # as any program would, without the client

        async def refused() -> bool:
            letters = await server.client.xrange(keys.dead)
            return any(b"heard_through: 999 is beyond" in fields[b"__data__"] for _, fields in letters)

        await eventually(refused)
        assert await server.client.hget(keys.run(run), "status") == b"open"
        characters = max(len(heard.text) - 2, 0)
        await bus.cancel(run, heard_through=heard.seq, heard_characters=characters)
        (message,) = await bus.messages(run)
        said = text[: len(text) - len(heard.text) + characters]
        assert [part.text for part in message.content if isinstance(part, TextPart)] == [said]
        assert await bus.messages(run, heard_through=-1) == []
        with pytest.raises(RequestInvalid, match="beyond the newest event"):
            await bus.messages(run, heard_through=999)
        with pytest.raises(RunCancelled) as caught:
            await bus.result(run)
        assert caught.value.result
        assert (caught.value.result.heard_through, caught.value.result.text) == (heard.seq, text)
        resumed = await bus.resume(run)
        await eventually(lambda: len(provider.requests) == 2)
        sent = provider.requests[1].http_request.body.decode()
        assert said.rstrip() in sent
        assert "three" not in sent
        await bus.cancel(resumed)


async def test_a_cancel_during_a_tool_stops_the_tool_and_gives_its_call_a_result(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    (tmp_path / "endless_tool.py").write_text(ENDLESS)
    begun, stopped = tmp_path / "begun", tmp_path / "stopped"
    toml = '[tools.endless]\nkind = "python"\ncall = "endless_tool:endless"\n'
    async with deployed([CALLING], (), toml) as (provider, services):
        await services.start("tools", env={"PYTHONPATH": str(tmp_path), "MARKS": str(tmp_path)})
        await services.start(*PIPELINE)
        run = await send("calling", tools=[{"name": "endless", "parameters": {"type": "object"}}])
        await eventually(begun.exists)
        await cancel(server, keys, run, heard_through=2)
        log: Any = (await ended(server.client, keys, [run]))[run]
        await eventually(stopped.exists)
        assert len(provider.requests) == 1
    judge.check(log)
    results = [e for e in log if e["type"] == "block_complete" and e["kind"] == "tool_result"]
    assert [(r["tool_name"], r["content"], r["is_error"]) for r in results] == [("endless", "cancelled", True)]
    assert (log[-1]["type"], log[-1]["heard_through"]) == ("cancelled", 2)


@pytest.mark.parametrize(
    ("model", "toml"),
    [("busy", ""), ("slow", "[limits.providers.anthropic]\nconcurrency = 1\n")],
    ids=["a retry's delay", "a limit"],
)
async def test_a_cancel_ends_a_wait(
    server: Server, keys: Keys, send: Send, model: str, toml: str, deployed: Deploy
) -> None:
    async with deployed([SLOW, BUSY], PIPELINE, toml) as (provider, _):
        runs = [await send(model)]
        await provider.requested()
        if toml:
            runs.append(await send(model))  # the first one has the only place
        await eventually(lambda: waits(server, keys, runs[-1], again=not toml))
        await cancel(server, keys, runs[-1])
        log: Any = (await ended(server.client, keys, runs[-1:]))[runs[-1]]
        await eventually(lambda: gone(server, keys, runs[-1]))
        assert len(provider.requests) == 1, "it was not called in the end"
        await cancel(server, keys, runs[0])
        await ended(server.client, keys, runs[:1])
    assert log[-1]["type"] == "cancelled"


async def waits(server: Server, keys: Keys, run: str, *, again: bool) -> bool:
    """Whether a fetcher has the run's first attempt, or the next one, in hand."""
    attempt = await server.client.hget(keys.run(run), "attempt")
    return attempt == (b"2" if again else b"1") and not await gone(server, keys, run) and await taken(server, keys)


async def taken(server: Server, keys: Keys) -> bool:
    """Whether a fetcher has claimed every entry of the queues."""
    for partition in range(keys.partitions):
        stream = keys.topic(partition, "turns")
        [group] = await server.client.xinfo_groups(stream)
        if group["pending"] != await server.client.xlen(stream):
            return False
    return True


async def gone(server: Server, keys: Keys, run: str) -> bool:
    """Whether nothing of the run is left on its queue."""
    entries = await server.client.xrange(keys.topic(keys.partition_of(run), "turns"))
    return all(run.encode() not in fields for _, fields in entries)


async def test_a_cancel_that_comes_before_its_request_takes_effect(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([SLOW], PIPELINE) as (provider, _):
        await cancel(server, keys, "early")
        await eventually(lambda: server.client.exists(keys.run("early")))
        run = await send("slow", id="early")
        log: Any = (await ended(server.client, keys, [run]))[run]
        assert not provider.requests, "the provider was never called"
    assert [e["type"] for e in log] == ["started", "cancelled"]
