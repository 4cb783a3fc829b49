"""The users of deploy/acl: with them every service does its work, and none can do another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from tests.contract.bus.scripts.scenes import SCENES, World
from tests.contract.client.listed import Listed
from tests.contract.client.writer import Writer
from tests.e2e.conftest import WEATHER
from tests.e2e.fleet import CHAINED, SEPARATE, Kind, ended, fleet
from tests.servers import binary
from tests.services.cli.process import Command, running
from tests.waiting import eventually
from tokenbus import Chunk, Client, Run
from tokenbus.bus.activity import ActivitySlots
from tokenbus.bus.dead_letters import StoredDeadLetter, give_back, newest_dead_letters
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import newest_records
from tokenbus.bus.scripts.gateway import (
    AdmissionLimits,
    HoldKeys,
    Reservation,
    RunUse,
    admit,
    count_use,
    hold_longer,
    release,
    renew_open,
)
from tokenbus.bus.scripts.requests import publish
from tokenbus.bus.scripts.script import all_scripts
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.core.run.blocks.block_table import BlockTable
from tokenbus.core.run.state import RunState
from tokenbus.errors import ServerUnavailable
from tokenbus.events.frames import Accepted, RunLimits
from tokenbus_services.cli.inspect import silent_models
from tokenbus_services.fetcher.calls.call_timeouts import SilentCalls
from tokenbus_services.fetcher.uploads.upload import UploadedFiles
from tokenbus_services.gateway.budgets.spend import read_spend
from tokenbus_services.gateway.keys.store import KeyStore
from tokenbus_services.mock_provider import MockProvider, Reply, Script, ToolCall, Turn
from tokenbus_services.parser.index_keeper import IndexKeeper
from tokenbus_services.process.embedded_server import EmbeddedServer
from tokenbus_services.runtime.metrics import KnownModels
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import KeyRules

USERS = Path(__file__).parents[2] / "deploy" / "acl" / "users.conf"
SERVICES = (
    "fetcher",
    "normalizer",
    "parser",
    "pipeline",
    "policy",
    "tools",
    "recorder",
    "webhooks",
    "blobs",
    "gateway",
)
NAMES = ("publisher", "subscriber", *SERVICES, "operator", "scripts")
KEYS = Keys(partitions=2)
RECORDED = '[records]\nsample = 1.0\n[blobs]\nloader = "tests.e2e.media.own_store:create"\n'
TOOL_SCRIPT = Script(
    name="asks",
    turns=(
        Turn(says=Reply(text="Let me look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),))),
        Turn(says=Reply(text="It rains.")),
    ),
    repeat_last=True,
)


OF_SESSIONS = ["sessions.append", "sessions.refuse", "sessions.remember", "sessions.read_history"]
AWAY = '[webhooks.away]\nurl = "http://127.0.0.1:1/"\nsecret_env = "HOOK"\nevery_run = true\nallow_private = true\n'
HOOK = "whsec_bm90IGEgc2VjcmV0IG9mIGFueWJvZHkgYXQgYWxs"
PASSES = '[policies.passes]\nuse = "tokenbus.policy:StreamProcessor"\n'
GATEWAY = "[gateway]\n[console]\nroles_without_keys = ['see_runs', 'see_content', 'act', 'admin']\n"


class Guarded:
    """A server with these users, each with a password of its own."""

    def __init__(self, port: int, admin: Redis) -> None:
        self.admin: Any = admin
        self.port = port
        self.passwords = {name: uuid4().hex for name in NAMES}

    def url(self, name: str) -> str:
        return f"redis://tokenbus-{name}:{self.passwords[name]}@127.0.0.1:{self.port}"

    async def refusals(self) -> list[str]:
        """What the server refused since the last call."""
        log = await self.admin.acl_log()
        await self.admin.acl_log_reset()
        return [f"{e['username']}: {e['reason']} {e['object']} ({e['context']})" for e in log]


@pytest.fixture
async def guarded() -> AsyncGenerator[Guarded]:
    options = {"include": str(USERS), "busy-reply-threshold": "50"}
    with EmbeddedServer(binary=binary(), options=options) as server:
        async with Redis(port=server.port, decode_responses=True) as admin:
            made = Guarded(server.port, admin)
            for name, password in made.passwords.items():
                await made.admin.execute_command("ACL", "SETUSER", f"tokenbus-{name}", f">{password}")
            yield made


@pytest.fixture
async def scripts(guarded: Guarded, tmp_path: Path) -> AsyncGenerator[Command]:
    """`tokenbus scripts --keep`, once it has loaded them."""
    url = guarded.url("scripts")
    async with running(tmp_path / "scripts", "scripts", "--keep", TOKENBUS_REDIS_URL=url) as keeper:
        await keeper.says("")
        yield keeper
        assert await keeper.stop() == 0


async def test_a_user_without_a_password_cannot_log_in() -> None:
    with EmbeddedServer(binary=binary(), options={"include": str(USERS)}) as server:
        # A refusal is a ConnectionError to redis-py, which would try again for seconds.
        once = Retry(NoBackoff(), retries=0)
        async with Redis(port=server.port, decode_responses=True, retry=once) as admin:
            users = [user for user in await admin.acl_users() if user != "default"]
            assert users == sorted(f"tokenbus-{name}" for name in NAMES)
            for user in users:
                with pytest.raises(AuthenticationError):
                    await admin.execute_command("AUTH", user, "")


@pytest.mark.parametrize("chain", [SEPARATE, CHAINED], ids=["separate", "chained"])
async def test_each_service_does_its_work_as_its_own_user(
    guarded: Guarded, scripts: Command, tmp_path: Path, chain: tuple[Kind, ...]
) -> None:
    async with (
        MockProvider([TOOL_SCRIPT]) as provider,
        fleet(tmp_path, guarded.url("operator"), KEYS, provider.url, (), RECORDED + PASSES + GATEWAY + AWAY) as workers,
        Client(guarded.url("publisher")) as publisher,
        Client(guarded.url("subscriber")) as subscriber,
        Server(guarded.url("operator")) as operator,
    ):
        kinds: tuple[Kind, ...] = (*chain, "tools", "policy", "recorder", "webhooks", "blobs", "gateway")
        envs = [{"TOKENBUS_REDIS_URL": guarded.url(kind), "OWN_STORE": str(tmp_path), "HOOK": HOOK} for kind in kinds]
        await asyncio.gather(*(workers.start(kind, env=env) for kind, env in zip(kinds, envs, strict=True)))
        received = asyncio.create_task(_listen(subscriber))
        begun = [KEYS.lease(partition, "visible:speech") for partition in range(KEYS.partitions)]
        await eventually(lambda: _all_there(operator, begun))
        run = await publisher.publish(_request("asks"))
        result = await publisher.result(run)
        assert result.text == "Let me look.\n\nIt rains."
        logs = await ended(operator.client, KEYS, [run.id])
        assert any(event["type"] == "block_complete" and event["kind"] == "tool_result" for event in logs[run.id])
        assert await received == "It rains."
        judged = await publisher.publish({**_request("asks"), "policies": ["passes"]})
        assert (await publisher.result(judged)).text == "Let me look.\n\nIt rains."
        gateway = next(worker for worker in workers.workers if worker.kind == "gateway")
        by_http = await _asked_by_http(gateway.url)
        await _watched(gateway.url, by_http)
        await guarded.admin.script_flush()  # as after a restart
        # Its first line has the count: other tests of this process may have declared scripts that it does not know.
        count = scripts.seen[0].split()[2]
        await scripts.says(f"{count} of {count} scripts loaded again")
        asked = await publisher.publish({**_request("asks"), "tools": [{**WEATHER, "approval": "always"}]})
        await eventually(lambda: _allowed(publisher, asked), timeout=20)
        assert (await publisher.result(asked)).text == "Let me look.\n\nIt rains."
        cancelled = await publisher.publish(_request("asks"))
        await publisher.cancel(cancelled)
        await ended(operator.client, KEYS, [cancelled.id])
        await operator.client.xadd(KEYS.requests, {"__data__": "no request"})
        await eventually(lambda: operator.client.xlen(KEYS.dead))
        listed = {info.run: info.state async for info in subscriber.runs()}
        assert listed[run.id] == listed[judged.id] == "completed"
        await eventually(lambda: _recorded(operator, [run.id, judged.id, by_http, asked.id, cancelled.id]))
        waiting = await eventually(lambda: operator.client.hvals(KEYS.webhook_bodies("away")))
        assert any(run.id.encode() in delivery for delivery in waiting)
    # What was asked while the scripts were gone, and then waited.
    assert [refusal for refusal in await guarded.refusals() if " eval " not in refusal] == []


@pytest.mark.usefixtures("scripts")
async def test_a_subscriber_buries_what_fails_and_the_operator_gives_it_back(guarded: Guarded) -> None:
    got: list[int] = []

    async def handle(chunk: Chunk) -> None:
        got.append(chunk.seq)
        if len(got) == 1:
            raise ZeroDivisionError

    async with (
        Client(guarded.url("subscriber"), partitions=KEYS.partitions) as subscriber,
        Server(guarded.url("operator")) as operator,
        Server(f"redis://127.0.0.1:{guarded.port}") as admin,
    ):
        await Writer(admin, KEYS, "r").say("poison")
        source = subscriber.subscribe("visible", kinds=Chunk, group="g", from_="start")
        handling = asyncio.create_task(source.each(handle, tries=1))
        (letter,) = await eventually(lambda: _dead(operator))
        assert letter.entry.run == "r"
        await give_back(operator, KEYS, letter)
        await eventually(lambda: got == [0, 0])
        await source.aclose()
        await handling
    assert await guarded.refusals() == []


async def _dead(server: Server) -> list[StoredDeadLetter]:
    return [letter async for letter in newest_dead_letters(server, KEYS, most=2)]


async def test_the_operator_makes_keys_and_the_gateway_finds_and_counts_them(
    guarded: Guarded, scripts: Command
) -> None:
    async with Server(guarded.url("operator")) as operator, Server(guarded.url("gateway")) as gateway:
        store = KeyStore(operator, KEYS)
        made = await store.create(KeyRules(rpm_limit=1))
        await store.rotate(made.id, grace_s=60)
        found = await KeyStore(gateway, KEYS).find(made.id)
        assert found is not None
        limits = AdmissionLimits(
            requests_per_minute=5, tokens_per_minute=5, concurrency=1, budget_nano=1, period="month"
        )
        use, spend = KEYS.gateway_use(made.id), KEYS.gateway_spend(made.id)
        hold = HoldKeys(KEYS.gateway_counted("r1"), KEYS.gateway_held(made.id))
        reserved = Reservation(client=made.id, estimate_nano=5, hold_ms=60_000, keep_ms=60_000)
        admission = admit(use, spend, "r1", limits, gateway="g", lease_ms=60_000, hold=hold, reserved=reserved)
        assert (await run_script(gateway, admission))[0] == b""
        assert await run_script(gateway, hold_longer(hold, "r1", keep_ms=60_000)) == 1
        await run_script(gateway, renew_open(use, ["r1"], gateway="g", lease_ms=60_000))
        used = RunUse(seq=1, fresh=1, cache_read=0, cache_write=0, output=1, prices=(1, 1, 1, 1), price_name="p")
        counting = count_use(hold, "r1", spend=spend, use=use, tokens_per_minute=5, used=used, keep_ms=60_000)
        await run_script(gateway, counting)
        await run_script(gateway, release(hold, "r1", ended=False))
        await gateway.client.zrem(f"{use}:open", "r1 g")
        [spent] = await read_spend(operator, KEYS, [made.id])
        assert spent.total.output == 1
        async with Server(guarded.url("tools")) as tools:
            assert await KeyStore(tools, KEYS).find(made.id) == found
            of_child = HoldKeys(KEYS.gateway_counted("r1~0"), KEYS.gateway_held(made.id))
            limits = msgspec.structs.replace(limits, budget_nano=1000, tokens_per_minute=5000)
            places = {"gateway": "", "lease_ms": 60_000, "hold": of_child, "reserved": reserved, "above": ["r1"]}
            assert (await run_script(tools, admit(use, spend, "r1~0", limits, **places)))[0] == b""
            await run_script(tools, release(of_child, "r1~0", ended=False))
        await store.revoke(made.id)
    assert await guarded.refusals() == []


@pytest.mark.parametrize("kind", ["parser", "pipeline"])
async def test_the_parser_makes_the_index_of_runs_whole(guarded: Guarded, scripts: Command, kind: str) -> None:
    listed = Listed(Server(guarded.url("fetcher")), KEYS)
    runs = [name for name in (f"r{n}" for n in range(100)) if KEYS.partition_of(name) == 0][:2]
    async with listed.server, Server(guarded.url(kind)) as parser:
        for run in runs:
            await listed.accept(run, 1000, "tenant", "acme")
        await guarded.admin.hset(KEYS.run(runs[0]), "status", "failed")  # ended, but still listed as open
        accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
        unlisted = RunState(runs[1], accepted, 1000, BlockTable(0, 1, 0, 0))
        await guarded.admin.zrem(KEYS.open_runs(0), runs[1])
        await IndexKeeper(parser, KEYS, keep_ms=60_000, open_ms=60_000).look({0: [unlisted]})
        assert await guarded.admin.zrange(KEYS.open_runs(0), 0, -1) == [runs[1]]
        assert await guarded.admin.zrange(KEYS.ended_runs(0), 0, -1) == [runs[0]]
    assert await guarded.refusals() == []


@pytest.mark.parametrize(
    ("user", "names"),
    [
        ("fetcher", [*OF_SESSIONS, "waits.decide", "waits.refuse"]),
        ("parser", ["commit"]),
        ("pipeline", [*OF_SESSIONS, "waits.decide", "commit"]),
        ("subscriber", ["sessions.read_history"]),
        *((user, ["sessions.read_history", "waits.confirm"]) for user in ("publisher", "gateway", "operator")),
    ],
)
async def test_users_may_read_and_write_sessions_and_decide_what_is_waited_for(
    guarded: Guarded, scripts: Command, user: str, names: list[str]
) -> None:
    async with Server(f"redis://127.0.0.1:{guarded.port}") as admin, Server(guarded.url(user)) as server:
        for scene in [scene for name in names for scene in SCENES[name][name == "commit" :]]:
            await admin.client.flushdb()
            world = World(admin, KEYS)
            await world.build()
            await run_script(server, scene.call(world))
    assert await guarded.refusals() == []


async def _allowed(publisher: Client, run: Run) -> bool:
    """Whether what the run waits for was found, and allowed."""
    found = [info.wait async for info in publisher.waiting(run=run)]
    for wait in found:
        await publisher.approve(run, wait)
    return bool(found)


async def _asked_by_http(gateway: str) -> str:
    """A run that a client of the gateway asked for."""
    body = {"model": "anthropic/asks", "messages": [{"role": "user", "content": "Does it rain?"}]}
    async with httpx.AsyncClient(base_url=gateway, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json=body, headers={"idempotency-key": "once"})
        assert answer.status_code == 200, answer.text
        run: str = answer.headers["x-tokenbus-run"]
        assert run in (await http.get("/runs")).text
        async with http.stream("GET", "/topics/runs", params={"from": "start", "group": "desk"}) as topic:
            async for text in topic.aiter_text():
                if run in text:
                    return run
    raise AssertionError("the topic ended")


async def _watched(gateway: str, run: str) -> None:
    """A page of the console shows this run, and the health that the parser's counts are part of."""
    async with httpx.AsyncClient(base_url=f"{gateway}/console/api", timeout=60) as http:
        for path in (f"/runs/{run}", f"/runs/{run}/decisions", "/dead", "/keys", "/spend"):
            answer = await http.get(path)
            assert answer.status_code == 200, (path, answer.text)
        async with http.stream("GET", "/stream") as stream:
            missing = {run, '"attempts_5m"', '"lag_entries"', '"points"'}
            async for text in stream.aiter_text():
                missing -= {one for one in missing if one in text}
                if not missing:
                    return
    raise AssertionError("the stream ended")


