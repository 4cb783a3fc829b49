"""The topic `sessions`: the events of all sessions, for those who follow none."""

from __future__ import annotations

import msgspec

from tests.e2e.sessions.test_sessions import run_over, said, told
from tokenbus import Client, Deleted, SessionCursor, SessionTopicEvent, UnknownSessionEvent
from tokenbus.events.requests import SessionMessage
from tokenbus.events.sessions import Appended, Delivered, Returned, RunEnded, SessionEvent, session_ref
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Reply, Stall, Turn

MODEL = {"provider": "anthropic", "model": "two"}
STALLS = Turn(says=Reply(text="two three"), fault=Stall(after_text="three"))


async def until_deleted(bus: Client, times: int = 1) -> list[SessionTopicEvent]:
    events: list[SessionTopicEvent] = []
    async for event in bus.subscribe("sessions", from_="start"):
        events.append(event)
        times -= isinstance(event, Deleted)
        if not times:
            break
    return events


async def test_the_topic_has_what_the_logs_of_all_sessions_have_and_which_session_that_is() -> None:
    with LocalBus() as local:
        local.model_says("two", STALLS, "one", "one", "one")
        async with local.client() as bus:
            logs: dict[str, list[object]] = {}
            for tenant, name in (("ada", "same"), ("bob", "same")):
                session = bus.session(name, tenant=tenant)
                await session.configure(MODEL)
                await session.send("hello")
                if tenant == "ada":
                    await told(session, said)
                    await session.send("never", when_busy="reject")
                    await session.send("then", append="then")
                    await session.withdraw("then")
                    await session.send("now", when_busy="interrupt")
                    await told(session, run_over, 2)
                else:
                    await told(session, run_over)
                steps = [step async for step in session.follow(live=False)]
                logs[tenant] = [step.event for step in steps if isinstance(step.event, SessionEvent)]
                await session.delete(append="away")
            events = await until_deleted(bus, 2)
            for tenant, log in logs.items():
                of = [event for event in events if event.tenant == tenant]
                assert {event.session for event in of} == {"same"}
                assert len({event.made for event in of}) == 1
                assert [msgspec.structs.replace(e, session=None, tenant=None, made=None) for e in of[:-1]] == log
                gone = of[-1]
                assert isinstance(gone, Deleted)
                assert (gone.append, gone.session_seq) == ("away", len(log))
            kinds = {type(event) for event in events}
            assert {Appended, Delivered, Returned, RunEnded, Deleted} < kinds


async def test_a_session_is_followed_from_an_event_of_the_topic() -> None:
    with LocalBus() as local:
        local.model_says("two", "one")
        async with local.client() as bus:
            session = bus.session("from-there")
            await session.configure(MODEL)
            await session.send("hello")
            await told(session, run_over)
            steps = [step async for step in session.follow(live=False)]
            async for event in bus.subscribe("sessions", kinds=Delivered, from_="start"):
                assert event.run
                assert event.made
                at = SessionCursor(event.session_seq, -1, event.made)
                rest = [step async for step in session.follow(after=at, live=False)]
                assert rest == steps[-len(rest) :]
                assert len(steps) - len(rest) == event.session_seq + 1
                break


async def test_an_event_that_only_a_newer_version_knows_has_its_place_in_the_session_and_on_the_topic() -> None:
    with LocalBus() as local:
        local.model_says("two", "one", "one")
        async with local.client() as bus:
            session = bus.session("newer")
            await session.configure(MODEL)
            await session.send("hello")
            before = [step.event for step in await told(session, run_over) if isinstance(step.event, SessionEvent)]
            ref, seq = session_ref("", "newer"), before[-1].session_seq + 1
            keys = await bus._deployment.keys_of(ref)  # pyright: ignore[reportPrivateUsage]
            fields = {"type": "applauded", "session_seq": seq, "at_ms": 7, "loud": [1]}
            server = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
            await server.xadd(keys.log(ref), {"__data__": msgspec.json.encode(fields)}, id=f"1-{seq}")
            made = before[0].made or (await server.hget(keys.session(ref), "made")).decode()
            named = fields | {"session": "newer", "made": made}
            await server.xadd(keys.topic(keys.partition_of(ref), "sessions"), {"__data__": msgspec.json.encode(named)})
            newest = [step.event async for step in session.follow(live=False)][-1]
            assert newest == UnknownSessionEvent(session_seq=seq, at_ms=7, event_type="applauded", fields=fields)
            async for event in bus.subscribe("sessions", from_="start"):
                if isinstance(event, UnknownSessionEvent):
                    assert (event.session, event.made, event.seq, event.fields) == ("newer", made, seq, named)
                    break


async def test_a_long_item_has_its_type_and_size_on_the_topic() -> None:
    with LocalBus() as local:
        local.model_says("two", "one")
        async with local.client() as bus:
            session = bus.session("long")
            await session.configure(MODEL)
            await session.send("x" * 100_000, append="long")
            await told(session, run_over)
            async for event in bus.subscribe("sessions", kinds=Appended, from_="start"):
                assert event.item == SessionMessage()
                assert event.item_bytes
                assert 100_000 < event.item_bytes < 101_000
                break
            logged = next(s.event for s in await told(session, run_over) if isinstance(s.event, Appended))
            assert logged.item_bytes is None
            assert isinstance(logged.item, SessionMessage)
            assert len(logged.item.content) == 100_000


async def test_the_processes_of_a_group_share_sessions_and_get_those_of_one_in_order() -> None:
    with LocalBus() as local:
        local.model_says("two", *(["one"] * 12))
        async with local.client() as bus:
            names = [f"s{n}" for n in range(4)]
            for name in names:
                await bus.session(name).configure(MODEL)
                for _ in range(3):
                    await bus.session(name).send("hello", when_busy="enqueue")
                await told(bus.session(name), run_over, 3)
            got: dict[str | None, list[int]] = {}
            tries: dict[tuple[str | None, int], int] = {}

            async def note(event: SessionTopicEvent) -> None:
                tries[event.session, event.seq] = tries.get((event.session, event.seq), 0) + 1
                if event.seq == 2 and tries[event.session, event.seq] == 1:
                    raise RuntimeError("once")
                got.setdefault(event.session, []).append(event.seq)
                if len(got) == len(names) and all(seqs[-1] == 9 for seqs in got.values()):
                    await group.aclose()

            async with bus.subscribe("sessions", group="crm", from_="start") as group:
                await group.each(note, concurrency=4, tries=3)
            assert got == {name: list(range(10)) for name in names}
