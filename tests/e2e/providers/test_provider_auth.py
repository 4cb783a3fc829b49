"""What authorises a provider's calls, through the running services: keys in files, and tokens that expire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e import judge
from tests.e2e.conftest import Send
from tests.e2e.fleet import PIPELINE, Fleet, ended, fleet, provider_table
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Status, Turn

SAYS = Script(name="says", turns=(Turn(says=Reply(text="Hello there.")),), repeat_last=True)
REFUSES = Script(name="refuses", turns=(Turn(says=Reply(text="Hello there."), first=(Status(status=401),)),))
NEVER = Script(name="never", turns=(Turn(says=Reply(text="Hello there."), fault=Status(status=401)),))
TOKENS = """
import asyncio, time
from tokenbus.providers.auth import Token, TokenAuth

def issued(name):
    count = 0
    async def fetch():
        nonlocal count
        count += 1
        if name == "broken":
            raise RuntimeError("no token for you")
        return Token(f"{name}-token-{count}", 3600)
    return TokenAuth(fetch, clock=time.monotonic, lock=asyncio.Lock())
"""


def keyless(name: str, url: str, more: str) -> str:
    """A provider's table without the line that says it needs no key."""
    return provider_table(name, "openai-chat", url, more).replace('api_key_env = ""\n', "")


async def test_a_key_in_a_file_is_read_again_when_it_changes(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("key-one-0123456789\n")
    second.write_text("key-of-a-variable\n")
    async with MockProvider([SAYS]) as provider:
        toml = keyless("filed", provider.url, f'api_key_file = "{first}"')
        toml += keyless("named", provider.url, 'api_key_env = "NAMED_KEY"')
        running = Fleet(tmp_path, server_url, keys, provider.url, toml)
        try:
            await running.start(*PIPELINE, env={"NAMED_KEY_FILE": str(second)})
            runs = [await send("says", provider=name) for name in ("filed", "named")]
            logs: Any = await ended(server.client, keys, runs)
            first.write_text("key-two-0123456789-longer\n")
            runs.append(await send("says", provider="filed"))
            logs |= await ended(server.client, keys, runs[2:])
            first.unlink()
            missing = await send("says", provider="filed")
            logs |= await ended(server.client, keys, [missing])
        finally:
            await running.stop()
        sent = [exchange.http_request.headers["authorization"] for exchange in provider.requests]
    assert all(logs[run][-1]["type"] == "completed" for run in runs), logs
    assert sorted(sent[:2]) == ["Bearer key-of-a-variable", "Bearer key-one-0123456789"]
    assert sent[2:] == ["Bearer key-two-0123456789-longer"]
    assert logs[missing][-1]["error"]["code"] == "key_missing"
    assert str(first) in logs[missing][-1]["error"]["message"]


async def test_a_refused_token_is_fetched_again_once(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    (tmp_path / "my_tokens.py").write_text(TOKENS)
    async with MockProvider([SAYS, REFUSES, NEVER]) as provider:
        toml = "[retry]\nbase_delay_s = 0.01\nmax_attempts = 2\n"
        for name in ("acme", "other", "broken"):
            more = f'auth = "my_tokens:issued"\nauth_options = {{ name = "{name}" }}'
            toml += provider_table(name, "openai-chat", provider.url, more)
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            log: Any = None
            for model in ("says", "says", "refuses"):
                run = await send(model, provider="acme")
                log = (await ended(server.client, keys, [run]))[run]
                judge.check(log)
                assert [e["type"] for e in log if e["type"] in ("retrying", "completed")] == ["completed"], log
            hopeless = await send("never", provider="other")
            broken = await send("says", provider="broken", fallback=[{"provider": "anthropic", "model": "says"}])
            logs: Any = await ended(server.client, keys, [hopeless, broken])
        sent = [exchange.http_request.headers.get("authorization") for exchange in provider.requests]
    assert sent[:4] == [f"Bearer acme-token-{n}" for n in (1, 1, 1, 2)]
    assert sorted(filter(None, sent[4:])) == ["Bearer other-token-1", "Bearer other-token-2"]
    assert logs[hopeless][-1]["error"]["class"] == "auth"
    tries = [e["error"]["code"] for e in logs[broken] if e["type"] == "retrying"]
    assert tries == ["auth_unavailable", "auth_unavailable"]
    assert judge.text(logs[broken]) == "Hello there."
