"""What one attempt says breaks the connection that carries it, each time: its run ends, and the others go on."""

from __future__ import annotations

from pathlib import Path

from tests.censoring import FORBIDDEN, censoring
from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, ended, fleet
from tokenbus.bus.keys import Keys
from tokenbus.bus.server import Server
from tokenbus_services.replay import Delivery, ReplayServer, Reply, Script, Turn

BESIDE = 6
FINE = Script(name="fine", turns=(Turn(says=Reply(text="A word. " * 60), delivery=Delivery(pace=40)),))
BAD = Script(name="bad", turns=(Turn(says=Reply(text=f"Words. {FORBIDDEN.decode()} " + "more " * 20)),))


async def test_a_raw_frame_that_no_connection_bears_ends_its_run_alone(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, send: Send
) -> None:
    async with (
        censoring(server_url) as url,
        ReplayServer([FINE, BAD]) as provider,
        fleet(tmp_path, url, keys, provider.url, PIPELINE),
    ):
        beside = [await send("fine") for _ in range(BESIDE)]
        bad = await send("bad")
        beside += [await send("fine") for _ in range(BESIDE)]
        logs = await ended(server.client, keys, [*beside, bad])
        later = await send("fine")
        logs |= await ended(server.client, keys, [later])
    assert [logs[run][-1]["type"] for run in (*beside, later)] == ["completed"] * (2 * BESIDE + 1)
    last = logs[bad][-1]
    assert last["type"] == "failed"
    assert "FramesNotTaken" in str(last["error"]), last
