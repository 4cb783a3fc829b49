"""What a session's history is made of: messages of any kind, those that are added without a run, and rewritten ones."""

from __future__ import annotations

import re

import pytest

from tests.e2e.sessions.test_sessions import run_over, said, texts, told
from tokenbus import HistoryBound
from tokenbus.client.sessions import history
from tokenbus.errors import RequestInvalid
from tokenbus.events.public import Chunk, Completed
from tokenbus.events.sessions import Fate, RunEnded, session_ref
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Delivery, Reply, Stall, Turn

MODEL = {"provider": "anthropic", "model": "two"}
TOOL = {"name": "clock", "parameters": {"type": "object"}, "description": "d"}
CALL = {"type": "tool_call", "tool_id": "c1", "tool_name": "clock", "arguments": "{}"}
RESULT = {"type": "tool_result", "tool_id": "c1", "content": "noon"}
STALLS = Turn(says=Reply(text="two three"), fault=Stall(after_text="three"))


async def test_a_message_brings_messages_and_fields_of_its_own() -> None:
    with LocalBus() as local:
        local.model_says("two", "one")
        async with local.client() as bus:
            session = bus.session("items")
            await session.configure({"system": "s"})  # each message names its model
            with pytest.raises(RequestInvalid, match="provider"):
                await session.send("hello")
            with pytest.raises(RequestInvalid, match="not both"):
                await session.send("hello", messages=[{"role": "user", "content": "hello"}])
            with pytest.raises(RequestInvalid, match="neither steers nor"):
                await session.send("hello", run=False, when_busy="steer")
            before = [{"role": "user", "content": "time?", "id": "m1"}, {"role": "assistant", "content": [CALL]}]
            assert (await session.send(messages=before, run=False)).fate == Fate(state="delivered")
            sent = [{"role": "tool", "content": [RESULT], "id": "m2"}, {"role": "user", "content": "and?"}]
            await session.send(messages=sent, request={**MODEL, "tools": [TOOL], "system": "t"})
            await told(session, run_over)
            (asked,) = local.requests
            assert (asked["system"][0]["text"], asked["tools"][0]["name"]) == ("t", "clock")
            assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "user"]
            assert [message.id for message in await session.messages()] == ["m1", None, "m2", None, None]


