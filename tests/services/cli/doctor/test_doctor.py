"""`tokenbus doctor` against a server on which things are not as they should be."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from tests.e2e.fleet import fleet
from tests.services.cli.process import run, settings_file
from tests.services.parser.test_attempt_metrics import report, state
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.events.decisions import Decided, encode
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import PolicyAction
from tokenbus_services.fetcher.calls.call_timeouts import SilentCalls
from tokenbus_services.parser.activity import MAX_FAILURES, ActivityCounter
from tokenbus_services.runtime.metrics import KnownModels
from tokenbus_services.settings import DEFAULT_PROVIDERS, Settings


async def deployment(server: Server, url: str, keys: Keys, directory: Path, more: str = "") -> str:
    """Settings of a deployment that has begun. For TOKENBUS_CONFIG."""
    await join_deployment(server, keys)
    where = f'redis_url = "{url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}\n'
    return settings_file(directory, f'{where}data_dir = "{directory}"\n{more}')


async def findings(config: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    """What doctor finds, by what it is about."""
    ended = await run("doctor", "--json", *options, TOKENBUS_CONFIG=config)
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(ended.out):
        found.setdefault(finding["about"], []).append(finding)
    return found


@pytest.fixture
async def onlooker(server: Server, server_url: str, keys: Keys) -> AsyncGenerator[str]:
    """The url of a user of the server who may read, but neither ask the server of itself nor write."""
    user = f"onlooker-{uuid4().hex[:8]}"
    await server.client.execute_command(
        *("ACL", "SETUSER", user, "on", ">secret", f"~{keys.prefix}:*", "+@read", "+ping", "-xinfo", "+acl|whoami"),
        *("+acl|dryrun", "+client"),
    )
    at = urlsplit(server_url)
    yield at._replace(netloc=f"{user}:secret@{at.hostname}:{at.port}").geturl()
    await server.client.execute_command("ACL", "DELUSER", user)


async def test_a_missing_right_is_reported_and_the_rest_is_shown(
    server: Server, keys: Keys, onlooker: str, tmp_path: Path
):
    found = await findings(await deployment(server, onlooker, keys, tmp_path))
    assert [f["level"] for f in found["deployment"]] == ["ok"]
    for about in ("server", "work"):
        [finding] = found[about]
        assert finding["level"] == "note"
        assert "no permissions" in finding["says"]
    [rights] = found["rights"]
    assert "services with these settings could not work" in rights["says"]
    assert "secret" not in json.dumps(found)


@pytest.mark.leaves_pending
async def test_entries_whose_workers_die_again_and_again_are_named(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
):
    config = await deployment(server, server_url, keys, tmp_path)
    stream = keys.topic(0, "turns")
    await server.client.xgroup_create(stream, "fetcher", id="0", mkstream=True)
    entry = (await server.client.xadd(stream, {"r": b"work"})).decode()
    await server.client.xreadgroup("fetcher", "w", {stream: ">"})
    await server.client.xclaim(stream, "fetcher", "w", 0, [entry], retrycount=7, idle=3_600_000)
    wrong = [f for f in (await findings(config))["fetcher"] if f["level"] == "wrong"]
    assert ["not taken over" in wrong[0]["says"], f"{stream} {entry}" in wrong[1]["says"]] == [True, True]


async def test_a_missing_recorder_is_reported_if_runs_are_recorded(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
):
    found = await findings(await deployment(server, server_url, keys, tmp_path, "[records]\n"))
    [missing] = found["recorder"]
    assert missing["level"] == "wrong"
    assert not any("todo" in finding for finding in (*found["intake"], *found["parser"], missing))
    assert [finding["todo"] for finding in found["workers"]] == ["start `tokenbus up`, or the workers"]
    assert "recorder" not in await findings(await deployment(server, server_url, keys, tmp_path))


async def test_mcp_servers_must_be_listed(server: Server, server_url: str, keys: Keys, tmp_path: Path):
    mcp = '[mcp.files]\nkind = "stdio"\ncommand = "x"\n[mcp.web]\nkind = "http"\nurl = "http://127.0.0.1:1/mcp"\n'
    config = await deployment(server, server_url, keys, tmp_path, mcp)
    await server.client.set(keys.mcp("files"), b"[]", ex=120)
    found = await findings(config)
    assert [found[f"mcp {name}"][0]["level"] for name in ("files", "web")] == ["ok", "wrong"]


async def test_a_custom_store_must_implement_the_interface(server: Server, server_url: str, keys: Keys, tmp_path: Path):
    for loader, level in (("tests.services.tools.conftest:MemoryBlobs", "ok"), ("tests.services:nothing", "wrong")):
        config = await deployment(server, server_url, keys, tmp_path, f'[blobs]\nloader = "{loader}"\n')
        [finding] = (await findings(config))["blobs"]
        assert finding["level"] == level
        assert loader in finding["says"]


async def test_the_archive_is_asked_for_its_newest_run(server: Server, server_url: str, keys: Keys, tmp_path: Path):
    async def says(blobs: str, tables: str) -> tuple[str, str]:
        config = await deployment(server, server_url, keys, tmp_path, f'[blobs]\nservice_url = "{blobs}"\n{tables}')
        [finding] = (await findings(config))["archive"]
        return finding["level"], finding["says"]

    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    assert (await says("http://127.0.0.1:1", "[archive]\n"))[0] == "wrong"
    async with (
        fleet(tmp_path / "with", server_url, keys, "http://127.0.0.1:1", ["blobs"], "[archive]\n") as has,
        fleet(tmp_path / "without", server_url, keys, "http://127.0.0.1:1", ["blobs"]) as has_not,
    ):
        [[one], [other]] = has.workers, has_not.workers
        assert await says(one.url, "[archive]\n") == ("ok", "answers; no run is archived yet")
        assert await says(other.url, "[archive]\n") == ("wrong", f"the blob service at {other.url} has no archive")


async def test_providers_are_asked_only_on_request(server: Server, server_url: str, keys: Keys, tmp_path: Path):
    unreachable = '[providers.mine]\napi = "anthropic"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
    defaults = "".join(
        f'[providers.{api}]\napi = "{api}"\nbase_url = "http://127.0.0.1:1"\napi_key_env = ""\n'
        for api in ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
    )
    config = await deployment(server, server_url, keys, tmp_path, unreachable + defaults)
    assert [f["says"] for f in (await findings(config))["provider mine"]] == ["needs no key"]
    finding = (await findings(config, "--providers"))["provider mine"]
    assert "no answer from http://127.0.0.1:1" in finding[1]["says"]


async def test_a_shared_key_of_the_wrong_type_is_named_with_its_fix(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
):
    config = await deployment(server, server_url, keys, tmp_path)
    assert "keys" not in await findings(config)
    stream = keys.topic(1, "blocks")
    await server.client.set(stream, "somebody's own", px=60_000)
    [wrong] = (await findings(config))["keys"]
    assert (wrong["level"], stream in wrong["says"], "is a string" in wrong["says"]) == ("wrong", True, True)
    assert f"DEL {stream}" in wrong["todo"]


class _Models(BaseHTTPRequestHandler):
    """A provider that lists its models for one key alone."""

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.headers["anthropic-version"]
        status = 404 if not known else 200 if self.headers["x-api-key"] == "good" else 401
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


@pytest.fixture
def lists_models() -> Iterator[str]:
    """The address of such a provider."""
    server = HTTPServer(("127.0.0.1", 0), _Models)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_key_that_its_provider_refuses_and_a_failing_policy_are_reported(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, lists_models: str
):
    for name in ("good", "revoked"):
        (tmp_path / name).write_text(f"{name}\n")
    tables = "".join(
        f'[providers.{name}]\napi = "anthropic"\nbase_url = "{lists_models}{path}"\napi_key_file = "{tmp_path / key}"\n'
        for name, key, path in (("well", "good", ""), ("refused", "revoked", ""), ("elsewhere", "good", "/other"))
    )
    actions: list[PolicyAction] = ["error", "error", "block"]
    for number, action in enumerate(actions):
        reason = "ConnectionError: the text of the run"
        decided = Decided(run=f"r{number}", n=0, turn=0, attempt=1, policy="moderation", action=action, reason=reason)
        await server.client.xadd(keys.topic(0, "decisions"), {"__data__": encode(decided)})
    found = await findings(await deployment(server, server_url, keys, tmp_path, tables), "--keys")
    results = {name: found[f"provider {name}"][-1] for name in ("well", "refused", "elsewhere")}
    assert [(f["level"], f["says"]) for f in results.values()] == [
        ("ok", "accepts the key"),
        ("wrong", "refuses the key: HTTP 401"),
        ("note", "did not show whether the key is valid: HTTP 404"),
    ]
    assert "revoked" not in {f["says"] for f in results.values()}
    [policy] = found["policy moderation"]
    assert policy["says"] == "failed 2 times in the last 10 minutes: ConnectionError"


async def test_a_provider_that_fails_or_is_silent_is_named_by_doctor_and_top(
    server: Server, server_url: str, keys: Keys, tmp_path: Path
):
    settings = Settings(prefix=keys.prefix, partitions=keys.partitions, providers=DEFAULT_PROVIDERS)
    parser = ActivityCounter(server, keys, settings, characters=lambda: 0, owned=list)
    limited = ErrorInfo(code="rate_limit_exceeded", kind="rate_limit", message="secret", status=429)
    for number in range(MAX_FAILURES + 4):
        model = f"model-{number}"
        parser.attempt_over(state(), report(model=model, outcome="error", error=limited, answered_ms=0))
    for _ in range(3):
        parser.attempt_over(state(), report(model="model-0", outcome="error", error=limited, answered_ms=0))
    await parser.write()
    fetcher = SilentCalls(server, keys, CollectorRegistry(), worker="w", models=KnownModels(settings))
    ends = [fetcher.began("gemini", "flash", server.clock.now_ms() - 45_000) for _ in range(3)]
    await fetcher.open(liveness := Liveness())  # it says so again and again, however long the commands take
    await fetcher.write()
    config = await deployment(server, server_url, keys, tmp_path)
    found = await findings(config)
    [*failed, more] = [f for f in found["provider openai-chat"] if " failed " in f["says"]]
    first = next(f for f in failed if f["says"].startswith("model-0:"))
    assert "4 of 4 calls failed with rate_limit, rate_limit_exceeded, HTTP 429" in first["says"]
    assert [f["level"] for f in failed] == ["wrong"] * 5
    assert more["says"] == f"12 calls of {MAX_FAILURES - 4} other models failed too", "bounded, however many are tried"
    assert sum("limits.providers.openai-chat" in f.get("todo", "") for f in failed) == 1, "one hint per cause"
    [silent] = [f for f in found["provider gemini"] if "no byte" in f["says"]]
    assert (silent["level"], "first_event_timeout_s in [providers.gemini]" in silent["todo"]) == ("wrong", True)
    assert "secret" not in json.dumps(found)

    shown = (await run("top", "--once", "--every", "0.1", TOKENBUS_CONFIG=config)).out
    assert "gemini/flash  3 calls silent" in shown
    assert "openai-chat/model-0  4 of 4 calls: rate_limit, rate_limit_exceeded, HTTP 429" in shown
    for end in ends:
        end()
    await fetcher.write()
    assert not any("no byte" in f["says"] for f in (await findings(config))["provider gemini"])
    await fetcher.close()
    liveness.close()
