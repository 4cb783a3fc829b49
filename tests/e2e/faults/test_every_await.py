"""The work on an item may end at any of its awaits: its worker stops or dies there, or a defect cancels it. Then
another worker takes over: nothing is lost, doubled or stuck.

The runs of a test differ in the await at which their item is held; all are held at once, and then their worker ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.faults.faulty_worker import FaultyWorker, held_name
from tests.e2e.fleet import PIPELINE, Fleet, Kind, ended, log_of
from tests.e2e.judge import check
from tests.waiting import eventually
from tokenbus.blobs import blob_id_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import BEGUN
from tokenbus.bus.server.server import Server
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import (
    TOKEN,
    TOOL_RESULT,
    Delivery,
    MockProvider,
    Reply,
    Script,
    ToolCall,
    Turn,
)

SAYS = f"All is well with {TOKEN} today."
PACED = Delivery(pace=50)
PLAIN = Script(name="plain", turns=(Turn(says=Reply(text=SAYS), delivery=PACED),))
LIMITED = Script(name="limited", turns=PLAIN.turns)
WITH_CALL = Script(
    name="call",
    turns=(
        Turn(says=Reply(text="", tool_calls=(ToolCall(name="weather", arguments={"city": TOKEN}),))),
        Turn(says=Reply(text=f"It says {TOOL_RESULT}.")),
    ),
)
ENDS = ("stops", "dies", "is cancelled by a defect")
ANSWERED_S = 180.0
"""All items of a test are begun at once, and one machine serves them."""
AT_ONCE = 12
"""Awaits for which a run is sent before it is seen whether there are more."""
SETTINGS = """
[stages]
drain_s = 0.0
[limits.providers.anthropic.models.limited]
concurrency = 1000
"""
POLICY = """
[policies.nothing]
use = "tests.e2e.policies.guards:NoTool"
[policies.nothing.options]
word = "never"
"""
KEY = new_key()
GATEWAY = f"""
[gateway]
[gateway.keys.someone]
sha256 = "{KEY.sha256}"
max_parallel_requests = 1000
"""
UNLIMITED = httpx.Limits(max_connections=None)
end_of_worker = pytest.mark.parametrize("end", ENDS)

pytestmark = [pytest.mark.leaves_pending, pytest.mark.timeout(600)]


@asynccontextmanager
async def faulty(kind: Kind, directory: Path) -> AsyncGenerator[FaultyWorker]:
    worker = FaultyWorker(kind, directory, f"faulty-{kind}")
    try:
        await worker.ready()
        yield worker
    finally:
        await worker.kill()


async def hold_all(worker: FaultyWorker, site: str, begin: Callable[[str], Awaitable[object]]) -> list[str]:
    """Begin items until one of them has fewer awaits than it is to be held at. Their names."""
    names: list[str] = []

    def has_all() -> bool:
        return set(names) <= worker.items.keys()

    while not any(worker.items.get(name) == "over" for name in names):
        for step in range(len(names) + 1, len(names) + 1 + AT_ONCE):
            names.append(held_name(site, step, worker.kind))
            await begin(names[-1])
        try:
            await eventually(has_all, timeout=ANSWERED_S)
        except AssertionError:
            missing = sorted(set(names) - worker.items.keys())
            raise AssertionError(f"neither held nor over: {missing}\n{worker.log[-4000:]}") from None
    held = sum(worker.items[name] == "held" for name in names)
    print(f"{worker.kind}: {held} of {len(names)} are held")
    assert held > 1
    return names


async def finish(worker: FaultyWorker, end: str) -> None:
    """Let the worker end, or only its work."""
    if end == "is cancelled by a defect":
        worker.inject("cancel")
        return
    worker.inject("let go")
    await eventually(lambda: worker.let_go)
    if end == "dies":
        await worker.kill()
    else:
        worker.terminate()
        assert await worker.ended(timeout=60) == 0, worker.log[-4000:]


def check_completed(run: str, log: list[dict[str, Any]], *, says: str | None = SAYS) -> None:
    """The run is whole, and its text is ``says``."""
    check(log)
    assert log[-1]["type"] == "completed", (run, log[-1])
    if says is not None:
        last = max(e["attempt"] for e in log)
        chunks = [e["text"] for e in log if e["type"] == "chunk" and e["kind"] == "text" and e["attempt"] == last]
        text = "".join(chunks)
        assert text == says.replace(TOKEN, run)


async def states_of_open_runs(server: Server, keys: Keys) -> dict[str, tuple[Any, ...]]:
    """How far each open run is: its status, the length of its log, and the last event."""
    states: dict[str, tuple[Any, ...]] = {}
    for partition in range(keys.partitions):
        for run in [each.decode() for each in await server.client.zrange(keys.open_runs(partition), 0, -1)]:
            log: Any = await log_of(server.client, keys, run)
            states[run] = await server.client.hget(keys.run(run), "status"), len(log), log[-1:]
    return states


def calls_of(provider: MockProvider, run: str) -> int:
    return sum(run.encode() in each.http_request.body for each in provider.requests)


async def unbegun(server: Server, keys: Keys) -> set[str]:
    """Runs whose attempt some worker has, and that the server knows as not begun."""
    found: set[str] = set()
    for partition in range(keys.partitions):
        stream = keys.topic(partition, "turns")
        pending: Any = await server.client.xpending_range(stream, "fetcher", min="-", max="+", count=1000)
        for entry in pending:
            if entry["times_delivered"] < BEGUN:
                for _, fields in await server.client.xrange(stream, entry["message_id"], entry["message_id"]):
                    found |= {name.decode() for name in fields}
    return found


@pytest.mark.parametrize(("model", "end"), [*(("plain", end) for end in ENDS), ("limited", "stops")])
async def test_an_attempt_may_end_at_any_await(
    server: Server, keys: Keys, tmp_path: Path, send: Send, model: str, end: str, deployed: Deploy
) -> None:
    async with (
        deployed([PLAIN, LIMITED], ["normalizer", "parser"], SETTINGS) as (provider, others),
        faulty("fetcher", tmp_path) as worker,
    ):
        runs = await hold_all(
            worker, "item", lambda name: send(model, name, id=name, deadline_s=300, on_failure="restart")
        )
        new = await unbegun(server, keys) & set(runs)
        assert new, "some attempts are held before they begin"
        await finish(worker, end)
        await others.start("fetcher")
        logs: Any = await ended(server.client, keys, runs)
        calls = {run: calls_of(provider, run) for run in runs}
    for run in runs:
        check_completed(run, logs[run])
        attempts = max(event["attempt"] for event in logs[run])
        assert attempts <= 2, f"{run} lost more than the attempt that was cut"
        assert calls[run] <= attempts
        if run in new:
            assert (calls[run], attempts) == (1, 1), f"{run} had not begun, and so has lost nothing"


@end_of_worker
async def test_a_tool_call_may_end_at_any_await(
    server: Server, keys: Keys, tmp_path: Path, send: Send, end: str, deployed: Deploy
) -> None:
    async with deployed([WITH_CALL], PIPELINE, SETTINGS) as (_, others), faulty("tools", tmp_path) as worker:
        runs = await hold_all(worker, "item", lambda name: send("call", name, id=name, tools=[WEATHER]))
        await finish(worker, end)
        await others.start("tools")
        logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        check_completed(run, logs[run], says=None)
        [result] = [e for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_result"]
        assert not result.get("is_error"), result
        assert run in result["content"]


@pytest.mark.parametrize("end", ENDS[:2])
async def test_a_run_under_policies_may_lose_its_worker_at_any_await(
    server: Server, keys: Keys, tmp_path: Path, send: Send, end: str, deployed: Deploy
) -> None:
    async with deployed([PLAIN], PIPELINE, SETTINGS + POLICY) as (_, others), faulty("policy", tmp_path) as worker:
        runs = await hold_all(worker, "policy", lambda name: send("plain", name, id=name, policies=["nothing"]))
        await finish(worker, end)
        await others.start("policy")
        logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        check_completed(run, logs[run])


@end_of_worker
async def test_a_request_to_the_gateway_may_end_at_any_await(
    server: Server, keys: Keys, tmp_path: Path, end: str, deployed: Deploy
) -> None:
    """Its client repeats it with the same key at another gateway."""
    async with (
        deployed([PLAIN], PIPELINE, SETTINGS + GATEWAY) as (provider, others),
        faulty("gateway", tmp_path) as worker,
        httpx.AsyncClient(
            timeout=ANSWERED_S, headers={"authorization": f"Bearer {KEY.text}"}, limits=UNLIMITED
        ) as http,
    ):
        asked: dict[str, asyncio.Task[httpx.Response]] = {}

        def ask(url: str, name: str) -> asyncio.Task[httpx.Response]:
            body = {"model": "anthropic/plain", "messages": [{"role": "user", "content": name}]}
            headers = {"x-request-id": name, "idempotency-key": name}
            return asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body, headers=headers))

        async def begin(name: str) -> None:
            asked[name] = ask(worker.url, name)

        names = await hold_all(worker, "http", begin)
        await finish(worker, end)
        [other] = await others.start("gateway")
        await asyncio.gather(*asked.values(), return_exceptions=True)
        repeated = {name: ask(other.url, name) for name in names}
        await asyncio.wait(repeated.values())
        answers = {name: task.result() for name, task in repeated.items() if not task.exception()}
        if unanswered := [name for name in names if name not in answers]:
            states = await states_of_open_runs(server, keys)
            raise AssertionError(f"no answer to {unanswered}; open: {states}\n{other.log.read_text()[-4000:]}")

        async def no_place_is_taken() -> bool:
            seconds, _ = await server.client.time()
            places = f"{keys.gateway_use('someone')}:open"
            return not await server.client.zcount(places, seconds * 1000, "+inf")

        await eventually(no_place_is_taken)
    for name in names:
        assert answers[name].status_code == 200, answers[name].text
        assert answers[name].json()["choices"][0]["message"]["content"] == SAYS.replace(TOKEN, name)
        assert 1 <= calls_of(provider, name) <= 2


@end_of_worker
async def test_an_upload_may_end_at_any_await(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, end: str
) -> None:
    Fleet(tmp_path, server_url, keys, "http://127.0.0.1:1", SETTINGS)
    async with (
        faulty("blobs", tmp_path) as worker,
        httpx.AsyncClient(timeout=120, limits=UNLIMITED) as http,
    ):
        asked: dict[str, asyncio.Task[httpx.Response]] = {}

        def put(url: str, name: str) -> asyncio.Task[httpx.Response]:
            content = name.encode() * 20_000
            headers = {"x-request-id": name, "content-type": "image/png"}
            return asyncio.create_task(http.post(f"{url}/blobs", content=content, headers=headers))

        async def begin(name: str) -> None:
            asked[name] = put(worker.url, name)

        names = await hold_all(worker, "http", begin)
        await finish(worker, end)
        others = Fleet(tmp_path, server_url, keys, "http://127.0.0.1:1", SETTINGS)
        try:
            [other] = await others.start("blobs")
            await asyncio.gather(*asked.values(), return_exceptions=True)
            for name in names:
                blob_id = blob_id_of(name.encode() * 20_000)
                before = await http.get(f"{other.url}/blobs/{blob_id}")
                assert before.status_code == 404 or before.content == name.encode() * 20_000, "nothing half is readable"
                assert (await put(other.url, name)).json()["blob_id"] == blob_id
                assert (await http.get(f"{other.url}/blobs/{blob_id}")).content == name.encode() * 20_000
        finally:
            await others.stop()
