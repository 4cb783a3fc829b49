"""A session through the running services: one order, and every append once, whatever dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.e2e.conftest import WEATHER
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Fleet, fleet
from tests.services.cli.process import run as command
from tests.waiting import eventually
from tokenbus import Chunk, Client, Message, Receipt
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.commit import MOST_EVENT_BYTES
from tokenbus.bus.server.server import Server
from tokenbus.client.sessions.listing import PAGE
from tokenbus.client.sessions.reader import SessionCursor, SessionStep
from tokenbus.client.sessions.session import Session
from tokenbus.errors import AppendPending, CursorTrimmed, RequestInvalid, SessionNotFound, SessionReplaced
from tokenbus.events.sessions import (
    Appended,
    Configured,
    Delivered,
    Fate,
    Returned,
    RunEnded,
    SessionEvent,
    SessionTopicEvent,
    placing,
    session_ref,
)
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, ToolCall, Turn

TALK = Script(
    name="talk",
    turns=(
        Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")),
        *(Turn(says=Reply(text=f"answer {n}")) for n in range(1, 8)),
    ),
)
"""The first answer waits in its middle until the test lets it go on."""
WORKING = Script(
    name="working",
    turns=(
        Turn(
            says=Reply(text="Let me see three", tool_calls=(ToolCall(name="weather", arguments={"city": "Rome"}),)),
            fault=Stall(after_text="three"),
        ),
        Turn(says=Reply(text="It is warm.")),
        Turn(says=Reply(text="Yes.")),
    ),
)
CONFIG = {"provider": "openai-chat", "model": "talk", "system": "Be brief."}


@asynccontextmanager
async def running(server_url: str, keys: Keys, tmp_path: Path) -> AsyncGenerator[tuple[MockProvider, Fleet, Client]]:
    async with (
        MockProvider([TALK, WORKING]) as provider,
        fleet(tmp_path, server_url, keys, provider.url, WITH_TOOLS) as workers,
        Client(server_url, prefix=keys.prefix) as bus,
    ):
        yield provider, workers, bus


async def told(session: Session, until: Callable[[SessionStep], bool], times: int = 1) -> list[SessionStep]:
    """All that a reader gets from the beginning, up to the last of so many steps."""
    steps: list[SessionStep] = []
    async for step in session.follow():
        steps.append(step)
        times -= until(step)
        if not times:
            break
    return steps


async def on_topic(bus: Client, name: str) -> list[SessionTopicEvent]:
    """The events of a session on the topic, up to what is there, without what only the topic says."""
    events: list[SessionTopicEvent] = []
    newest = [step.cursor.session_seq async for step in bus.session(name).follow(live=False)][-1]
    async for event in bus.subscribe("sessions", from_="start"):
        if event.session == name:
            events.append(msgspec.structs.replace(event, session=None, tenant=None, made=None))
            if event.session_seq == newest:
                break
    return events


def run_over(step: SessionStep) -> bool:
    return isinstance(step.event, RunEnded)


def said(step: SessionStep) -> bool:
    return isinstance(step.event, Chunk) and "three" in step.event.text


def sent(provider: MockProvider, number: int) -> list[tuple[str, Any]]:
    """The conversation in the body of a request to the provider."""
    body = json.loads(provider.requests[number].http_request.body)
    return [(message["role"], message["content"]) for message in body["messages"]]


def texts(messages: list[Message]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for message in messages:
        content = message.content if isinstance(message.content, str) else "".join(p.text for p in message.content)  # pyright: ignore
        found.append((message.role, content))
    return found


async def test_messages_wait_for_the_open_run_and_each_run_gets_the_history(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("chat", tenant="ada")
        await session.configure(CONFIG)
        first = await session.send("hello")
        assert first.fate.state == "delivered"
        await told(session, said)
        second = await session.send("and then?", append="b")
        assert second.fate == Fate(state="appended")
        assert await session.send("and then?", append="b") == second
        await session.send("and then?", append="b")
        await session.send("and last?", append="c")
        provider.resume(provider.requests[0])
        steps = await told(session, run_over, 3)
        assert sent(provider, 2) == [
            ("system", "Be brief."),
            ("user", "hello"),
            ("assistant", "one two three four"),
            ("user", "and then?"),
            ("assistant", "answer 1"),
            ("user", "and last?"),
        ]
        assert texts(await session.messages()) == [*sent(provider, 2)[1:], ("assistant", "answer 2")]
        own = [step.event for step in steps if isinstance(step.event, Appended | Delivered | Configured | RunEnded)]
        assert [event.session_seq for event in own] == list(range(len(own)))
        delivered = [event for event in own if isinstance(event, Delivered)]
        runs = [event.run for event in own if isinstance(event, RunEnded)]
        assert [event.append for event in delivered] == [first.append, "b", "c"]
        assert [event.run for event in delivered] == runs
        assert await session.fate("b") == Fate(state="delivered", run=runs[1], turn=0)
        assert len(provider.requests) == 3
        # Whichever cursor a reader goes on from, it gets the same.
        for n in range(0, len(steps), 3):
            rest = [step async for step in session.follow(after=steps[n].cursor, live=False)]
            assert rest == steps[n + 1 :]
        assert texts(await bus.messages(runs[1] or "")) == [("assistant", "answer 1")]


async def test_an_append_to_no_session_or_one_that_is_invalid_is_returned_with_the_problem(
    server_url: str, keys: Keys, tmp_path: Path, server: Server
) -> None:
    async with running(server_url, keys, tmp_path) as (_, _, bus):
        session = bus.session("chat")
        with pytest.raises(RequestInvalid, match="there is no session 'chat'"):
            await session.send("hello", append="a")
        await session.configure(CONFIG)
        for wrong in ({**CONFIG, "provider": "nobody"}, {**CONFIG, "max_tokens": 0}, {"max_tokens": "few"}):
            with pytest.raises(RequestInvalid):
                await session.configure(wrong)
        request = {"type": "append", "session": "chat", "id": "x", "item": {"type": "message", "content": 7}}
        await server.client.xadd(keys.requests, {"__data__": json.dumps(request)})

        async def refused() -> bool:
            fate = await session.fate("x")
            return fate is not None and fate.reason == "refused" and "item.content" in (fate.problem or "")

        await eventually(refused)
        other = bus.session("chat", tenant="eve")
        with pytest.raises(RequestInvalid, match="there is no session 'chat'"):
            await other.send("hello")
        assert [type(step.event) async for step in session.follow(live=False)] == [Configured, *4 * [Returned]]


async def test_a_busy_session_rejects_interrupts_and_gives_messages_back(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with running(server_url, keys, tmp_path) as (_provider, _, bus):
        session = bus.session("voice")
        await session.configure(CONFIG)
        assert (await session.interrupt()).fate.reason == "nothing_open"
        await session.send("hello")
        steps = await told(session, said)
        assert (await session.send("no", when_busy="reject")).fate.reason == "busy"
        await session.send("waits", append="w")
        assert (await session.withdraw("w")).fate.state == "delivered"
        assert (await session.withdraw("w")).fate.reason == "not_waiting"
        fate = await session.fate("w")
        assert fate
        assert fate.reason == "withdrawn"
        await session.send("later")
        heard = next(s.event for s in steps if isinstance(s.event, Chunk) and s.event.visible)
        assert isinstance(heard, Chunk)
        beyond = await session.send("?", when_busy="interrupt", heard_through=999)
        assert beyond.fate.reason == "heard_too_far"
        await session.send("stop", when_busy="interrupt", heard_through=heard.seq, heard_characters=2)
        steps = await told(session, run_over, 3)
        statuses = [step.event.status for step in steps if isinstance(step.event, RunEnded)]
        assert statuses == ["cancelled", "completed", "completed"]
        history = [("user", "hello"), ("assistant", heard.text[:2]), ("user", "stop"), ("assistant", "answer 1")]
        assert texts(await session.messages()) == [*history, ("user", "later"), ("assistant", "answer 2")]
        # The last run's speech may end after the run.
        last = next(s.event for s in reversed(steps) if isinstance(s.event, Chunk))
        assert isinstance(last, Chunk)
        for meant, reason in ((heard.run, "newer_run"), (last.run, None)):
            cut = await session.interrupt(heard_through=last.seq, heard_characters=1, run=meant)
            assert cut.fate.reason == reason
        assert len(texts(await session.messages())[-1][1]) < len("answer 2")


async def test_sessions_are_listed_by_their_last_event_tenant_metadata_and_words(
    server_url: str, keys: Keys, tmp_path: Path, server: Server
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        for name, tenant in (("a", "ada"), ("b", "ada"), ("c", ""), ("d", "ada")):
            metadata = {"room": name if name != "d" else "b"}
            await bus.session(name, tenant=tenant).configure({**CONFIG, "metadata": metadata})
        talk = bus.session("a", tenant="ada")
        await talk.send("What   is the\nWeather?" + " x" * 200)
        await told(talk, said)
        await talk.send("later")

        async def names(**wanted: Any) -> list[str]:
            return [info.session async for info in bus.sessions(**wanted)]

        assert await names() == ["a", "d", "c", "b"]
        assert await names(oldest_first=True, limit=2) == ["b", "c"]
        assert await names(tenant="ada") == ["a", "d", "b"]
        assert await names(metadata={"room": "b"}) == ["d", "b"]
        assert await names(words="WEATHER what", tenant="ada") == ["a"]
        assert await names(words="weather snow") == []
        assert await names(older_than=60) == []
        (info,) = [info async for info in bus.sessions(limit=1)]
        open_run = (await talk.interrupt()).fate.run
        assert info.run == open_run
        assert (info.tenant, info.runs, info.waiting, info.provider, info.model) == ("ada", 1, 1, "openai-chat", "talk")
        assert info.metadata == {"room": "a"}
        assert info.begins.startswith("What is the Weather? x x")
        assert len(info.begins) == 200
        assert 0 < info.begun_ms <= info.last_ms
        await told(talk, run_over, 2)
        (info,) = [info async for info in bus.sessions(limit=1)]
        assert (info.session, info.runs, info.run, info.waiting) == ("a", 2, None, 0)
        fork = await talk.fork("f")
        (info,) = [info async for info in bus.sessions(words="f weather")]
        assert (info.session, info.begins[:7]) == ("f", "What is")
        await fork.delete()
        await talk.delete()
        ref = session_ref("ada", "b")
        at = keys.within(keys.partition_of(ref))
        an_hour_ago = (await server.client.time())[0] * 1000 - 3_600_000
        for tenant in ("", "ada"):
            await server.client.zadd(at.sessions(keys.partition_of(ref), tenant), {ref: an_hour_ago})
        assert await names(older_than=1800) == await names(older_than=1800, tenant="ada") == ["b"]
        # One that has expired is not listed, and makes room when another one is written to.
        await server.client.delete(at.session(ref))
        assert await names() == ["d", "c"]
        index = at.sessions(keys.partition_of(ref), "ada")
        await server.client.zadd(index, {ref: 1})
        others = (f"e{n}" for n in range(100))
        other = next(name for name in others if keys.partition_of(session_ref("ada", name)) == keys.partition_of(ref))
        await bus.session(other, tenant="ada").configure(CONFIG)
        assert await server.client.zscore(index, ref) is None
        assert len(provider.requests) == 2


async def test_more_sessions_than_a_page_are_listed_each_once() -> None:
    with LocalBus() as local:
        local.model_says("two", "one")
        async with local.client() as bus:
            for n in range(PAGE + 10):
                await bus.session(f"s{n}").configure({"provider": "anthropic", "model": "two"})
            listed = [info async for info in bus.sessions()]
            assert [info.session for info in listed] == [f"s{n}" for n in reversed(range(PAGE + 10))]
            assert [info.last_ms for info in listed] == sorted((info.last_ms for info in listed), reverse=True)


@pytest.mark.parametrize("tools", [[WEATHER], []], ids=["between turns", "after the run"])
async def test_a_message_steers_the_runs_next_call_or_else_starts_the_next_run(
    server_url: str, keys: Keys, tmp_path: Path, tools: list[Any]
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("steered")
        config = {**CONFIG, "model": "working" if tools else "talk", "tools": tools}
        await session.configure(config, when_busy="steer")
        first = await session.send("Is it warm?")
        await told(session, said)
        await session.send("in Rome", append="s")
        await session.send("withdrawn", append="w")
        await session.withdraw("w")
        await session.send("later", append="q", when_busy="enqueue")
        provider.resume(provider.requests[0])
        await told(session, run_over, 2 if tools else 3)
        fate = await session.fate("s")
        assert fate
        if not tools:
            assert sent(provider, 1)[-1] == ("user", "in Rome")
            assert (fate.turn, fate.run == first.fate.run) == (0, False)
            return
        assert fate == Fate(state="delivered", run=first.fate.run, turn=1)
        assert [role for role, _ in sent(provider, 1)] == ["system", "user", "assistant", "tool", "user"]
        assert sent(provider, 1)[-1] == ("user", "in Rome")
        roles = ["user", "assistant", "tool", "user", "assistant", "user", "assistant"]
        history = await session.messages()
        assert [message.role for message in history] == roles
        assert [message.content for message in history if message.role == "user"] == ["Is it warm?", "in Rome", "later"]
        assert sent(provider, 2)[1:3] == sent(provider, 1)[1:3]
        assert [role for role, _ in sent(provider, 2)] == ["system", *roles[:-1]]


async def test_history_is_bounded_in_tokens_with_a_note_and_a_session_may_begin_with_one(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("long")
        before: list[Any] = [{"role": "user", "content": "x" * 4000}, {"role": "assistant", "content": "yes"}]
        await session.configure({**CONFIG, "system": "s"}, messages=before, history_tokens=400)
        for text in ("a" * 400, "b" * 1200, "c"):
            await session.send(text, wait_s=8)
        steps = await told(session, run_over, 3)
        assert [role for role, _ in sent(provider, 0)] == ["system", "user"]
        assert sent(provider, 2) == [("system", "s"), ("user", "b" * 1200), sent(provider, 2)[2], ("user", "c")]
        notes = [getattr(step.event, "provider_extra", None) for step in steps]
        assert any("oldest runs were left out" in str(note) for note in notes)
        assert len(await session.messages()) == 8


async def test_messages_that_wait_are_taken_together_if_the_configuration_says_so(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("together")
        await session.configure(CONFIG, together=True)
        await session.send("hello")
        await told(session, said)
        for text in ("b", "c"):
            await session.send(text, wait_s=8)
        await session.configure({**CONFIG, "system": "Be long."}, together=True)
        await session.send("d")
        provider.resume(provider.requests[0])
        await told(session, run_over, 3)
        assert [content for role, content in sent(provider, 1) if role == "user"] == ["hello", "b", "c"]
        assert sent(provider, 2)[0] == ("system", "Be long.")


async def test_who_waits_for_an_append_learns_that_its_session_was_deleted() -> None:
    stalls = Turn(says=Reply(text="two three"), fault=Stall(after_text="two"))
    with LocalBus() as local:
        local.model_says("talk", *[stalls] * 20)
        async with local.client() as bus:
            session = bus.session("gone")
            for _ in range(5):
                await session.configure({"provider": "anthropic", "model": "talk"})
                await session.send("hello")
                ends = await asyncio.gather(
                    *(session.send("noted", run=False, wait_s=60) for _ in range(20)),
                    session.delete(),
                    *(session.interrupt(wait_s=60) for _ in range(20)),
                    return_exceptions=True,
                )
                told = {type(end) for end in ends} - {Receipt, type(None), RequestInvalid}
                assert told <= {SessionNotFound}, [end for end in ends if isinstance(end, AppendPending)]


async def test_a_deleted_session_leaves_nothing_and_its_fork_stays(
    server_url: str, keys: Keys, tmp_path: Path, server: Server
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        session = bus.session("gone", tenant="ada")
        await session.configure({**CONFIG, "system": "s"})
        await session.send("hello")
        await told(session, said)
        provider.resume(provider.requests[0])
        await told(session, run_over)
        first = (await session.send("again")).fate.run
        await told(session, run_over, 2)
        history = texts(await session.messages())
        with pytest.raises(RequestInvalid, match="no run of this session"):
            await session.fork("fork", through="another")
        fork = await session.fork("fork", through=first, append="f")
        await session.fork("fork", through=first, append="f")
        with pytest.raises(RequestInvalid, match="has a history"):
            await session.fork("fork")
        ref = session_ref("ada", "gone")

        async def left() -> list[str]:
            names = [name.decode() async for name in server.client.scan_iter(match=f"*{ref}*", count=1000)]
            listed = await server.client.zrange(keys.ended_runs(keys.partition_of(ref), "ada"), 0, -1)
            return names + [run.decode() for run in listed if ref in run.decode()]

        # Ended runs stay as long as the session, however long ago they ended.
        old = keys.log(f"{first}")
        await server.client.pexpire(old, 60_000)
        await server.client.hset(keys.session(ref), "renewed", 1)
        await session.withdraw("nothing")
        assert await server.client.pttl(old) > 7 * 86_400_000
        assert len(await left()) > 5
        await session.delete()
        assert await left() == [keys.of_session(ref)[1]]  # where the fate of the append is
        with pytest.raises(SessionNotFound):
            _ = [step async for step in session.follow()]
        # The name is free again, also while the open run of the one before is being cancelled.
        await session.configure(CONFIG)
        await session.send("hello")
        await told(session, said)
        await session.delete()
        assert await left() == [keys.of_session(ref)[1]]
        assert texts(await fork.messages()) == history
        await fork.send("go on")
        await told(fork, run_over)
        assert sent(provider, len(provider.requests) - 1)[1:] == [*history, ("user", "go on")]


async def test_a_session_stays_where_it_is_while_the_number_of_partitions_changes(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        sessions = [bus.session(f"s{n}") for n in range(4)]
        for session in sessions:
            await session.configure(CONFIG)
            await session.send("hello")
            await told(session, said)
            await session.send("waits")
        changed = await command("repartition", "11", TOKENBUS_CONFIG=str(tmp_path / "tokenbus.toml"))
        assert changed.code == 0, changed.error
        placed = {crc32(placing(session_ref("", s.name)).encode()) for s in sessions}
        assert any(n % 4 != n % 11 for n in placed)
        for exchange in provider.requests:
            provider.resume(exchange)
        async with Client(server_url, prefix=keys.prefix) as other:
            for session in sessions:
                await other.session(session.name).send("after the change")
                steps = await told(session, run_over, 3)
                assert [step async for step in other.session(session.name).follow(live=False)] == steps
                history = texts(await other.session(session.name).messages())
                assert [text for role, text in history if role == "user"] == ["hello", "waits", "after the change"]
                assert len(history) == 6


async def test_nothing_is_lost_or_doubled_while_workers_die(
    server_url: str, keys: Keys, tmp_path: Path, server: Server
) -> None:
    async with running(server_url, keys, tmp_path) as (provider, workers, bus):
        sessions = [bus.session(f"s{n}") for n in range(3)]
        for session in sessions:
            await session.configure({**CONFIG, "on_failure": "restart"})

        async def write(session: Session, who: str) -> None:
            for n in range(4):
                await session.send(f"{who} {n}", append=f"{who}-{n}", wait_s=120)

        async def kill() -> None:
            for kind in PIPELINE * 2:
                await provider.requested(1)
                victim = next(w for w in workers.workers if w.kind == kind and w.process.returncode is None)
                victim.kill()
                await workers.start(kind)

        async def resume() -> None:
            while True:
                for exchange in provider.requests:
                    provider.resume(exchange)
                await asyncio.sleep(0.05)

        resuming = asyncio.create_task(resume())
        await asyncio.gather(kill(), *(write(session, who) for session in sessions for who in ("ann", "bob")))
        for session in sessions:
            steps = await told(session, run_over, 8)
            appended = [s.event.append for s in steps if isinstance(s.event, Appended)]
            delivered = [s.event.append for s in steps if isinstance(s.event, Delivered)]
            assert appended == delivered
            assert sorted(appended) == sorted(f"{who}-{n}" for who in ("ann", "bob") for n in range(4))
            assert [int(a[-1]) for a in appended if a.startswith("ann")] == [0, 1, 2, 3]
            assert [step async for step in session.follow(live=False)] == steps
            history = texts(await session.messages())
            assert [text for role, text in history if role == "user"] == [f"{a[:3]} {a[-1]}" for a in appended]
            assert len(history) == 16
            assert await on_topic(bus, session.name) == [s.event for s in steps if isinstance(s.event, SessionEvent)]
        resuming.cancel()


async def test_a_run_of_a_session_that_is_tried_again_has_the_history() -> None:
    with LocalBus() as local:
        local.model_says("two", "one two", Turn(says=Reply(text="three four"), fault=Stall(after_text="three")))
        async with local.client() as bus:
            session = bus.session("tried")
            await session.configure({"provider": "anthropic", "model": "two"})
            await session.send("first")
            await session.send("second")
            await told(session, said)
            run = (await session.interrupt()).fate.run
            assert run is not None
            await told(session, run_over, 2)
            again = await bus.retry(run)
            async for event in again.events():
                if isinstance(event, Chunk):
                    await again.cancel()
            sent_first, sent_again = [request["messages"] for request in local.requests[-2:]]
            assert sent_again == sent_first
            assert len(sent_again) == 3


async def test_a_cursor_is_of_one_making_of_a_session_and_a_reader_ends_with_it() -> None:
    with LocalBus() as local:
        local.model_says("two", "one two", "three four", "five")
        config = {"provider": "anthropic", "model": "two"}
        async with local.client() as bus:
            session = bus.session("again")
            await session.configure(config, append="made")
            await session.send("first")
            steps = await told(session, run_over)
            assert all(SessionCursor.parse(str(step.cursor)) == step.cursor for step in steps)
            following = asyncio.create_task(told(session, run_over, 2))
            late = session.follow(after=steps[0].cursor)
            assert await anext(late) == steps[1]
            await session.delete()
            await session.configure(config, append="made")
            await session.send("second")
            await session.send("third")
            await told(session, run_over, 2)
            for reader in (
                late,
                session.follow(after=steps[2].cursor),
                session.follow(after=steps[2].cursor, live=False),
            ):
                with pytest.raises(SessionReplaced):
                    _ = [step async for step in reader]
            with pytest.raises((SessionReplaced, SessionNotFound)):
                await following
            with pytest.raises(ValueError, match="no cursor"):
                SessionCursor.parse("1.2")


async def test_a_session_keeps_its_newest_events_and_their_fates() -> None:
    most = 150
    with LocalBus(f"[retention]\nsession_events = {most}\n") as local:
        local.model_says("two", "one two")
        async with local.client() as bus:
            session = bus.session("long")
            await session.configure({"provider": "anthropic", "model": "two"})
            first = await anext(session.follow())
            ref = session_ref("", "long")
            keys = await bus._deployment.keys_of(ref)  # pyright: ignore[reportPrivateUsage]
            log, appends, *_ = keys.of_session(ref)
            client = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
            pipe = client.pipeline(transaction=False)
            for n in range(1, most):
                event = {"type": "returned", "session_seq": n, "at_ms": 1, "append": f"a{n}", "reason": "busy"}
                pipe.xadd(log, {"__data__": json.dumps(event, separators=(",", ":"))}, id=f"1-{n}")
                pipe.hset(appends, f"a{n}", '{"state":"returned","reason":"busy"}')
            pipe.hset(keys.session(ref), "seq", most)
            await pipe.execute()
            for n in range(3):
                with pytest.raises(RequestInvalid):
                    await session.configure({"provider": "nobody", "model": "two"}, append=f"bad{n}")
            assert (await session.send("hello", append="new")).fate.state == "delivered"
            await told(session, run_over)
            steps = [step async for step in session.follow(live=False)]
            assert await client.xlen(log) == most
            assert await client.hlen(appends) == most - 2  # two events tell of `new`, one of the run's end
            assert await session.fate("a5") is None
            assert await session.fate("a6") is not None
            assert (await session.send("hello", append="new")).fate.state == "delivered"
            own = [step.event.session_seq for step in steps if isinstance(step.event, SessionEvent)]
            assert own == list(range(6, most + 6))
            with pytest.raises(CursorTrimmed):
                await anext(session.follow(after=first.cursor))


async def test_one_tenant_does_not_fill_the_server_with_sessions() -> None:
    with LocalBus("[limits]\nsession_share = 0.01") as local:
        local.model_says("two", "one two")
        async with local.client() as bus:
            server = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
            await server.config_set("maxmemory", 1600 * 2**20)
            large = {"provider": "anthropic", "model": "two", "system": "x" * 3_900_000}
            for n in range(4):
                await bus.session(f"s{n}", tenant="greedy").configure(large)
            with pytest.raises(RequestInvalid, match=r"session_share.*there is room again in \d+ s"):
                await bus.session("s4", tenant="greedy").configure(large)
            session = bus.session("s4", tenant="other")
            for _ in range(3):
                await session.configure(large)
            await bus.session("s0", tenant="greedy").delete()  # what takes no room is accepted
            small = bus.session("many")
            for _ in range(8):
                await small.configure(large)
            keys = await bus._deployment.keys_of(ref := session_ref("", "many"))  # pyright: ignore[reportPrivateUsage]
            log, *_ = keys.of_session(ref)
            events = await server.xrange(log)
            kept = sum(len(fields[b"__data__"]) for _, fields in events)
            assert 3_900_000 < kept <= MOST_EVENT_BYTES
            assert events[-1][0] == b"1-7"


async def test_a_reader_loses_nothing_at_whatever_read_its_connection_is_lost() -> None:
    with LocalBus() as local:
        local.model_says("two", "one two", "three four")
        async with local.client() as bus:
            session = bus.session("cut")
            await session.configure({"provider": "anthropic", "model": "two"})
            await session.send("first")
            await session.send("second")
            await told(session, run_over, 2)
        whole, _ = await _read_with_a_cut(local, at=-1)
        at = 0
        while True:
            steps, was_cut = await _read_with_a_cut(local, at=at)
            assert steps == whole, f"cut at read {at}"
            if not was_cut:
                break
            at += 1
        assert at > 3


async def _read_with_a_cut(local: LocalBus, *, at: int) -> tuple[list[SessionStep], bool]:
    """All stored steps, for a reader whose connection is lost at one read; and whether it read so often."""
    async with local.client() as bus:
        client: Any = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
        xrange, reads = client.xrange, iter(range(10_000))

        async def cut(*args: Any, **options: Any) -> Any:
            if next(reads) == at:
                raise RedisConnectionError("simulated")
            return await xrange(*args, **options)

        client.xrange = cut
        pipeline = client.pipeline

        def cut_pipeline(**options: Any) -> Any:
            pipe = pipeline(**options)
            execute = pipe.execute

            async def cut_execute() -> Any:
                if next(reads) == at:
                    raise RedisConnectionError("simulated")
                return await execute()

            pipe.execute = cut_execute
            return pipe

        client.pipeline = cut_pipeline
        steps = [step async for step in bus.session("cut").follow(live=False)]
    return steps, next(reads) > at
