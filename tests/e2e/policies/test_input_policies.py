"""Policies that judge what goes in: no provider, no log and no history has a text that they did not let pass."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import Deploy, Send
from tests.e2e.fleet import PIPELINE, ended, log_of
from tests.e2e.policies.test_policy_stage import POLICY, decisions_of, policy
from tests.e2e.sessions.test_sessions import texts
from tests.waiting import eventually
from tokenbus import Client, WaitInfo
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.client.sessions.session import Session
from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Configure, SessionMessage
from tokenbus.events.sessions import Appended, Configured, Delivered, Fate, Returned, RunEnded
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, ToolCall, Turn

SECRET = "swordfish"
TALK = Script(name="talk", turns=tuple(Turn(says=Reply(text=f"answer {n}")) for n in range(8)))
HELD = Script(
    name="held",
    turns=(
        Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),
        *(Turn(says=Reply(text=f"answer {n}")) for n in range(1, 8)),
    ),
)
RULES = policy("hide", "Replace", word=SECRET, by="*****") + policy("stop", "StopAt", word="forbidden", by="[no]")
CONFIG = {"provider": "openai-chat", "input_policies": ["hide", "stop"]}


def asked(provider: MockProvider) -> str:
    """All that the provider was sent."""
    return " ".join(recorded.http_request.body.decode() for recorded in provider.requests)


def last_asked(provider: MockProvider) -> list[tuple[str, Any]]:
    body = json.loads(provider.requests[-1].http_request.body)
    return [(message["role"], message["content"]) for message in body["messages"]]


async def settled(session: Session, append: str) -> Fate:
    async def fate() -> Fate | None:
        found = await session.fate(append)
        return found if found and found.state != "appended" else None

    found = await eventually(fate, timeout=120)
    assert found
    return found


async def stored_with(server: Server, keys: Keys, word: str, *, but: tuple[str, ...]) -> list[str]:
    """The deployment's streams and hashes that hold the word, without those that judging itself needs."""
    found: list[str] = []
    async for key in server.client.scan_iter(match=f"{keys.prefix}*"):
        name = key.decode()
        if any(part in name for part in but):
            continue
        kind = await server.client.type(key)
        value = (
            await (server.client.hgetall(key) if kind == b"hash" else server.client.xrange(key))
            if kind in (b"hash", b"stream")
            else ""
        )
        if word in str(value):
            found.append(name)
    return found


