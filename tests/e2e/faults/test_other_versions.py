"""What another version wrote into the state and the input of a parser: one run ends, and its partition continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.e2e import judge
from tests.e2e.conftest import sender
from tests.e2e.fleet import PIPELINE, ended, fleet, only_separate
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.frames import CONTROL_ATTEMPT
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn

PACED = Script(name="paced", turns=(Turn(says=Reply(text="A word. " * 40), delivery=Delivery(pace=40)),))
CHECKPOINT = b"\xc1 of another version"
NEWER = msgspec.msgpack.encode([0, CONTROL_ATTEMPT, 5, [["of-a-newer-version", 1, {"more": "things"}]]])
"""A frame of `events` with an event of a kind that this version does not know."""
KEPT_MS = 600_000


@only_separate("killing a pipeline worker ends the provider's call too")
async def test_a_checkpoint_of_another_version_ends_its_run_and_an_unknown_event_none(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
) -> None:
    keys, client = Keys(keys.prefix, 1), server.client
    send = sender(server, keys)
    async with (
        MockProvider([PACED]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, PIPELINE) as running,
    ):
        speaking = await send("paced")
        await eventually(lambda: client.xlen(keys.log(speaking)))
        parser = running.worker_of("parser")
        parser.kill()
        await parser.process.wait()
        lost = "run-lost"  # its input was trimmed, so only its checkpoint has its state
        await client.hset(keys.run(lost), mapping={"status": "open", "turn": 0, "attempt": 1, "seq": 1})
        await client.xadd(keys.log(lost), {"__data__": json.dumps(started(lost))}, id="1-0")
        for key in (keys.run(lost), keys.log(lost)):
            await client.pexpire(key, KEPT_MS)
        for run in (lost, speaking):
            await client.hset(keys.state(0, "parser"), run, CHECKPOINT)
        await client.xadd(keys.topic(0, "events"), {speaking: NEWER})
        await running.start("parser")
        logs: Any = await ended(client, keys, [lost, speaking])
        after = await send("paced")
        logs |= await ended(client, keys, [after])
        assert not await client.hlen(keys.state(0, "parser"))
        assert not await client.xlen(keys.dead), "nothing was poison"
    assert (logs[lost][-1]["type"], logs[lost][-1]["error"]["code"]) == ("failed", "state_unreadable")
    for run in (speaking, after):  # the first one's input was still there, so its checkpoint was not needed
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed", logs[run][-1]


def started(run: str) -> dict[str, object]:
    return {"type": "started", "run": run, "seq": 0, "turn": 0, "attempt": 1, "provider": "anthropic", "model": "paced"}
