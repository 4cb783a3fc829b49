"""`tokenbus dead` against a server."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.services.cli.process import run, settings_file
from tokenbus.bus.dead_letters import KEPT_BYTES, DeadLetter, dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server

REQUEST: dict[str, Any] = {
    "type": "generate",
    "provider": "p",
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
}
HOSTILE = "\x1b]0;owned\x07\x9b2J"


@pytest.fixture
async def config(server: Server, server_url: str, keys: Keys, tmp_path: Path) -> str:
    """Settings of a deployment that has begun. For TOKENBUS_CONFIG."""
    await join_deployment(server, keys)
    text = f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}'
    return settings_file(tmp_path, text)


class Morgue:
    """Puts entries into the dead stream, as those do who cannot take them."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server = server
        self.keys = keys

    async def request(self, data: bytes, *, entry: str = "5-0", run: str | None = None) -> str:
        return await self.add(stage="intake", stream=self.keys.requests, entry=entry, bytes=data, run=run)

    async def step(self, run: str) -> str:
        stream = self.keys.topic(self.keys.partition_of(run), "raw")
        return await self.add(stage="normalizer", stream=stream, entry="7-1", bytes=b"\xc1", run=run)

    async def add(self, **fields: Any) -> str:
        await dead_letter(self.server, self.keys, DeadLetter(reason="no such thing", **fields), most=1000)
        [(entry_id, _)] = await self.server.client.xrevrange(self.keys.dead, count=1)
        return entry_id.decode()

    async def left(self) -> list[str]:
        return [entry_id.decode() for entry_id, _ in await self.server.client.xrange(self.keys.dead)]

    async def sent(self) -> list[dict[str, Any]]:
        """What is on the inbound stream."""
        entries = await self.server.client.xrange(self.keys.requests)
        return [json.loads(fields[b"__data__"]) for _, fields in entries]

    async def run(self, name: str, **fields: str | bytes) -> None:
        await self.server.client.hset(self.keys.run(name), mapping=fields)
        await self.server.client.pexpire(self.keys.run(name), 60_000)


@pytest.fixture
def morgue(server: Server, keys: Keys) -> Morgue:
    return Morgue(server, keys)


async def test_the_list_has_the_newest_first_with_origin_and_reason(morgue: Morgue, config: str):
    old, new = await morgue.request(b"first"), await morgue.step("r1")
    listed = await run("dead", "list", TOKENBUS_CONFIG=config)
    assert [line.split() for line in listed.out.splitlines()] == [
        [new, "normalizer", "r1", "1", "B", "no", "such", "thing"],
        [old, "intake", "-", "5", "B", "no", "such", "thing"],
    ]
    as_json = await run("dead", "list", "--json", "--most", "1", TOKENBUS_CONFIG=config)
    [entry] = map(json.loads, as_json.out.splitlines())
    assert (entry["id"], entry["run"], entry["entry"], entry["size"]) == (new, "r1", "7-1", 1)
    assert "bytes" not in entry


async def test_an_empty_dead_stream_prints_that_it_is_empty(config: str):
    assert await run("dead", "list", TOKENBUS_CONFIG=config) == (0, "", "no dead entries\n")
    assert await run("dead", "list", "--json", TOKENBUS_CONFIG=config) == (0, "", "")


async def test_an_entry_is_shown_whole_and_its_bytes_never_reach_the_terminal_as_they_are(morgue: Morgue, config: str):
    data = json.dumps({"model": HOSTILE}, ensure_ascii=False).encode()
    entry = await morgue.add(stage="intake" + HOSTILE, stream="s", entry="5-0", bytes=data)
    shown = await run("dead", "show", entry, TOKENBUS_CONFIG=config)
    assert "no such thing" in shown.out
    assert "JSON" in shown.out
    assert not {"\x1b", "\x07", "\x9b"} & set(shown.out)
    as_json = await run("dead", "show", entry, "--json", TOKENBUS_CONFIG=config)
    assert base64.b64decode(json.loads(as_json.out)["bytes"]) == data
    raw = await run("dead", "show", entry, "--raw", TOKENBUS_CONFIG=config)
    assert raw.out.encode() == data


async def test_an_entry_of_another_program_is_shown_and_can_be_dropped(
    server: Server, keys: Keys, morgue: Morgue, config: str
):
    entry = (await server.client.xadd(keys.dead, {"other": "field"})).decode()
    shown = await run("dead", "show", entry, TOKENBUS_CONFIG=config)
    assert "no entry of tokenbus" in shown.out
    assert (await run("dead", "retry", entry, TOKENBUS_CONFIG=config)).code == 1
    assert (await run("dead", "drop", entry, TOKENBUS_CONFIG=config)).code == 0
    assert await morgue.left() == []