async def _recorded(server: Server, runs: list[str]) -> bool:
    """Whether these runs are recorded, and nothing is left to do for it."""
    waiting = [await server.client.xlen(KEYS.topic(p, "records")) for p in range(KEYS.partitions)]
    return {e.run async for e in newest_records(server, KEYS)} == set(runs) and not any(waiting)


def _request(model: str) -> dict[str, object]:
    message = {"role": "user", "content": "Does it rain?"}
    return {"type": "generate", "provider": "anthropic", "model": model, "messages": [message], "tools": [WEATHER]}


async def _all_there(server: Server, keys: list[str]) -> bool:
    return await server.client.exists(*keys) == len(keys)


async def _listen(subscriber: Client) -> str:
    """The last visible block of the first run, as a member of a group receives it."""
    text: dict[int, str] = {}
    async with subscriber.subscribe("visible", group="speech") as chunks:
        async for chunk in chunks:
            assert isinstance(chunk, Chunk)
            text[chunk.block] = text.get(chunk.block, "") + chunk.text
            if text[chunk.block] == "It rains.":
                break
    return text[max(text)]


TOPICS = ("visible", "chunks", "blocks", "runs", "sessions")
WRITES: dict[str, set[str]] = {
    "publisher": {"requests"},
    "subscriber": {"dead"},
    "fetcher": {"requests", "sessions", "turns", "raw", "events", "control", "dead"},
    "normalizer": {"events", "dead"},
    "parser": {
        *(
            *TOPICS,
            "log",
            "decisions",
            "events",
            "drafts",
            "turns",
            "tools",
            "raw",
            "control",
            "records",
            "notices",
            "tape",
            "dead",
        ),
    },
    "policy": {"events", "requests", "dead"},
    "pipeline": set(),
    "tools": {"tools", "events", "requests", "dead"},
    "recorder": {"dead", "records"},
    "webhooks": {"dead", "notices"},
    "blobs": set(),
    "gateway": {"requests"},
    "operator": {"requests"},
    "scripts": set(),
}
"""The streams to which each may add."""
READS: dict[str, set[str]] = {
    "publisher": {"log"},
    "subscriber": {*TOPICS, "log"},
    "fetcher": {"requests", "turns", "control", "log"},
    "normalizer": {"raw"},
    "parser": {*TOPICS, "events", "turns", "tools", "decisions", "log"},
    "policy": {"drafts", "log"},
    "pipeline": set(),
    "tools": {"tools", "control", "log"},
    "recorder": {"records", "tape", "log"},
    "webhooks": {"notices"},
    "blobs": set(),
    "gateway": {*TOPICS, "log", "dead", "turns", "decisions", "raw", "events", "drafts", "notices"},  # it erases runs
    "operator": {
        *(*TOPICS, "log", "requests", "turns", "tools", "raw", "events", "drafts", "decisions", "control"),
        *("records", "notices", "tape", "dead"),
    },
    "scripts": set(),
}
"""The streams that each may read."""
for rights in (WRITES, READS):
    rights["pipeline"] = rights["fetcher"] | rights["normalizer"] | rights["parser"]


