"""What breaks because of itself is tried a bounded number of times, and set apart; the others continue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as NoReply

from tests.contract.bus.toys import Bench, Outputs, working
from tests.waiting import eventually
from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.server import retry as outage
from tokenbus.bus.server.retry import MAX_TRIES, retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage import commits


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    "error", [ConnectionLost("Connection reset by peer"), ResponseError("upstream failure"), RedisError("no protocol")]
)
async def test_what_breaks_while_the_server_answers_others_is_given_up(server: Server, error: Exception):
    tried = 0

    async def attempt() -> None:
        nonlocal tried
        tried += 1
        raise error

    with pytest.raises(type(error)):
        await retry_until_available(server, attempt, what="the test")
    assert tried == MAX_TRIES


async def test_an_unknown_error_that_passes_is_no_failure(server: Server):
    answers: list[Exception | str] = [ResponseError("upstream failure")] * (MAX_TRIES - 1)
    answers.append("done")

    async def attempt() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await retry_until_available(server, attempt, what="the test") == "done"


async def test_a_command_without_a_reply_is_at_fault_only_if_the_server_answered_others_promptly_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    """A slow server, or a process without a processor, answers after each try, too."""
    monkeypatch.setattr(outage, "PROMPT_S", 0.02)
    answers, tried, slow = server.answers, 0, True

    async def answers_late() -> bool:
        if slow:
            await asyncio.sleep(0.03)
        return await answers()

    async def attempt() -> None:
        nonlocal tried, slow
        tried += 1
        if tried == 3 * MAX_TRIES:
            monkeypatch.setattr(outage, "PROMPT_S", 60.0)
            slow = False
        raise NoReply("Timeout reading")

    monkeypatch.setattr(server, "answers", answers_late)
    with pytest.raises(NoReply):
        await retry_until_available(server, attempt, what="the test")
    assert 3 * MAX_TRIES <= tried <= 4 * MAX_TRIES


async def test_what_breaks_together_with_all_others_is_not_at_fault(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The server is back after each try, but while it went on no command came through."""
    monkeypatch.setattr(outage, "LOOK_S", 0.001)
    answers, tried, away = server.answers, 0, False

    async def answers_unless_away() -> bool:
        return not away and await answers()

    async def attempt() -> str:
        nonlocal tried, away
        tried += 1
        if tried == 3 * MAX_TRIES:
            return "done"
        away = True
        await asyncio.sleep(0.02)
        away = False
        raise ConnectionLost("Connection reset by peer")

    monkeypatch.setattr(server, "answers", answers_unless_away)
    assert await retry_until_available(server, attempt, what="the test") == "done"


async def test_no_command_is_abandoned_during_an_outage_of_the_server():
    tried = 0
    async with Server("redis://127.0.0.1:1") as away:

        async def attempt() -> None:
            nonlocal tried
            tried += 1
            raise ConnectionLost("refused")

        with pytest.raises(ConnectionLost):
            await retry_until_available(away, attempt, what="the test", stop_if=lambda: tried > 3 * MAX_TRIES)


async def test_an_entry_whose_commit_breaks_ends_its_run_and_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """As if a command exceeds a proxy's limit: the connection breaks each time."""
    run_script, run_scripts = commits.run_script, commits.run_scripts

    def check(call: ScriptCall) -> None:
        if any(isinstance(arg, bytes) and b'"says":43' in arg for arg in call.args):
            raise ConnectionLost("Connection reset by peer")

    async def run_script_checked(server: Server, call: ScriptCall) -> object:
        check(call)
        return await run_script(server, call)

    async def run_scripts_checked(server: Server, calls: Sequence[ScriptCall]) -> list[object]:
        for call in calls:
            check(call)
        return await run_scripts(server, calls)

    monkeypatch.setattr(commits, "run_script", run_script_checked)
    monkeypatch.setattr(commits, "run_scripts", run_scripts_checked)
    beside, bad = bench.runs(0, 2)
    [elsewhere] = bench.runs(1, 1)
    await bench.feed(0, {beside: b"+1"}, {bad: b"+1"}, {bad: b"+42"}, {beside: b"+2"}, {beside: b"end"})
    await bench.feed(1, {elsewhere: b"+1"}, {elsewhere: b"end"})
    async with working(bench.stage("a")):
        await eventually(bench.through)
    expected = Outputs.expected([{beside: b"+1"}, {bad: b"+1"}, {bad: b"poison"}, {beside: b"+2"}, {beside: b"end"}])
    found = await Outputs.of(bench.server, bench.keys, 0)
    assert found.logs == expected.logs
    assert (await Outputs.of(bench.server, bench.keys, 1)).logs.keys() == {elsewhere}
    [entry] = await bench.server.client.xrange(bench.keys.dead)
    assert bad.encode() in entry[1][b"__data__"]