async def test_a_history_is_added_to_and_rewritten() -> None:
    with LocalBus() as local:
        local.model_says("two", "one", STALLS, "four")
        async with local.client() as bus:
            session = bus.session("edited")
            await session.configure(MODEL)
            first = (await session.send("hello")).fate.run
            await told(session, run_over)
            await session.send("more")
            await told(session, said)
            await session.send("noted", run=False)
            assert (await session.send("noted", run=False, when_busy="reject")).fate.reason == "busy"
            assert (await session.rewrite([])).fate.reason == "busy"
            assert [m.content for m in await session.messages()][-2:] == ["more", "noted"]
            shorter = [{"role": "user", "content": "It is noon."}, {"role": "assistant", "content": "Good."}]
            assert (await session.rewrite(shorter, through=first)).fate.state == "delivered"
            await session.interrupt()
            newest = (await told(session, run_over, 2))[-1].cursor.session_seq
            history = texts(await session.messages())
            assert history[:3] == [("user", "It is noon."), ("assistant", "Good."), ("user", "more")]
            assert history[4:] == [("user", "noted")]
            assert (await session.rewrite(shorter, as_of=newest - 1)).fate.reason == "busy"
            assert (await session.rewrite(shorter, as_of=newest + 2)).fate.state == "delivered"
            with pytest.raises(RequestInvalid, match="rewritten behind"):
                await session.rewrite([], through=first)
            assert texts(await session.messages()) == history[:2]
            assert texts(await (await session.fork("fork")).messages()) == history[:2]
            await session.send("so?")
            await told(session, run_over, 3)
            assert [message["role"] for message in local.requests[-1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("model", "goes_on"), [("claude-sonnet-4-5", True), ("two", False)])
async def test_a_message_in_a_hurry_goes_into_the_text_that_is_being_written(model: str, goes_on: bool) -> None:
    with LocalBus() as local:
        whole = "two three " + " ".join(str(n) for n in range(60)) + "."
        slow = Turn(says=Reply(text=whole), delivery=Delivery(pace=30))
        local.model_says(model, slow, *([] if goes_on else [" and the rest."]), "done")
        async with local.client() as bus:
            session = bus.session("hurry")
            await session.configure({"provider": "anthropic", "model": model})
            await session.send("hello")
            await told(session, said)
            await session.send("waits")
            steer = await session.steer("shorter", now=True)
            steps = await told(session, run_over, 2)
            first = next(step.event.run for step in steps if isinstance(step.event, RunEnded))
            fate = Fate(state="delivered", run=first, turn=0 if goes_on else 1)
            assert await session.fate(steer.append) == fate
            words = "".join(s.event.text for s in steps if isinstance(s.event, Chunk) and s.event.run == first)
            assert words == whole if goes_on else words.endswith(" and the rest.")
            asked = local.requests[1]["messages"]
            assert [message["role"] for message in asked] == ["user", "assistant", *([] if goes_on else ["user"])]
            assert "shorter" in str(asked[0 if goes_on else 2])
            history = texts(await session.messages())
            answers = [words] if goes_on else [words.removesuffix(" and the rest."), " and the rest."]
            assert [text for role, text in history if role == "assistant"] == [*answers, "done"]
            assert [text for role, text in history if role == "user"] == ["hello", "shorter", "waits"]
            assert local.requests[2]["messages"][: len(asked) - goes_on] == asked[: len(asked) - goes_on]


async def test_the_oldest_messages_are_summarised_in_a_run_of_its_own() -> None:
    with LocalBus() as local:
        local.model_says("two", "one", "three", "four", "five")
        local.model_says("short", "They counted.")
        async with local.client() as bus:
            session = bus.session("long", tenant="ada")
            bound = HistoryBound(tokens=300, how="summary", provider="openai-chat", model="short")
            await session.configure(MODEL, history=bound)
            for n, text in enumerate(("count " * 400, "on", "and on", "and on")):
                await session.send(text)
                steps = await told(session, run_over, n + 1)
            asked = [request for request in local.requests if request["model"] == "short"]
            assert len(asked) == 1, "one summary serves all later runs"
            assert f"user: {'count ' * 400}\nassistant: one" in asked[0]["messages"][0]["content"]
            requests = [request["messages"] for request in local.requests if request["model"] == "two"]
            assert "They counted." in str(requests[1][0])
            assert "count count" not in str(requests[1:])
            assert [message["role"] for message in requests[3]] == ["user", "assistant"] * 2 + ["user"]
            notes = [str(getattr(step.event, "provider_extra", None)) for step in steps]
            assert sum("are in a summary" in note for note in notes) == 3
            assert len(await session.messages()) == 8, "the history itself is whole"
            runs = [info async for info in bus.runs()]
            assert len([info for info in runs if info.model == "short"]) == 1


@pytest.mark.parametrize(
    ("provider", "field"),
    [("anthropic", "compact_20260112"), ("openai-responses", "compact_threshold"), ("gemini", "")],
)
async def test_a_provider_that_can_do_it_compacts_the_history_itself(provider: str, field: str) -> None:
    with LocalBus() as local:
        local.model_says("two", "one " * 100, "three")
        async with local.client() as bus:
            session = bus.session("long")
            await session.configure(
                {"provider": provider, "model": "two"}, history=HistoryBound(tokens=50, how="provider")
            )
            for n, text in enumerate(("count", "on")):
                await session.send(text)
                steps = await told(session, run_over, n + 1)
            sent = str(local.requests[1])
            assert ("one one" in sent) == bool(field)
            assert field in sent
            assert ("were left out" in str(steps)) == (not field)


@pytest.mark.parametrize("asked", [True, False])
async def test_of_a_history_that_is_too_large_for_any_request_the_oldest_messages_are_left_out(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asked``: the messages are long, else the answers."""
    long = "long " * 2_000
    monkeypatch.setattr(history, "STEP_BYTES", 15_000)  # one run at a time
    with LocalBus() as local:
        local.model_says("two", *["short" if asked else long] * 4)
        async with local.client() as bus:
            session = bus.session("large")
            await session.configure(MODEL)
            for n in range(3):
                await session.send(f"{n} {long if asked else ''}")
                await told(session, run_over, n + 1)
            whole = await session.messages()
            assert len(whole) == 6
            monkeypatch.setattr(history, "MOST_BYTES", 28_000)
            await session.send("last")
            steps = await told(session, run_over, 4)
            assert "oldest runs were left out (runs: 1): at most" in str(steps)
            assert len(local.requests[-1]["messages"]) == 5
            newest = await session.messages()
            assert newest[:-2] == whole[2 if asked else 4 :]  # the last answer is as long as the others


async def test_a_session_keeps_what_its_newest_runs_added() -> None:
    with LocalBus("[retention]\nsession_runs = 3\n") as local:
        local.model_says("two", "one")
        async with local.client() as bus:
            session = bus.session("many")
            await session.configure(MODEL, messages=[{"role": "user", "content": "before"}])
            for n in range(5):
                await session.send(f"message {n}")
                await told(session, run_over, n + 1)
            last = [("user", "message 2"), ("assistant", "one"), ("user", "message 3"), ("assistant", "one")]
            assert re.findall("message .", str(local.requests[4]["messages"])) == [
                "message 2",
                "message 3",
                "message 4",
            ]
            assert texts(await session.messages()) == [*last, ("user", "message 4"), ("assistant", "one")]
            ends = [step.event async for step in session.follow(live=False) if isinstance(step.event, Completed)]
            notes = [str(end.provider_extra) for end in ends]
            assert ["session's oldest runs are gone" in note for note in notes] == [False, False, False, True, True]
            assert "(runs: 2): `retention.session_runs`" in notes[4]
            ref = session_ref("", "many")
            keys = await bus._deployment.keys_of(ref)  # pyright: ignore[reportPrivateUsage]
            client = bus._deployment.server.client  # pyright: ignore[reportPrivateUsage]
            pieces = [name.decode() for name in await client.hkeys(keys.of_session(ref)[3])]
            assert not [name for name in pieces if name.endswith((":0", ":1")) or name == "before"]


async def test_a_steered_run_that_is_tried_again_asks_with_its_steers() -> None:
    slow = Turn(says=Reply(text="two three " + "more " * 200), delivery=Delivery(pace=20))
    with LocalBus() as local:
        local.model_says("two", slow, slow)
        async with local.client() as bus:
            session = bus.session("again")
            await session.configure(MODEL)
            await session.send("hello")
            await told(session, said)
            await session.steer("shorter", now=True)
            await told(session, said, 2)
            run = (await session.interrupt()).fate.run
            await told(session, run_over)
            assert run
            again = await bus.retry(run)
            async for event in again.events():
                if isinstance(event, Chunk):
                    await again.cancel()
            assert len(local.requests) == 3
            assert [message["role"] for message in local.requests[2]["messages"]] == ["user"]
            assert "hello" in str(local.requests[2]["messages"])
            assert "shorter" in str(local.requests[2]["messages"])


@pytest.mark.parametrize("under", [[], ["quiet"]], ids=["plain", "under a policy"])
async def test_events_on_topics_name_their_session_and_those_of_other_runs_have_no_such_field(under: list[str]) -> None:
    with LocalBus('[policies.quiet]\nuse = "tokenbus.policy:StreamProcessor"\n') as local:
        local.model_says("two", "one", "two")
        async with local.client() as bus:
            session = bus.session("rain-in-bonn", tenant="ada")
            await session.configure({**MODEL, "policies": under})
            run = (await session.send("hello")).fate.run
            await told(session, run_over)
            alone = await bus.publish({**MODEL, "policies": under, "messages": [{"role": "user", "content": "hello"}]})
            await bus.result(alone)
            assert run
            for topic in ("visible", "chunks", "blocks", "runs"):
                named = dict[str, set[str | None]]()
                async with bus.subscribe(topic, from_="start") as events:
                    async for event in events:
                        named.setdefault(event.run, set()).add(event.session)
                        if {run, alone.id} <= named.keys():
                            break
                assert named == {run: {"rain-in-bonn"}, alone.id: {None}}, topic
            assert {event.session async for event in bus.follow(run)} == {"rain-in-bonn"}