def streams() -> dict[str, str]:
    topics = ("turns", "tools", "raw", "events", "drafts", "decisions", "control", "records", "notices", *TOPICS)
    inside = {t: f"tokenbus:{{0}}:{t}" for t in topics}
    return {
        **inside,
        "log": "tokenbus:{0}:log:r",
        "tape": "tokenbus:{0}:tape:r",
        "requests": KEYS.requests,
        "dead": KEYS.dead,
        "foreign": "shop:{0}:x",
    }


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ResponseError, match="ermission"):  # from inside a script it has no class of its own
        yield


@pytest.mark.parametrize("name", NAMES)
async def test_each_user_reads_and_writes_its_own_streams_and_no_others(guarded: Guarded, name: str) -> None:
    async with Redis.from_url(guarded.url(name)) as user:
        found: dict[str, set[str]] = {"writes": set(), "reads": set()}
        for stream, key in streams().items():
            for what, do in (
                ("writes", lambda key=key: user.xadd(key, {"a": "b"})),
                ("reads", lambda key=key: user.xrange(key)),
            ):
                try:
                    await do()
                    found[what].add(stream)
                except NoPermissionError:
                    pass
            if stream not in WRITES[name]:
                adds = await guarded.admin.script_load("return redis.call('XADD', KEYS[1], '*', 'a', 'b')")
                with refused():  # nor by way of a script
                    await user.evalsha(adds, 1, key)
        assert found["writes"] == WRITES[name]
        assert found["reads"] == READS[name]


