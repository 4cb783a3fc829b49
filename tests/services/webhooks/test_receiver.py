"""Deliveries to real receivers over HTTP: signed, tried again, given up, and none in another's way."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from tests.services.blobs.conftest import Served
from tests.waiting import eventually
from tokenbus.bus.dead_letters import StoredDeadLetter, give_back, newest_dead_letters
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.bus.webhooks import Deliveries, Delivery
from tokenbus.errors import SettingsError
from tokenbus.events.notices import Notice, encode_notice
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings, WebhookSettings
from tokenbus_services.webhooks import receiver as module
from tokenbus_services.webhooks.service import WebhookService

OLD, NEW = (f"whsec_{base64.b64encode(bytes([n]) * 32).decode()}" for n in (1, 2))
ENV = {"HOOK_SECRET": OLD}
AWAY = """
[webhooks.away]
url = "http://127.0.0.1:1/"
secret_env = "HOOK_SECRET"
every_run = true
allow_private = true
"""
"""Settings of one that nobody serves."""
RUN = "run-1"
DATA = {"run": RUN, "seq": 9, "finish": "stop"}


class Receiver:
    """A receiver of webhooks. ``answers``: one after the other, then 204."""

    def __init__(self, *answers: Response) -> None:
        self.answers = list(answers)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.at = list[str]()
        """The path of each."""
        self.hangs = asyncio.Event()
        self.hangs.set()

    def paths(self) -> list[tuple[str, bytes]]:
        """Path and body of what it got."""
        return [(path, body) for path, (_, body) in zip(self.at, self.got, strict=True)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        self.got.append((dict(request.headers), await request.body()))
        self.at.append(request.url.path)
        await self.hangs.wait()
        answer = self.answers.pop(0) if self.answers else Response(status_code=204)
        await answer(scope, receive, send)


@asynccontextmanager
async def served(receiver: Receiver) -> AsyncGenerator[str]:
    serving = Served(receiver)
    await serving.start()
    try:
        yield serving.url
    finally:
        receiver.hangs.set()
        await serving.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "LOOK_S", 0.05)


@asynccontextmanager
async def working(
    server: Server, server_url: str, keys: Keys, webhooks: dict[str, WebhookSettings], env: dict[str, str] = ENV
) -> AsyncGenerator[CollectorRegistry]:
    """A worker; what it counts."""
    settings = Settings(redis_url=server_url, prefix=keys.prefix, partitions=keys.partitions, webhooks=webhooks)
    core = WorkerCore(settings, "webhooks")
    service = WebhookService(core, env)
    await service.open()

    async def read() -> None:
        while True:
            await service.start(await service.read())

    reading = asyncio.create_task(read())
    try:
        yield core.registry
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await service.close()


def to(url: str, **fields: Any) -> WebhookSettings:
    return WebhookSettings(url=url, secret_env="HOOK_SECRET", allow_private=True, **fields)


async def tell(server: Server, keys: Keys, *receivers: str, run: str = RUN, kind: str = "run.completed") -> None:
    notice = Notice(receivers, kind, 9, {**DATA, "run": run})
    await server.client.xadd(keys.topic(keys.partition_of(run), "notices"), {run: encode_notice(notice)})


async def aside(server: Server, keys: Keys) -> list[StoredDeadLetter]:
    return [dead async for dead in newest_dead_letters(server, keys, most=9)]


def tries(registry: CollectorRegistry, webhook: str, result: str) -> float:
    return registry.get_sample_value("tokenbus_webhook_tries_total", {"webhook": webhook, "result": result}) or 0.0


async def nothing_waits(server: Server, keys: Keys, webhook: str) -> bool:
    return not await Deliveries(server, keys, webhook).waiting()


async def test_a_notice_is_posted_as_standard_webhooks_says_and_each_secret_verifies_it(
    server: Server, server_url: str, keys: Keys
) -> None:
    receiver = Receiver()
    async with served(receiver) as url:
        hook = to(f"{url}/hooks", headers={"x-team": "books", "webhook-id": "mine"})
        async with working(server, server_url, keys, {"books": hook}, {"HOOK_SECRET": f"{NEW} {OLD}"}):
            await tell(server, keys, "books")
            await eventually(lambda: receiver.got)
            await eventually(lambda: nothing_waits(server, keys, "books"))
    [(headers, body)] = receiver.got
    for secret in (OLD, NEW):
        client = OpenAI(api_key="any", base_url="http://127.0.0.1:1", webhook_secret=secret)
        client.webhooks.verify_signature(body, headers)
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.verify_signature(body + b" ", headers)
    told = json.loads(body)
    assert (told["type"], told["data"]) == ("run.completed", DATA)
    assert told["timestamp"].endswith("Z")
    assert headers["webhook-id"].startswith("msg_")
    assert (headers["content-type"], headers["x-team"]) == ("application/json", "books")


async def test_what_fails_is_tried_again_under_the_same_id(server: Server, server_url: str, keys: Keys) -> None:
    receiver = Receiver(
        Response(status_code=500), Response(status_code=302, headers={"location": "http://169.254.169.254/"})
    )
    async with served(receiver) as url, working(server, server_url, keys, {"books": to(url)}) as counted:
        await tell(server, keys, "books")
        await eventually(lambda: nothing_waits(server, keys, "books") if len(receiver.got) == 3 else False)
        assert (tries(counted, "books", "failed"), tries(counted, "books", "delivered")) == (2, 1)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1


@pytest.mark.parametrize(
    ("answer", "fields", "reason"),
    [
        (Response(status_code=410), {}, "HTTP 410"),
        (Response("secret words", status_code=503), {"retry_s": 0.001}, "HTTP 503"),
    ],
    ids=["gone", "for too long"],
)
async def test_what_is_given_up_is_kept_aside_and_can_be_given_back(
    server: Server, server_url: str, keys: Keys, answer: Response, fields: dict[str, float], reason: str
) -> None:
    receiver = Receiver(answer)
    async with served(receiver) as url, working(server, server_url, keys, {"books": to(url, **fields)}):
        await tell(server, keys, "books")
        [dead] = await eventually(lambda: aside(server, keys))
        await eventually(lambda: nothing_waits(server, keys, "books"))
        assert (dead.entry.reason, dead.entry.stage, dead.entry.run) == (reason, "webhooks", RUN)
        assert await give_back(server, keys, dead) == "books"
        await eventually(lambda: len(receiver.got) == 2)
        await eventually(lambda: nothing_waits(server, keys, "books"))
    assert receiver.got[0][0]["webhook-id"] == receiver.got[1][0]["webhook-id"]


async def test_a_receiver_that_hangs_or_is_away_delays_no_other(server: Server, server_url: str, keys: Keys) -> None:
    hangs, works = Receiver(), Receiver()
    hangs.hangs.clear()
    async with served(hangs) as slow, served(works) as quick:
        hooks = {"slow": to(slow, at_once=2), "away": to("http://127.0.0.1:1/"), "quick": to(quick)}
        async with working(server, server_url, keys, hooks):
            for n in range(20):
                await tell(server, keys, "slow", "away", "quick", run=f"run-{n}")
            await eventually(lambda: len(works.got) == 20)
            assert len(hangs.got) <= 2
            hangs.hangs.set()
            await eventually(lambda: len(hangs.got) == 20)
        await server.client.delete(keys.webhook_due("away"), keys.webhook_bodies("away"))


async def test_a_delivery_whose_worker_is_lost_is_made_by_another(server: Server, server_url: str, keys: Keys) -> None:
    receiver = Receiver()
    mine = Deliveries(server, keys, "books")
    now = server.clock.now_ms()
    await mine.add(Delivery("msg_1", RUN, now, b"{}"))
    assert (await mine.take(5, lease_ms=1)).now  # and never settled
    async with served(receiver) as url, working(server, server_url, keys, {"books": to(url)}):
        await eventually(lambda: len(receiver.got) == 1)
        await eventually(lambda: nothing_waits(server, keys, "books"))


async def test_two_workers_make_each_delivery_once(server: Server, server_url: str, keys: Keys) -> None:
    receiver = Receiver()
    async with served(receiver) as url:
        hooks = {"books": to(url)}
        async with working(server, server_url, keys, hooks), working(server, server_url, keys, hooks):
            for n in range(50):
                await tell(server, keys, "books", run=f"run-{n}")
            await eventually(lambda: nothing_waits(server, keys, "books") if len(receiver.got) >= 50 else False)
    assert len(receiver.got) == len({headers["webhook-id"] for headers, _ in receiver.got}) == 50


async def test_only_what_a_webhook_asks_for_is_told_and_the_unknown_is_kept_aside(
    server: Server, server_url: str, keys: Keys
) -> None:
    receiver = Receiver()
    hook = {"events": ("run.failed",)}
    async with served(receiver) as url, working(server, server_url, keys, {"books": to(url, **hook)}):
        await tell(server, keys, "books", run="fine")
        await tell(server, keys, "books", "nobody", run="bad", kind="run.failed")
        [dead] = await eventually(lambda: aside(server, keys))
        await eventually(lambda: len(receiver.got) == 1)
        await eventually(lambda: nothing_waits(server, keys, "books"))
    assert dead.entry.reason == "these settings have no webhook 'nobody'"
    assert json.loads(receiver.got[0][1])["data"]["run"] == "bad"


async def test_beyond_the_bound_deliveries_are_kept_aside(server: Server, server_url: str, keys: Keys) -> None:
    async with working(server, server_url, keys, {"away": to("http://127.0.0.1:1/", most_waiting=1)}):
        await tell(server, keys, "away", run="run-0")
        await eventually(Deliveries(server, keys, "away").waiting)
        for n in (1, 2):
            await tell(server, keys, "away", run=f"run-{n}")
        dead = await eventually(lambda: _of(2, server, keys))
        assert {each.entry.reason for each in dead} == {"1 deliveries wait for away already"}
    await server.client.delete(keys.webhook_due("away"), keys.webhook_bodies("away"))


async def _of(count: int, server: Server, keys: Keys) -> list[StoredDeadLetter]:
    found = await aside(server, keys)
    return found if len(found) == count else []


async def test_a_private_address_is_not_called(server: Server, server_url: str, keys: Keys) -> None:
    refused = WebhookSettings(url="http://localhost:1/", secret_env="HOOK_SECRET", retry_s=0.001)
    async with working(server, server_url, keys, {"inside": refused}):
        await tell(server, keys, "inside")
        [dead] = await eventually(lambda: aside(server, keys))
    assert "not allowed" in dead.entry.reason


def _none(name: str, count: int) -> None: ...


async def _kept(delivery: Delivery, place: str, problem: str) -> None: ...


@pytest.mark.parametrize(
    ("settings", "env", "where"),
    [
        (WebhookSettings(url="http://127.0.0.1/", secret_env="HOOK_SECRET"), ENV, "webhooks.books"),
        (WebhookSettings(url="ftp://example.com/", secret_env="HOOK_SECRET"), ENV, "webhooks.books"),
        (WebhookSettings(url="https://example.com/", secret_env="HOOK_SECRET"), {}, "webhooks.books.secret_env"),
        (WebhookSettings(url="https://example.com/", secret_env="A"), {"A": "whsec_c2hvcnQ="}, "A"),
        (WebhookSettings(url="https://example.com/", secret_env="A"), {"A": f"{OLD} plain"}, "A"),
    ],
    ids=["loopback", "scheme", "no secret", "short secret", "second secret"],
)
def test_a_receiver_that_cannot_work_is_refused_at_the_start(
    server_url: str, settings: WebhookSettings, env: dict[str, str], where: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        module.Receiver(
            *("books", settings, Server(server_url), Keys(), env),
            learn=lambda secrets: None,
            on_try=lambda name, result: None,
            on_waiting=_none,
            given_up=_kept,
        )
    assert refused.value.where == where
    assert "c2hvcnQ" not in str(refused.value)
