"""Sessions on a Cluster, written and read over HTTP at two gateways, one of which dies."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest

from tests.e2e.fleet import CHAINED, SEPARATE, Kind, fleet
from tests.e2e.sessions.test_sessions import CONFIG, TALK
from tests.servers import cluster
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.events.sessions import session_ref
from tokenbus_services.mock_provider import MockProvider

NAMES = [f"talk-{n}" for n in range(6)]


async def events(http: httpx.AsyncClient, url: str, after: str | None = None) -> AsyncGenerator[tuple[str, str, Any]]:
    """Id, name and data of each event."""
    headers = {"last-event-id": after} if after else {}
    async with http.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        fields: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield fields["id"], fields["event"], json.loads(fields["data"])
                fields = {}


async def until(found: AsyncIterator[tuple[str, str, Any]], name: str, times: int = 1) -> list[tuple[str, str, Any]]:
    seen: list[tuple[str, str, Any]] = []
    async for event in found:
        seen.append(event)
        times -= event[1] == name
        if not times:
            break
    return seen


@pytest.mark.parametrize("stages", [SEPARATE, CHAINED], ids=["separate", "chained"])
async def test_conversations_on_all_nodes_go_on_at_another_gateway_when_theirs_dies(
    stages: tuple[Kind, ...], tmp_path: Path
) -> None:
    keys = Keys(f"t{uuid4().hex[:12]}", 4)
    assert len({keys.partition_of(session_ref("", name)) for name in NAMES}) > 1
    kinds: tuple[Kind, ...] = (*stages, "gateway", "gateway")
    with cluster() as url:
        async with (
            MockProvider([TALK]) as provider,
            fleet(tmp_path, url, keys, provider.url, kinds, "[gateway]\n") as workers,
            Client(url, prefix=keys.prefix, partitions=4) as bus,
            httpx.AsyncClient(timeout=60) as http,
        ):
            one, two = (worker for worker in workers.workers if worker.kind == "gateway")

            async def say(name: str, text: str, append: str, at: str) -> httpx.Response:
                body = {"item": {"type": "message", "content": text}, "id": append}
                return await http.post(f"{at}/sessions/{name}/events", json=body)

            read: dict[str, list[tuple[str, str, Any]]] = {}
            for name in NAMES:
                configure = {"item": {"type": "configure", "request": CONFIG}}
                answer = await http.post(f"{one.url}/sessions/{name}/events", json=configure)
                assert answer.status_code == 200, answer.text
                assert (await say(name, f"hello {name}", "a", one.url)).json()["fate"]["state"] == "delivered"
                async with aclosing(events(http, f"{one.url}/sessions/{name}/events")) as live:
                    read[name] = await until(live, "chunk")
            one.kill()
            await one.process.wait()
            for name in NAMES:
                assert (await say(name, "and then?", "b", two.url)).status_code == 202
                assert (await say(name, "and then?", "b", two.url)).status_code == 202
            for exchange in provider.requests:
                provider.resume(exchange)
            for name in NAMES:
                address = f"{two.url}/sessions/{name}/events"
                async with aclosing(events(http, address, read[name][-1][0])) as live:
                    read[name] += await until(live, "run_ended", 2)
                async with aclosing(events(http, f"{address}?live=false")) as stored:
                    assert [event async for event in stored] == read[name]
                history = (await http.get(f"{two.url}/sessions/{name}/messages")).json()["messages"]
                assert history == msgspec.to_builtins(await bus.session(name).messages())
                said = [message["content"] for message in history if message["role"] == "user"]
                assert said == [f"hello {name}", "and then?"]
            assert len(provider.requests) == 2 * len(NAMES)
            await http.delete(f"{two.url}/sessions/{NAMES[0]}")
            listed: list[str] = []
            page: dict[str, Any] = {"next": None}
            while not listed or page["next"]:
                after = f"&after={page['next']}" if page["next"] else ""
                page = (await http.get(f"{two.url}/sessions?limit=2{after}")).json()
                listed += [info["session"] for info in page["sessions"]]
            assert sorted(listed) == NAMES[1:]
            begun = (await http.post(f"{two.url}/v1/conversations", json={"metadata": {"room": "7"}})).json()
            asked = {"model": "openai-chat/talk", "input": "hello", "conversation": begun["id"], "background": True}
            assert (await http.post(f"{two.url}/v1/responses", json=asked)).status_code == 200
            refused = await http.post(f"{two.url}/v1/responses", json=asked)
            assert refused.json()["error"]["code"] == "conversation_locked"
            provider.resume(await provider.requested(2 * len(NAMES) + 1))

            async def added() -> bool:
                items = (await http.get(f"{two.url}/v1/conversations/{begun['id']}/items")).json()["data"]
                return [item["role"] for item in items] == ["assistant", "user"]

            await eventually(added)