@pytest.mark.parametrize("name", ["publisher", "subscriber", "tools"])
async def test_no_user_makes_a_script_run_long_by_numbers_of_arguments_that_did_not_come(
    guarded: Guarded, scripts: Command, name: str
) -> None:
    """A script that stands in one call's loop answers nobody, the next call here included."""
    key = "tokenbus:{0}:session:s.x"
    async with Redis.from_url(guarded.url(name), socket_timeout=10) as user:
        for script in all_scripts():
            for keys in (0, 1, 3, 19):
                for arguments in (["99999999"] * 30, ["-1"] * 4, ["nan"] * 4, ["0", *["1e300"] * 8], ["0", "-2"]):
                    with suppress(ResponseError):
                        await user.evalsha(script.sha, keys, *[key] * keys, *arguments)
        assert await guarded.admin.ping()


@pytest.mark.parametrize("name", NAMES)
async def test_no_user_governs_the_server_or_reaches_foreign_keys(guarded: Guarded, name: str) -> None:
    async with Redis.from_url(guarded.url(name)) as user:
        for command in (
            "FLUSHALL",
            "FLUSHDB",
            "CONFIG SET maxmemory 1",
            "CONFIG GET requirepass",
            "CONFIG GET *",
            "CONFIG REWRITE",
            "SHUTDOWN NOSAVE",
            "ACL LIST",
            "ACL SETUSER x on",
            "MONITOR",
            "CLIENT KILL TYPE normal",
            "REPLICAOF NO ONE",
            "MODULE LIST",
            "FUNCTION LIST",
            "SCRIPT FLUSH",
            "SUBSCRIBE x",
            "PUBLISH x y",
            "KEYS *",
            "KEYS tokenbus:*",
            "SCAN 0",
            "RANDOMKEY",
            "DBSIZE",
            "SAVE",
            "GET shop:secret",
            "SET tokenbus:meta x",
            "DEL tokenbus:meta",
            "DEL tokenbus:{0}:run:r",
            "HSET tokenbus:other a b",
        ):
            with refused():
                await user.execute_command(*command.split())


