"""Debug records through the running services: recorded, replayed, and equal."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, WITH_TOOLS, Fleet, Worker, ended, fleet, log_of
from tests.services.cli import process
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import RecordEntry, find_record, newest_records
from tokenbus.bus.server.server import Server
from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.errors import RecordNotFound
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.mock_provider import (
    CutOff,
    Delivery,
    MockProvider,
    Picture,
    Random,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
)
from tokenbus_services.recorder import record as records
from tokenbus_services.recorder.record import Record
from tokenbus_services.recorder.replay import differences, replay

TOOL_REPLY = Reply(
    thinking="Let me think of it first.",
    text="I shall look it up.",
    tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),),
)
CUTS = Delivery(cuts=Random(seed=7, largest=11))
WITH_A_RETRY = Script(
    name="retry",
    turns=(
        Turn(says=TOOL_REPLY, first=(Status(status=529), CutOff(after_text="think")), delivery=CUTS),
        Turn(says=Reply(text="It is fair. " * 200), delivery=CUTS),
    ),
)
IN_PREFILL = Script(
    name="prefill",
    turns=(
        Turn(
            says=Reply(
                text=' Hm.\n<function_calls><invoke name="weather"><parameter name="city">Bern</parameter></invoke>'
                "</function_calls> and what nobody hears"
            ),
            delivery=CUTS,
        ),
        Turn(says=Reply(text=" It is fair."), delivery=CUTS),
    ),
)
STALLS = Script(name="stalls", turns=(Turn(says=Reply(text="Some of it was said."), fault=Stall(after_text="said")),))
SLOW = Script(
    name="slow",
    turns=(Turn(says=Reply(thinking="Let me think. " * 60, text="It was said. " * 20), delivery=Delivery(pace=60)),),
)
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\x00\x00\x00\x01\x00\x00\x00\x01"
PAINTS = Script(
    name="paints",
    turns=(Turn(says=Reply(text="Here:", pictures=(Picture(data=PNG * 100, previews=(PNG,)),)), delivery=CUTS),),
)
SCRIPTS = [SLOW, WITH_A_RETRY, IN_PREFILL, STALLS, PAINTS]
QUICK = "[retry]\nbase_delay_s = 0.01\n"


class Scene:
    """A deployment with a blob store and a recorder."""

    def __init__(self, server: Server, keys: Keys, workers: Fleet, store: Worker, config: Path) -> None:
        self.server = server
        self.keys = keys
        self.workers = workers
        self.store = store
        self.config = str(config)

    async def recorded(self, run: str) -> RecordEntry:
        """The index's entry of a run, once it is there and nothing else is left of the recording."""

        async def entry() -> RecordEntry | None:
            try:
                return await find_record(self.server, self.keys, run)
            except RecordNotFound:
                return None

        found = await eventually(entry, timeout=60)
        assert found
        await eventually(lambda: self.nothing_left(run))
        return found

    async def nothing_left(self, run: str) -> bool:
        """Whether the server keeps nothing of the run but what it keeps of every run."""
        client = self.server.client
        names = [name.decode() for name in await client.hkeys(self.keys.run(run))]
        waiting = await client.xlen(self.keys.topic(self.keys.partition_of(run), "records"))
        kept = [name for name in names if name.startswith("frame:") or name == "record"]
        return not (kept or waiting or await client.exists(self.keys.tape(run)))

    async def record(self, run: str) -> Record:
        entry = await self.recorded(run)
        async with HttpBlobs(self.store.url) as blobs:
            return await records.load(entry.blob_id, blobs)

    async def command(self, *arguments: str) -> process.Ended:
        return await process.run(*arguments, TOKENBUS_CONFIG=self.config)


@asynccontextmanager
async def scene(
    server: Server, server_url: str, keys: Keys, directory: Path, provider: MockProvider, *, table: str = "[records]"
) -> AsyncGenerator[Scene]:
    async with fleet(directory, server_url, keys, provider.url, ()) as stores:
        [store] = await stores.start("blobs")
        toml = f'{QUICK}{table}\n[blobs]\nservice_url = "{store.url}"\n'
        async with fleet(directory, server_url, keys, provider.url, (), toml) as workers:
            await workers.start(*WITH_TOOLS)
            yield Scene(server, keys, workers, store, directory / "tokenbus.toml")


