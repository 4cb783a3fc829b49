"""`tokenbus chat` on real terminals, beside the running services."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.fleet import PIPELINE, SEPARATE, Fleet
from tests.e2e.sessions.test_sessions import running, sent
from tests.services.cli.process import fed
from tests.terminal import CTRL_C, TAB, UP, terminal
from tests.waiting import eventually
from tokenbus import HistoryBound
from tokenbus.bus.keys import Keys
from tokenbus.testing import LocalBus
from tokenbus_services.mock_provider import Delivery, Reply, Turn

TALK = ("--provider", "openai-chat", "--model", "talk")
ANSWERING, READY = "answering, Ctrl-C interrupts", "· /help"


def settings(tmp_path: Path) -> dict[str, str]:
    return {"TOKENBUS_CONFIG": str(tmp_path / "tokenbus.toml")}


async def test_two_terminals_show_one_conversation_and_one_that_dies_goes_on_with_what_still_streams(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    env = settings(tmp_path)
    async with (
        running(server_url, keys, tmp_path) as (provider, workers, _),
        terminal("chat", "talk", *TALK, "--as", "ada", **env) as first,
    ):
        await first.shows("talk · openai-chat/talk", READY)
        first.type("hello\r")
        await first.shows("ada > hello\n", "talk > one two three\n", ANSWERING)
        first.type("and then?\r")
        waits = "ada > and then? (goes in at the next turn, or follows)"
        await first.shows(waits)
        async with terminal("chat", "talk", "--as", "bob", **env) as second:
            await second.shows("ada > hello\n", "talk > one two three\n", waits)
            first.process.kill()
            if PIPELINE == SEPARATE:  # the death of a pipeline worker ends the provider's call, too
                await replaced(workers)
            async with terminal("chat", "talk", "--as", "ada", **env) as again:
                await again.shows("ada > hello\n", "talk > one two three\n", waits, ANSWERING)
                again.type(UP)
                await again.shows("> hello\ntalk ·")
                again.type(CTRL_C + CTRL_C)  # interrupts; clears the line
                said = (
                    "ada > hello\n",
                    "talk > one two three\n",
                    "  interrupted\n",
                    "ada > and then?\n",
                    "talk > answer 1\n",
                )
                await again.shows(*said, READY)
                second.type("tell us\r")
                said = (*said, "bob > tell us\n", "talk > answer 2\n")
                one, two = await again.shows(*said, READY), await second.shows(*said, READY)
                assert told(one) == told(two)
                assert one.count("one two three") == 1
                again.type(CTRL_C)
                await again.shows("the session stays: tokenbus chat talk")
                assert await again.process.wait() == 0
        assert [(role, text.strip()) for role, text in sent(provider, 2)] == [
            ("user", "hello"),
            ("assistant", "one two three"),
            ("user", "and then?"),
            ("assistant", "answer 1"),
            ("user", "tell us"),
        ]


async def replaced(workers: Fleet) -> None:
    """kill -9 the parser, and start another."""
    parser = workers.worker_of("parser")
    parser.kill()
    await parser.process.wait()
    await workers.start("parser")


def told(screen: str) -> list[str]:
    """The rows of the conversation, without the line to type on."""
    return [row for row in screen.splitlines() if not row.startswith((">", "talk ·"))]


async def test_the_model_changes_in_the_middle_and_a_fork_has_the_history(
    server_url: str, keys: Keys, tmp_path: Path
) -> None:
    env = settings(tmp_path)
    async with (
        running(server_url, keys, tmp_path) as (provider, _, bus),
        terminal("chat", "talk", *TALK, "--as", "ada", **env) as first,
    ):
        await first.shows(READY)
        first.type("hello\r")
        await first.shows("one two three", ANSWERING)
        first.type("/now shorter\r")
        await first.shows("talk > one two three\n", "ada > shorter\n", "talk > answer 1\n", READY)
        session, bound = bus.session("talk"), HistoryBound(tokens=9000, how="summary")
        config = await session.configuration()
        await session.configure(config.request, when_busy="steer", history=bound)
        first.type("/sessions\r")
        await first.shows("  talk  ", READY)
        first.type(f"/mod{TAB}anth{TAB}/talk\r")
        await first.shows("  from now on anthropic/talk\n")
        first.type("more\r/model nobody\r")
        await first.shows("ada > more\n", "talk > answer 2\n")
        await first.shows("nobody: not\n")
        assert provider.requests[2].http_request.path.endswith("/v1/messages")
        assert (await session.configuration()).history == bound
        first.type("/fork other\r")
        await first.shows("a fork: other, anthropic/talk\n", "other · anthropic/talk · /help")
        first.type("/sessions hello\r")
        await first.shows("  talk  ", "ago, anthropic/talk: hello\n")
        first.type("on\r")
        await first.shows("ada > on\n", "talk > answer 3\n")
        async with terminal("chat", "other", **env) as second:
            said = (
                "ada > hello\n",
                "one two three\n",
                "> shorter\n",
                "answer 1\n",
                "> more\n",
                "answer 2\n",
                "answer 3\n",
            )
            await second.shows(*said)


async def test_lines_of_a_pipe_are_answered_one_after_the_other(server_url: str, keys: Keys, tmp_path: Path) -> None:
    env = settings(tmp_path)
    async with running(server_url, keys, tmp_path) as (provider, _, bus):
        lines = b"hello\n\n/model anthropic\nmore\n//odd\n"
        talking = asyncio.create_task(fed(lines, "chat", "p", *TALK, "--as", "ada", **env))
        await eventually(lambda: len(provider.requests) == 1)
        provider.resume(provider.requests[0])
        ended = await talking
        assert ended.out == "one two three four\nanswer 1\nanswer 2\n"
        assert (ended.code, ended.err) == (0, "from now on anthropic/talk\n")
        said = [message.content for message in await bus.session("p").messages() if message.role == "user"]
        assert said == ["hello", "more", "/odd"]
        unknown = await fed(b"hello\n", "chat", "q", "--provider", "nobody", "--model", "m", **env)
        assert (unknown.code, "nobody: not configured" in unknown.error) == (2, True)
        missing = await fed(b"hello\n", "chat", "q", **env)
        assert (missing.code, "--provider" in missing.error) == (2, True)


async def test_what_is_typed_while_rows_stream_leaves_nothing_between_them() -> None:
    story = Turn(says=Reply(text="\n\n".join(f"row {n}" for n in range(300))), delivery=Delivery(pace=200))
    with LocalBus() as bus:
        bus.model_says("tells", story)
        talk = ("--provider", "openai-chat", "--model", "tells", "--as", "ada")
        async with terminal("chat", "talk", *talk, **bus.environment) as one:
            await one.shows(READY)
            one.type("hello\r")
            await one.shows("tells > row 0\n")
            while "row 299\n" not in one.text:
                one.type("xyz")
                one.type("\x7f" * 3)
                await eventually(lambda before=one.text: one.text != before)
            text = await one.shows("row 299\n", READY)
    assert told(text) == ["ada > hello", "tells > row 0", *(f"row {n}" for n in range(1, 300))]