@pytest.mark.parametrize("name", NAMES)
async def test_no_user_runs_a_script_that_is_not_loaded_by_the_bus(guarded: Guarded, name: str) -> None:
    foreign = "while true do end"
    async with Redis.from_url(guarded.url(name)) as user:
        for command in (
            ("EVAL", foreign, 0),
            ("EVAL_RO", foreign, 0),
            ("FUNCTION", "LOAD", "#!lua name=f\nredis.register_function('f', function() return 1 end)"),
            ("FCALL", "f", 0),
            ("FCALL_RO", "f", 0),
            ("SCRIPT", "DEBUG", "YES"),
        ):
            with refused():
                await user.execute_command(*command)
        if name == "scripts":  # who may load may run nothing
            for run in ("EVALSHA", "EVALSHA_RO"):
                with refused():
                    await user.execute_command(run, await user.script_load(foreign), 0)
        else:
            with refused():
                await user.script_load(foreign)


async def test_the_operator_ends_a_script_that_hangs(guarded: Guarded) -> None:
    hangs = await guarded.admin.script_load("while true do end")
    async with Redis.from_url(guarded.url("publisher")) as user, Redis.from_url(guarded.url("operator")) as operator:
        hanging = asyncio.ensure_future(user.evalsha(hangs, 0))

        async def killed() -> bool:
            with suppress(ResponseError):  # it has not begun
                return bool(await operator.script_kill())
            return False

        await eventually(killed)
        with pytest.raises(ResponseError, match="killed by user"):
            await hanging
        assert await operator.ping()