async def test_a_refused_request_is_sent_again_as_a_run_of_its_own(morgue: Morgue, config: str):
    entry = await morgue.request(json.dumps({**REQUEST, "id": "mine"}).encode(), run="mine")
    ended = await run("dead", "retry", entry, "--json", TOKENBUS_CONFIG=config)
    [request] = await morgue.sent()
    assert (ended.code, json.loads(ended.out)) == (0, {"id": entry, "run": request["id"]})
    assert request["id"] != "mine", "that run has ended, and its subscribers have its end"
    assert request["messages"] == REQUEST["messages"]
    assert request["metadata"] == {"retry_of": "mine"}
    assert await morgue.left() == []


async def test_however_often_an_entry_is_sent_again_it_is_one_run(morgue: Morgue, config: str):
    data = json.dumps(REQUEST).encode()
    for _ in range(2):  # a crash in burying shows it twice; one in a retry leaves it where it was
        await morgue.request(data)
    assert (await run("dead", "retry", "--all", TOKENBUS_CONFIG=config)).code == 0
    await morgue.request(data, entry="6-0")
    assert (await run("dead", "retry", "--all", TOKENBUS_CONFIG=config)).code == 0
    first, again, other = [request["id"] for request in await morgue.sent()]
    assert first == again
    assert other != first


async def test_a_step_of_a_failed_run_sends_its_request_again(morgue: Morgue, config: str):
    await morgue.run("r1", status="failed", request=json.dumps({**REQUEST, "id": "r1"}))
    entry = await morgue.step("r1")
    assert (await run("dead", "retry", entry, TOKENBUS_CONFIG=config)).code == 0
    [request] = await morgue.sent()
    assert (request["model"], request["id"] == "r1") == ("m", False)
    assert await morgue.left() == []


async def test_an_event_that_a_group_could_not_handle_is_shown_with_run_and_seq_and_given_back(
    server: Server, keys: Keys, morgue: Morgue, config: str
):
    about: dict[str, Any] = {"stage": "group visible:tts", "group": "visible:tts", "run": "r1", "seq": 7}
    entry = await morgue.add(stream=keys.topic(2, "visible"), entry="5-0", bytes=b"{}", **about)
    shown = await run("dead", "show", entry, TOKENBUS_CONFIG=config)
    assert "run     r1\nseq     7\n" in shown.out
    ended = await run("dead", "retry", entry, TOKENBUS_CONFIG=config)
    assert (ended.code, ended.out) == (0, f"{entry} given back to the group visible:tts\n")
    [(_, given)] = await server.client.xrange(keys.returned(2, "visible:tts"))
    assert given == {b"__data__": b"{}"}
    assert await morgue.left() == []


async def test_entries_that_cannot_be_resent_stay_with_the_reason_and_the_others_are_sent(morgue: Morgue, config: str):
    await morgue.run("done", status="completed", request=json.dumps(REQUEST))
    await morgue.run("never", status="failed")
    why = {
        await morgue.request(b"\xff no request"): "neither a JSON object",
        await morgue.request(json.dumps({**REQUEST, "max_tokens": "many"}).encode()): "max_tokens",
        await morgue.request(b'{"type":"cancel","run":"r"}'): "cancel",
        await morgue.request(json.dumps({**REQUEST, "system": "x" * KEPT_BYTES}).encode()): "publish the request again",
        await morgue.step("unknown"): "unknown run unknown",
        await morgue.step("done"): "completed",
        await morgue.step("never"): "refused",
    }
    good = await morgue.request(json.dumps(REQUEST).encode())
    ended = await run("dead", "retry", "--all", TOKENBUS_CONFIG=config)
    assert ended.code == 1
    printed = dict(line.split(" ", 1) for line in ended.out.splitlines())
    assert [(reason, printed[entry]) for entry, reason in why.items() if reason not in printed[entry]] == []
    assert "sent again" in printed[good]
    assert await morgue.left() == list(why)


async def test_entries_are_dropped_one_by_one_or_all(morgue: Morgue, config: str):
    first, *_ = [await morgue.request(b"x", entry=f"{n}-0") for n in range(40)]
    assert (await run("dead", "drop", first, TOKENBUS_CONFIG=config)).code == 0
    assert first not in await morgue.left()
    gone = await run("dead", "drop", first, TOKENBUS_CONFIG=config)
    assert (gone.code, gone.error) == (1, f"error: no dead entry {first}")
    unasked = await run("dead", "drop", "--all", TOKENBUS_CONFIG=config)
    assert unasked.code == 2
    assert "--yes" in unasked.error
    assert (await run("dead", "drop", "--all", "--yes", TOKENBUS_CONFIG=config)).code == 0
    assert await morgue.left() == []


@pytest.mark.parametrize("arguments", [(), ("1-0", "--all"), ("x",), ("99999999999999999999-0",)])
async def test_entries_must_be_named_well(config: str, arguments: tuple[str, ...]):
    assert (await run("dead", "drop", *arguments, TOKENBUS_CONFIG=config)).code == 2


def test_every_entry_that_is_buried_can_be_read_again():
    entry = DeadLetter(reason="r", stage="s", stream="t", entry="1-0", bytes=b"\xff", size=9)
    assert msgspec.json.decode(msgspec.json.encode(entry), type=DeadLetter) == entry
