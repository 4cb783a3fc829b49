"""send, follow, tail, cancel and doctor against a server, with runs written as the parser writes them."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client.listed import Listed
from tests.services.cli.events import EventFactory
from tests.services.cli.process import Command, fed, run, running, settings_file
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.events.public import PublicEvent, encode
from tokenbus_services.process.embedded_server import free_port


@pytest.fixture
async def config(server: Server, server_url: str, keys: Keys, tmp_path: Path) -> str:
    """Settings of a deployment that has begun. For TOKENBUS_CONFIG."""
    await join_deployment(server, keys)
    text = f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}'
    return settings_file(tmp_path, text, blobs=free_port())  # nobody is there, also if a developer's `up` runs


async def written(server: Server, keys: Keys, events: Iterable[PublicEvent]) -> None:
    """Put events into their run's log, as the parser does."""
    for event in events:
        log = keys.log(event.run)
        await server.client.xadd(log, {"__data__": encode(event)}, id=f"{event.attempt}-{event.seq}")
        await server.client.pexpire(log, 60_000)


async def requests(server: Server, keys: Keys) -> list[dict[str, Any]]:
    """What is on the inbound stream."""
    return [json.loads(fields[b"__data__"]) for _, fields in await server.client.xrange(keys.requests)]


def events_until(end: str) -> list[PublicEvent]:
    run = EventFactory()
    return [
        run.started(),
        run.chunk(0, "Hel"),
        run.chunk(0, "lo"),
        run.block(0, "text", content="Hello"),
        getattr(run, end)(),
    ]


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("incomplete", 4), ("failed", 5), ("cancelled", 6)])
async def test_follow_ends_with_the_code_of_how_the_run_ended(
    server: Server, keys: Keys, config: str, end: str, code: int
):
    await written(server, keys, events_until(end))
    shown, behind = await asyncio.gather(
        run("follow", "r1", TOKENBUS_CONFIG=config), run("follow", "r1", "--after", "4", TOKENBUS_CONFIG=config)
    )
    assert shown.code == code
    assert shown.out.startswith("[started] anthropic m\nHello\n")
    assert f"[{end}]" in shown.out
    assert (behind.code, behind.out) == (code, ""), "also where the cursor is behind the end"


async def test_follow_as_json_gives_each_event_as_it_is_on_the_bus(server: Server, keys: Keys, config: str):
    events = events_until("completed")
    await written(server, keys, events)
    ended = await run("follow", "r1", "--json", "--after", "0", TOKENBUS_CONFIG=config)
    assert ended.out.encode().splitlines() == [encode(event) for event in events[1:]]


async def test_follow_shows_text_while_the_run_streams(server: Server, keys: Keys, config: str, tmp_path: Path):
    events = events_until("completed")
    await written(server, keys, events[:2])
    async with running(tmp_path / "err", "follow", "r1", TOKENBUS_CONFIG=config) as follow:
        assert follow.process.stdout
        assert await follow.process.stdout.readuntil(b"Hel") == b"[started] anthropic m\nHel"
        await written(server, keys, events[2:])
        assert await follow.process.wait() == 0


async def test_send_puts_the_request_on_the_bus_and_prints_its_run(server: Server, keys: Keys, config: str):
    by_options = await run(
        *("send", "--provider", "p", "--model", "m", "--text", "hi", "--tool", "weather"), TOKENBUS_CONFIG=config
    )
    request = b'{"id": "mine", "provider": "p", "model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    by_file = await fed(request, "send", "-", "--json", TOKENBUS_CONFIG=config)
    one, two = await requests(server, keys)
    assert (by_options.code, by_options.out) == (0, one["id"] + "\n")
    assert "no service has accepted it for 3 s" in by_options.err
    assert one["tools"] == [{"name": "weather"}]
    assert (by_file.code, json.loads(by_file.out), two["id"]) == (0, {"run": "mine"}, "mine")


async def test_send_follow_shows_the_run_and_prints_its_id_on_stderr(
    server: Server, keys: Keys, config: str, tmp_path: Path
):
    await written(server, keys, events_until("completed"))
    request = ("send", "--id", "r1", "--provider", "p", "--model", "m", "--text", "hi", "--follow")
    ended = await run(*request, TOKENBUS_CONFIG=config)
    assert (ended.code, ended.err) == (0, "r1\n")
    assert "Hello\n[completed]" in ended.out


async def test_a_request_that_cannot_be_is_refused_before_it_is_sent(server: Server, keys: Keys, config: str):
    ended = await fed(b'{"provider": "p", "model": 7}', "send", "-", TOKENBUS_CONFIG=config)
    assert ended.code == 2
    assert "model" in ended.error
    assert await requests(server, keys) == []


async def test_a_file_and_options_do_not_mix(server: Server, keys: Keys, config: str):
    ended = await fed(b"{}", "send", "-", "--model", "m", TOKENBUS_CONFIG=config)
    assert ended.code == 2
    assert "FILE" in ended.error