async def test_a_session_has_only_what_its_policies_let_pass(
    server: Server, server_url: str, keys: Keys, deployed: Deploy
) -> None:
    async with (
        deployed([HELD], (*PIPELINE, *POLICY), RULES) as (provider, _),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        session = bus.session("crew", tenant="ada")
        await session.configure(
            {**CONFIG, "model": "held", "system": f"Never say {SECRET}."},
            messages=[{"role": "user", "content": f"Before: {SECRET}."}],
        )
        first = await session.send(f"The word is {SECRET}, keep it.", participant="ann", append="first")
        await eventually(lambda: bool(provider.requests))
        await session.steer(f"And {SECRET} again.", append="steered")
        refused = await session.send("This is forbidden, is it not?", append="refused")
        await session.send(f"Note: {SECRET}.", run=False, append="added")
        await session.send("Go on.", request={"system": f"The {SECRET} rules."}, append="given")
        provider.resume(provider.requests[0])
        for append in ("first", "steered", "given"):
            assert (await settled(session, append)).state == "delivered"
        ends = 0
        steps: list[Any] = []
        async for step in session.follow():
            steps.append(step.event)
            ends += isinstance(step.event, RunEnded)
            if ends == 3:
                break
        history = texts(await session.messages())
        await session.rewrite([{"role": "user", "content": f"Only {SECRET}."}], append="rewritten")
        rewritten = texts(await session.messages())
        stored = await stored_with(
            server, keys, SECRET, but=(":drafts", ":decisions", ":events", "state:policy", "state:parser")
        )
        judged = {
            step.append: step.item.judged
            for step in steps
            if isinstance(step, (Appended, Configured)) and isinstance(step.item, (SessionMessage, Configure))
        }
        decided = await decisions_of(server, keys, next(run for append, run in judged.items() if run))
    assert first.fate.state == "delivered"
    assert (refused.fate.state, refused.fate.reason) == ("returned", "rejected")
    assert refused.fate.problem == "rejected by a policy: stop: it came to 'forbidden'"
    assert [(s.append, s.reason) for s in steps if isinstance(s, Returned)] == [("refused", "rejected")]
    assert sorted(s.append for s in steps if isinstance(s, Delivered)) == ["added", "first", "given", "steered"]
    assert all(judged.values())
    assert "refused" not in judged
    assert len(set(judged.values())) == len(judged)
    assert SECRET not in asked(provider)
    assert "forbidden" not in asked(provider)
    assert "Never say *****." in asked(provider)
    assert "The ***** rules." in asked(provider)
    assert ("user", "Before: *****.") in history
    assert ("user", "The word is *****, keep it.") in history
    assert ("user", "And ***** again.") in history
    assert ("user", "Note: *****.") in history
    assert rewritten == [("user", "Only *****.")]
    assert stored == []
    assert decided == []  # `Replace` records none


async def test_a_message_cannot_leave_the_policies_of_its_sessions_routes(
    server_url: str, keys: Keys, deployed: Deploy
) -> None:
    """A message that asks another provider, with other metadata, is judged by the routes of both."""
    toml = RULES + (
        '\n[[policy_routes]]\ninput_policies = ["hide"]\nproviders = ["openai-chat"]\nmetadata = { kind = "kid" }\n'
        '\n[[policy_routes]]\ninput_policies = ["stop"]\nproviders = ["anthropic"]\n'
    )
    async with (
        deployed([TALK], (*PIPELINE, *POLICY), toml) as (provider, _),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        session = bus.session("crew", tenant="ada")
        config = {"provider": "openai-chat", "model": "talk", "metadata": {"kind": "kid"}}
        await session.configure(config)
        elsewhere = {"provider": "anthropic", "metadata": {"kind": "none"}}
        await session.send(f"The word is {SECRET}.", request=elsewhere, append="first")
        refused = await session.send("This is forbidden.", request=elsewhere, append="second")
        assert (await settled(session, "first")).state == "delivered"
        await eventually(lambda: bool(provider.requests))
    assert "The word is *****." in asked(provider)
    assert (refused.fate.state, refused.fate.reason) == ("returned", "rejected")


async def test_a_plain_request_runs_with_what_its_policies_let_pass_or_fails_with_their_reason(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = RULES + '\n[[policy_routes]]\ninput_policies = ["stop"]\ntenants = ["ada"]\n'
    async with deployed([TALK], (*PIPELINE, *POLICY), toml) as (provider, _):
        messages = [
            {
                "role": "user",
                "content": [{"type": "text", "text": f"A {SECRET}"}, {"type": "text", "text": "and more"}],
            },
            {"role": "assistant", "content": f"I heard {SECRET}."},
            {"role": "user", "content": "So?"},
        ]
        passed = await send("talk", messages=messages, input_policies=["hide"], metadata={"tenant": "ada"})
        refused = await send("talk", "It is forbidden.", metadata={"tenant": "ada"})
        unjudged = await send("talk", f"My {SECRET}", metadata={"tenant": "bob"})
        logs: Any = await ended(server.client, keys, [passed, refused, unjudged])
        again = await send("talk", "It is forbidden.", id=refused, metadata={"tenant": "ada"})
        bodies = [json.loads(recorded.http_request.body) for recorded in provider.requests]
        stored = await server.client.hget(keys.run(passed), "request")
        dead = await server.client.xrange(keys.dead)
        judging = next(note for note in logs[passed][0]["notes"] if "judged" in note)
    assert again == refused
    assert (logs[passed][-1]["type"], logs[unjudged][-1]["type"]) == ("completed", "completed")
    assert [event["type"] for event in logs[refused]] == ["failed"]
    assert logs[refused][0]["error"]["code"] == "input_rejected"
    assert logs[refused][0]["error"]["message"] == "rejected by a policy: stop: it came to 'forbidden'"
    assert judging.startswith("policies judged what goes in: stop, hide (run input-")
    assert len(bodies) == 2
    (sent,) = (body["messages"] for body in bodies if len(body["messages"]) > 1)
    assert SECRET not in str(sent)
    assert "A *****" in str(sent)
    assert "and more" in str(sent)
    assert "I heard *****." in str(sent)
    assert SECRET.encode() not in stored
    assert dead == []


async def test_what_a_client_returns_to_a_run_is_judged_too(server_url: str, keys: Keys, deployed: Deploy) -> None:
    tool = {"name": "look", "kind": "client", "parameters": {"type": "object"}, "description": "Looks."}
    look = Script(
        name="look",
        turns=(
            Turn(says=Reply(tool_calls=(ToolCall(name="look", arguments={}),))),
            Turn(says=Reply(text="I see.")),
        ),
    )
    async with (
        deployed([look], (*PIPELINE, *POLICY), RULES) as (provider, _),
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        messages = [{"role": "user", "content": "Look!"}]
        run = await bus.publish({**CONFIG, "model": "look", "tools": [tool], "messages": messages})

        async def waiting() -> WaitInfo | None:
            async with aclosing(bus.waiting(run=run)) as waits:
                return await anext(waits, None)

        wait = await eventually(waiting)
        assert wait
        with pytest.raises(RequestInvalid, match="rejected by a policy: stop"):
            await bus.tool_result(run, wait.wait, "a forbidden view")
        assert await waiting() == wait
        await bus.tool_result(run, wait.wait, f"a {SECRET}")
        assert (await run.result()).text == "I see."
        sent = asked(provider)
    assert "a *****" in sent
    assert SECRET not in sent
    assert "forbidden" not in sent


async def test_messages_of_a_session_keep_their_order_while_policies_judge_them(
    server_url: str, keys: Keys, tmp_path: Path, deployed: Deploy
) -> None:
    toml = policy("slow", "Slow")
    async with deployed([TALK], PIPELINE, toml) as (_, services), Client(server_url, prefix=keys.prefix) as bus:
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        session = bus.session("crew")
        await session.configure({"provider": "anthropic", "model": "talk", "input_policies": ["slow"]})
        sending = []
        for n in range(3):
            sending.append(asyncio.create_task(session.send(f"message {n}", append=f"m{n}", wait_s=120)))
            await eventually(lambda n=n: f"message {n}" in _calls(tmp_path))
        assert [await session.fate(f"m{n}") for n in range(3)] == [None, None, None]
        (tmp_path / "go").touch()
        await asyncio.gather(*sending)
        for n in range(3):
            await settled(session, f"m{n}")
        appended = [s.event.append async for s in session.follow(live=False) if isinstance(s.event, Appended)]
    assert appended == ["m0", "m1", "m2"]


@pytest.mark.timeout(300)
async def test_whatever_dies_while_policies_judge_an_append_it_is_judged_and_accepted_once(
    server: Server, server_url: str, keys: Keys, tmp_path: Path, deployed: Deploy
) -> None:
    toml = policy("slow", "Slow") + RULES
    async with deployed([TALK], PIPELINE, toml) as (provider, services), Client(server_url, prefix=keys.prefix) as bus:
        (judges,) = await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        session = bus.session("crew")
        config = {"provider": "anthropic", "model": "talk", "input_policies": ["hide", "stop", "slow"]}
        await session.configure(config)
        sending = [
            asyncio.create_task(session.send(f"{SECRET} {n}", append=f"m{n}", when_busy="enqueue", wait_s=240))
            for n in range(3)
        ]
        sending.append(asyncio.create_task(session.send("a forbidden one", append="bad", wait_s=240)))
        await eventually(lambda: "***** 2" in _calls(tmp_path))
        for worker in [judges, *services.workers[: len(PIPELINE)]]:
            worker.kill()
        await services.start(*PIPELINE)
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        again = asyncio.create_task(session.send(f"{SECRET} 0", append="m0", wait_s=240))
        (tmp_path / "go").touch()
        *passed, rejected, repeated = await asyncio.gather(*sending, again)
        fates = [await settled(session, f"m{n}") for n in range(3)]
        steps = [step.event async for step in session.follow(live=False)]
        judging = {s.item.judged or "" for s in steps if isinstance(s, Appended) and isinstance(s.item, SessionMessage)}
        logs = [await log_of(server.client, keys, run) for run in judging]
        bodies = asked(provider)
        (owned,) = {run["run"] for log in logs for run in log} - judging or {""}
    assert rejected.fate.reason == "rejected"
    assert repeated.fate.run == passed[0].fate.run or repeated.fate.state == "appended"
    assert len({fate.run for fate in fates}) == 3
    told = [step for step in steps if isinstance(step, (Appended, Returned))]
    assert sorted(step.append for step in told) == ["bad", "m0", "m1", "m2"]
    assert len(judging) == 3
    assert not owned
    for log in logs:
        judge.check(log)
        assert "*****" in str(log)
        assert SECRET not in str(log)
    assert SECRET not in bodies
    assert "forbidden" not in bodies


def _calls(marks: Path) -> str:
    return (marks / "calls").read_text() if (marks / "calls").exists() else ""