async def test_a_process_waits_until_the_scripts_are_loaded(guarded: Guarded) -> None:
    async with Client(guarded.url("publisher")) as publisher, Server(guarded.url("publisher")) as server:
        with pytest.raises(ServerUnavailable, match=r"'requests.publish'.*tokenbus scripts"):
            await publisher.publish(_request("asks"))
        call = publish(KEYS.requests, requests=[10, "{}", ""])
        waiting = asyncio.create_task(retry_until_available(server, lambda: run_script(server, call), what="admission"))
        await eventually(lambda: _asked(guarded))
        await guarded.admin.script_load(call.script.text)
        assert await waiting


async def _asked(guarded: Guarded) -> bool:
    return bool(await guarded.refusals())


async def test_the_fetcher_keeps_the_table_of_uploaded_files_and_others_cannot_touch_it(guarded: Guarded) -> None:
    async with Server(guarded.url("fetcher")) as fetcher:
        files = UploadedFiles(fetcher, KEYS)
        await files.sent(["a"], 60)
        await files.put("a", "file-1", 60)
        await files.drop(["b"], 60)
        assert await files.look(["a", "b", "c"]) == {"a": "file-1", "b": ""}
    assert await guarded.refusals() == []
    for name in set(NAMES) - {"fetcher", "pipeline"}:
        async with Redis.from_url(guarded.url(name)) as user:
            with refused():
                await user.set(KEYS.file("a"), "file-2")


@pytest.mark.parametrize("name", ["fetcher", "pipeline"])
async def test_the_fetcher_says_which_calls_are_silent_and_the_operator_reads_it(
    guarded: Guarded, scripts: Command, name: str
) -> None:
    async with Server(guarded.url(name)) as fetcher, Server(guarded.url("operator")) as operator:
        calls = SilentCalls(fetcher, KEYS, CollectorRegistry(), worker="w", models=KnownModels(Settings()))
        calls.began("p", "m", 1)
        await calls.write()
        activity = ActivitySlots(operator, KEYS, kept=6)
        await activity.read()
        assert [model.calls for model in silent_models(activity.slots, operator.clock.now_ms())] == [1]
    assert await guarded.refusals() == []


@pytest.mark.parametrize("name", ["publisher", "subscriber", "fetcher", "normalizer", "policy", "tools", "operator"])
async def test_only_the_parser_owns_its_leases_and_state(guarded: Guarded, name: str) -> None:
    async with Redis.from_url(guarded.url(name)) as user:
        with refused():
            await user.hset("tokenbus:{0}:state:parser", "r", "x")
        with refused():
            await user.zadd("tokenbus:members:parser", {"me": 1})