async def test_a_replay_of_a_recorded_run_is_equal(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider(SCRIPTS) as provider, scene(server, server_url, keys, tmp_path, provider) as it:
        await it.workers.start("recorder")
        fields: dict[str, Any] = {"tools": [WEATHER], "record": True}
        runs = [await send("retry", f"hello {api}", provider=api, id=api, **fields) for api in BASE_PATHS]
        runs.append(await send("prefill", "hello", id="prefill", mode="prefill", participant="Claude", **fields))
        paints: dict[str, Any] = {"provider": "openai-responses", "images": {"previews": 1}, "record": True}
        runs.append(await send("paints", "hello", id="paints", **paints))
        runs.append(await send("stalls", "hello", id="stalls", record=True))
        plain = await send("retry", "hello", id="plain", tools=[WEATHER])
        await eventually(lambda: has_visible_text(server, keys, "stalls"), timeout=60)
        await server.client.xadd(keys.requests, {"__data__": json.dumps({"type": "cancel", "run": "stalls"})})
        logs: Any = await ended(server.client, keys, [*runs, plain])
        for run in runs:
            record = await it.record(run)
            assert record.events == logs[run]
            assert differences(record.public_events(), replay(record)) == [], run
        assert await it.nothing_left(plain)
        with pytest.raises(RecordNotFound):
            await find_record(server, keys, plain)
        assert [logs[run][-1]["type"] for run in runs] == ["completed"] * (len(BASE_PATHS) + 2) + ["cancelled"]
        assert {(await it.recorded(api)).attempts for api in BASE_PATHS} == {4}, "two tries that failed, and two turns"

        listed = await it.command("records", "--json")
        assert sorted(json.loads(line)["run"] for line in listed.out.splitlines()) == sorted(runs)
        shown = await it.command("records", "show", "anthropic")
        assert "anthropic answered 529" in shown.out
        assert "attempt 4 of turn 1" in shown.out
        replayed = await it.command("replay", "anthropic", "--json")
        assert (replayed.code, replayed.err) == (0, "run anthropic: the replay equals the recorded result\n")
        assert json.loads(replayed.out.splitlines()[-1])["type"] == "completed"

        file = tmp_path / "record.json"
        assert (await it.command("records", "export", "gemini", str(file))).code == 0
        assert (await process.run("replay", "--file", str(file))).code == 0, "no server is needed"
        changed = json.loads(file.read_bytes())
        changed["events"][-1]["finish"] = "length"
        file.write_text(json.dumps(changed))
        differs = await process.run("replay", "--file", str(file))
        assert differs.code == 1
        assert '-{"type":"completed"' in differs.err
        missing = await it.command("replay", "plain")
        assert (missing.code, "no record of run plain" in missing.error) == (1, True)


async def has_visible_text(server: Server, keys: Keys, run: str) -> bool:
    return any(event["type"] == "chunk" for event in await log_of(server.client, keys, run))


async def test_a_run_is_recorded_once_though_its_recorder_dies(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    table = "[records]\nsample = 1.0\nraw_bytes = 2000\n"
    async with (
        MockProvider(SCRIPTS) as provider,
        scene(server, server_url, keys, tmp_path, provider, table=table) as it,
    ):
        [first] = await it.workers.start("recorder")
        it.store.freeze()
        try:
            run = await send("retry", tools=[WEATHER])
            unwanted = await send("retry", tools=[WEATHER], record=False)
            await ended(server.client, keys, [run, unwanted])
            records_of = keys.topic(keys.partition_of(run), "records")
            await eventually(lambda: taken(server, records_of))
            first.kill()
        finally:
            it.store.thaw()
        await it.workers.start("recorder")
        entry = await it.recorded(run)
        found = [e.run async for e in newest_records(server, keys)]
        record = await it.record(run)
    assert found == [run]
    assert (entry.truncated, record.truncated) == (True, True)
    assert 0 < sum(map(len, msgspec.msgpack.decode(record.frames))) <= 2000


async def taken(server: Server, stream: str) -> bool:
    """Whether a recorder has the entry in hand."""
    return bool((await server.client.xpending(stream, "recorder"))["pending"])


@pytest.mark.leaves_pending  # a consumer that was killed keeps its name until a later worker sweeps it away
async def test_a_record_is_complete_without_duplicates_after_every_worker_died(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    async with MockProvider(SCRIPTS) as provider, scene(server, server_url, keys, tmp_path, provider) as it:
        await it.workers.start("recorder")
        victims = [worker for worker in it.workers.workers if worker.kind in PIPELINE]
        run = await send("slow", record=True)
        await eventually(lambda: has_visible_text(server, keys, run), timeout=60)
        for worker in victims:
            worker.kill()
        await it.workers.start(*PIPELINE)
        logs: Any = await ended(server.client, keys, [run])
        record = await it.record(run)
    assert record.events == logs[run]
    assert [e["type"] for e in logs[run] if e["type"] == "retrying"], "the first attempt was lost with its fetcher"
    assert differences(record.public_events(), replay(record)) == []
    assert sum(piece.events for piece in record.taken()) == raw_events(record), "once each"


def raw_events(record: Record) -> int:
    """How many events the raw stream and the tape's control frames give."""
    readers = {frame.attempt: AttemptReader(frame.attempt) for frame in record.raw_frames()}
    decoded = sum(len(readers[frame.attempt].read(frame)) for frame in record.raw_frames())
    return decoded + sum(len(piece.frame.events) for piece in record.taken())


async def test_a_deployment_without_records_refuses_a_run_with_record(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    async with deployed(SCRIPTS, ("fetcher", "parser")):
        run = await send("retry", record=True)
        log: Any = (await ended(server.client, keys, [run]))[run]
    assert log[-1]["error"]["where"] == "record"
    assert "[records]" in log[-1]["error"]["message"]
    ended_at_once = await process.run("worker", "recorder", TOKENBUS_CONFIG=str(tmp_path / "tokenbus.toml"))
    assert ended_at_once.code == 2