async def test_cancel_asks_for_the_end_with_the_reason(server: Server, keys: Keys, config: str):
    await Listed(server, keys).accept("r1", 1000)
    assert (await run("cancel", "r1", "--reason", "enough", TOKENBUS_CONFIG=config)).code == 0
    assert await requests(server, keys) == [{"type": "cancel", "run": "r1", "reason": "enough"}]
    [entry] = (await run("audit", "--json", TOKENBUS_CONFIG=config)).out.splitlines()
    assert json.loads(entry)["action"] == "cancel"


async def next_line(command: Command, server: Server, keys: Keys, event: PublicEvent) -> bytes:
    """The first line that a tail shows, with the event put on `chunks` until it listens."""
    assert command.process.stdout
    reading = asyncio.create_task(command.process.stdout.readline())
    while not reading.done():
        await server.client.xadd(keys.topic(keys.partition_of(event.run), "chunks"), {"__data__": encode(event)})
        await asyncio.wait({reading}, timeout=0.05)
    return reading.result()


@pytest.mark.parametrize("group", [(), ("--group", "g")])
async def test_tail_shows_a_topic_until_ctrl_c(
    server: Server, keys: Keys, config: str, tmp_path: Path, group: tuple[str, ...]
):
    event = EventFactory().chunk(0, "a\nb")
    async with running(tmp_path / "err", "tail", "chunks", "--json", *group, TOKENBUS_CONFIG=config) as tail:
        assert await next_line(tail, server, keys, event) == encode(event) + b"\n"
        assert await tail.stop(signal.SIGINT) == 130
    assert tail.log.read_text().strip() == ""


async def test_tail_from_the_start_shows_what_is_kept_of_the_chosen_runs_and_kinds(
    server: Server, keys: Keys, config: str, tmp_path: Path
):
    for run_id in ("r1", "r2"):
        for event in (EventFactory(run_id).started(), EventFactory(run_id).failed()):
            await server.client.xadd(keys.topic(keys.partition_of(run_id), "runs"), {"__data__": encode(event)})
    choice = ("--from", "start", "--run", "r2", "--kind", "failed")
    async with running(tmp_path / "err", "tail", "runs", "--json", *choice, TOKENBUS_CONFIG=config) as tail:
        assert json.loads(await tail.says("{"))["run"] == "r2"
        assert '"failed"' in tail.seen[0]
    wrong = await run("tail", "runs", "--kind", "fialed", TOKENBUS_CONFIG=config)
    assert wrong.code == 2
    assert "did you mean 'failed'?" in wrong.error


async def test_tail_without_json_is_a_line_an_event(server: Server, keys: Keys, config: str, tmp_path: Path):
    event = EventFactory().chunk(0, "a\nb")
    async with running(tmp_path / "err", "tail", "chunks", TOKENBUS_CONFIG=config) as tail:
        assert await next_line(tail, server, keys, event) == b'r1 0 chunk 0 text "a\\nb"\n'


async def test_a_closed_output_pipe_ends_a_command_without_an_error_message(
    server: Server, keys: Keys, config: str, tmp_path: Path
):
    event = EventFactory().chunk(0, "x" * 4096)
    async with running(tmp_path / "err", "tail", "chunks", TOKENBUS_CONFIG=config) as tail:
        await next_line(tail, server, keys, event)
        transport: Any = tail.process._transport  # pyright: ignore[reportAttributeAccessIssue]
        transport.get_pipe_transport(1).close()
        while tail.process.returncode is None:
            await server.client.xadd(keys.topic(keys.partition_of(event.run), "chunks"), {"__data__": encode(event)})
            await asyncio.wait({asyncio.create_task(tail.process.wait())}, timeout=0.05)
    assert tail.process.returncode == 1
    assert tail.log.read_text() == ""


async def test_doctor_says_what_is_wrong_and_what_to_do(server: Server, keys: Keys, config: str):
    await server.client.xadd(
        keys.dead, {"__data__": b'{"reason":"no JSON","stage":"intake","stream":"s","entry":"1-0","bytes":""}'}
    )
    ended = await run("doctor", "--json", TOKENBUS_CONFIG=config, ANTHROPIC_API_KEY="sk-secret")
    assert ended.code == 1, ended.err
    findings = {finding["about"]: finding for finding in json.loads(ended.out)}
    assert [findings[name]["level"] for name in ("settings", "server", "deployment")] == ["ok"] * 3
    assert findings["parser"]["says"].startswith("no worker owns partition 0, 1, 2, 3")
    assert "todo" not in findings["parser"], "one hint a cause: no worker runs at all"
    assert findings["workers"]["todo"] == "start `tokenbus up`, or the workers"
    assert findings["blobs"]["level"] == "wrong"
    assert "intake: no JSON" in findings["dead"]["says"]
    assert findings["provider anthropic"]["level"] == "ok"
    assert "sk-secret" not in ended.out + ended.err


async def test_doctor_reports_a_deployment_with_other_partitions(server: Server, keys: Keys, config: str):
    ended = await run("doctor", TOKENBUS_CONFIG=config, TOKENBUS_PARTITIONS="7")
    assert ended.code == 1, ended.err
    assert "wrong deployment: partitions is 7 here but 4 on the server" in ended.out
