"""Jobs in the background of a provider: started once, read on after any cut, and cancelled with their run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import PIPELINE, WITH_TOOLS, Kind, ended
from tests.e2e.runs.test_cancel import cancel
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import (
    CutOff,
    HangUp,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
    Wire,
)

TEXT = "one two three four five"
JOB: dict[str, Any] = {"provider": "openai-responses", "extra": {"background": True}}
RETRY = "[retry]\nbase_delay_s = 0.05\n"
POLICY = '[policies.watch]\nuse = "tokenbus.policy:RedactSecrets"\n'


def job(name: str, *first: Any, queued: int = 0, says: Any = None) -> Script:
    return Script(name=name, turns=(Turn(says=says or Reply(text=TEXT), first=first, queued=queued),))


def of(log: list[dict[str, Any]]) -> tuple[str, str, set[int]]:
    """How a run ended, what it said, and its attempts."""
    judge.check(log)
    text = "".join(content for kind, content in judge.blocks(log) if kind == "text")
    return log[-1]["type"], text, {event["attempt"] for event in log}


@pytest.mark.parametrize("policies", [[], ["watch"]], ids=["", "judged"])
async def test_a_cut_job_is_read_on_from_the_cut_and_one_that_is_not_streamed_is_polled(
    server: Server, keys: Keys, send: Send, policies: list[str], deployed: Deploy
) -> None:
    scripts = [
        job("cut", CutOff(after_text="two"), CutOff(after_text="four", reset=True)),
        job("inside", CutOff(after_bytes=2_300), CutOff(after_bytes=10)),
        job("troubled", CutOff(after_text="two"), Status(status=503), HangUp()),
        job("polled", None, Status(status=500), queued=2),
        job("unstreamed", CutOff(after_text="two"), Status(status=400)),
    ]
    services: list[Kind] = [*PIPELINE, *(["policy"] if policies else [])]
    async with deployed(scripts, services, RETRY + POLICY) as (provider, _):
        runs = {
            script.name: await send(script.name, stream=script.name != "polled", policies=policies, **JOB)
            for script in scripts
        }
        logs: Any = await ended(server.client, keys, list(runs.values()))
        for name, run in runs.items():
            assert of(logs[run]) == ("completed", TEXT, {1}), name
        assert sorted(job.request.model for job in provider.jobs.started) == sorted(runs)
        assert not any(job.cancelled for job in provider.jobs.started)
        by_model = {job.request.model: job for job in provider.jobs.started}
        assert len(by_model["cut"].resumed) == 2
        assert 0 < by_model["cut"].resumed[0] < by_model["cut"].resumed[1]
        assert by_model["polled"].looks == 3
        assert by_model["unstreamed"].looks == 1


@pytest.mark.parametrize("end", ["stop", "kill"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "polled"])
async def test_a_job_outlives_its_fetcher_in_the_same_attempt(
    server: Server, keys: Keys, send: Send, end: str, stream: bool, deployed: Deploy
) -> None:
    script = job("long", Stall(after_text="two") if stream else None, queued=4)
    async with deployed([script], PIPELINE, RETRY + "[stages]\ndrain_s = 0.0\n") as (provider, running):
        run = await send("long", stream=stream, **JOB)
        await provider.until(lambda: bool(provider.jobs.started and (stream or provider.jobs.started[0].looks)))

        async def reached() -> bool:
            return bool(await server.client.hget(keys.run(run), "job"))

        await eventually(reached)
        if stream:

            async def heard() -> bool:
                return b"two" in b"".join([f[b"__data__"] for _, f in await server.client.xrange(keys.log(run))])

            await eventually(heard)
        fetcher = running.worker_of("fetcher")
        await running.start(*PIPELINE)
        if end == "kill":
            fetcher.kill()
        else:
            await fetcher.stop()
        logs: Any = await ended(server.client, keys, [run])
        assert of(logs[run]) == ("completed", TEXT, {1})
        (started,) = provider.jobs.started
        assert not started.cancelled
        assert len(started.resumed) == (1 if stream else 0)
        assert not stream or started.resumed[0] > 0


async def test_a_cancel_of_the_run_cancels_its_job_at_the_provider(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    scripts = [job("streamed", Stall(after_text="two")), job("polled", queued=1000)]
    async with deployed(scripts, PIPELINE) as (provider, _):
        runs = [await send(script.name, stream=script.name == "streamed", **JOB) for script in scripts]
        late = await send("polled", "later", stream=False, deadline_s=2.0, **JOB)
        await provider.until(lambda: len(provider.jobs.started) == 3)
        for run in runs:
            await eventually(lambda run=run: server.client.hget(keys.run(run), "job"))
            await cancel(server, keys, run)
        logs: Any = await ended(server.client, keys, [*runs, late])
        assert [logs[run][-1]["type"] for run in runs] == ["cancelled", "cancelled"]
        assert (logs[late][-1]["type"], logs[late][-1]["error"]["code"]) == ("failed", "deadline")
        await provider.until(lambda: all(job.cancelled for job in provider.jobs.started))
        assert len(provider.jobs.started) == 3


async def test_a_job_ends_its_turn_as_its_status_says(server: Server, keys: Keys, send: Send, deployed: Deploy) -> None:
    scripts = [job("cancelled", queued=1000), job("length", says=Reply(text="on", finish="length"))]
    async with deployed(scripts, PIPELINE) as (provider, _):
        length = await send("length", stream=False, **JOB)
        run = await send("cancelled", stream=False, **JOB)
        await provider.until(lambda: any(job.looks for job in provider.jobs.started if job.turn.queued))
        next(job for job in provider.jobs.started if job.turn.queued).cancelled = True
        logs: Any = await ended(server.client, keys, [run, length])
        assert logs[run][-1]["error"]["code"] == "cancelled"
        assert logs[length][-1]["type"] == "completed"
        assert len(provider.jobs.started) == 2


async def test_a_later_attempt_of_the_turn_reads_the_same_job_and_a_failed_job_is_followed_by_a_new_one(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    failed = (
        b'data: {"type":"response.queued","sequence_number":0,"response":{"id":"resp_1","status":"queued"}}\n\n'
        b'data: {"type":"response.failed","sequence_number":1,"response":{"id":"resp_1","status":"failed",'
        b'"error":{"code":"server_error","message":"no luck"}}}\n\n'
    )
    scripts = [
        job("gone", CutOff(after_text="two"), HangUp(), HangUp()),
        job("fails", says=Wire(stream=failed)),
        Script(
            name="calls",
            turns=(
                Turn(says=Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),))),
                Turn(says=Reply(text=TEXT), first=(CutOff(after_text="two"),)),
            ),
        ),
    ]
    toml = RETRY + "max_attempts = 2\n"
    async with deployed(scripts, WITH_TOOLS, toml) as (provider, _):
        gone = await send("gone", on_failure="restart", **JOB)
        fails = await send("fails", **JOB)
        calls = await send("calls", tools=[WEATHER], **JOB)
        logs: Any = await ended(server.client, keys, [gone, fails, calls])
        assert of(logs[gone]) == ("completed", TEXT, {1, 2})
        assert of(logs[fails])[0] == "failed"
        assert logs[fails][-1]["error"]["message"] == "no luck"
        assert of(logs[calls])[:2] == ("completed", TEXT)
        models = sorted(job.request.model for job in provider.jobs.started)
        assert models == ["calls", "calls", "fails", "fails", "gone"]
        assert not any(job.cancelled for job in provider.jobs.started)


async def test_a_job_whose_turn_goes_to_another_provider_is_cancelled(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    silent = Script(
        name="silent", turns=(Turn(says=Reply(text=TEXT), first=(CutOff(after_events=1),), fault=Status(status=503)),)
    )
    toml = RETRY + "max_attempts = 2\n"
    async with deployed([silent, job("other")], PIPELINE, toml) as (provider, _):
        run = await send("silent", fallback=[{"provider": "anthropic", "model": "other"}], **JOB)
        logs: Any = await ended(server.client, keys, [run])
        assert of(logs[run])[:2] == ("completed", TEXT)
        await provider.until(lambda: [job.cancelled for job in provider.jobs.started] == [True])


async def test_an_interaction_that_is_cut_is_looked_at_to_its_end_and_one_of_a_cancelled_run_is_cancelled(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    call = ToolCall(name="weather", arguments={"city": "Oslo"})
    scripts = [
        job("cut", CutOff(after_text="two"), Status(status=503), queued=1),
        job("polled", None, Status(status=500), queued=2),
        Script(
            name="calls",
            turns=(
                Turn(says=Reply(thinking="Hm.", tool_calls=(call,)), first=(CutOff(after_text="arguments_delta"),)),
                Turn(says=Reply(text=TEXT)),
            ),
        ),
        job("stalls", Stall(after_text="two")),
    ]
    how: dict[str, Any] = {**JOB, "provider": "gemini-interactions"}
    async with deployed(scripts, WITH_TOOLS, RETRY) as (provider, _):
        runs = {
            script.name: await send(script.name, stream=script.name != "polled", tools=[WEATHER], **how)
            for script in scripts
        }
        await eventually(lambda: server.client.hget(keys.run(runs["stalls"]), "job"))
        await cancel(server, keys, runs["stalls"])
        logs: Any = await ended(server.client, keys, list(runs.values()))
        for name in ("cut", "polled", "calls"):
            assert of(logs[runs[name]]) == ("completed", TEXT, {1} if name != "calls" else {1, 2}), name
        assert logs[runs["stalls"]][-1]["type"] == "cancelled"
        await provider.until(lambda: any(job.cancelled for job in provider.jobs.started))
        jobs = {(job.request.model, job.request.turn): job for job in provider.jobs.started}
        assert sorted(jobs) == [("calls", 0), ("calls", 1), ("cut", 0), ("polled", 0), ("stalls", 0)]
        assert len(jobs) == len(provider.jobs.started), "each was started once"
        assert {name for (name, _), job in jobs.items() if job.cancelled} == {"stalls"}
        assert (jobs["cut", 0].looks, jobs["polled", 0].looks) == (2, 3)
        assert not any(job.resumed for job in jobs.values())
