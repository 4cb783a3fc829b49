"""Fetcher, normalizer and parser in one process: the same events, and any worker takes over from any other."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, CHAINED, SEPARATE, ended, fleet, log_of, provider_table
from tests.e2e.media.test_images import PICTURES, WITH_TEXT, images_api
from tests.e2e.policies.test_policy_stage import TALK, policy
from tests.e2e.providers.test_corpus import CORPUS, PROVIDERS, recordings
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import (
    CutOff,
    Delivery,
    ErrorEvent,
    MockProvider,
    Random,
    Recording,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
)

WORDS = " ".join(f"word{n}" for n in range(120))
STORY = Script(name="story", turns=(Turn(says=Reply(text=WORDS), delivery=Delivery(pace=40)),))
REPLY = Reply(text="One two three four, five six.")
SCRIPTS = (
    STORY,
    Script(
        name="asks",
        turns=(
            Turn(
                says=Reply(
                    thinking="Hm.",
                    text="Let me look.",
                    tool_calls=(ToolCall(name="weather", arguments={"city": "Oslo"}),),
                ),
                first=(Status(status=503),),
            ),
            Turn(says=Reply(text="It rains.")),
        ),
    ),
    Script(name="fails", turns=(Turn(says=Reply(), fault=Status(status=400)),), repeat_last=True),
    Script(name="breaks", turns=(Turn(says=REPLY, fault=ErrorEvent(after_text="three")),), repeat_last=True),
    Script(name="cut", turns=(Turn(says=REPLY, first=(CutOff(after_text="three"),)),)),
    Script(name="hangs", turns=(Turn(says=REPLY, fault=Stall(after_text="three")),)),
    WITH_TEXT,
    PICTURES,
    TALK,
)
POISON = b"\xc1 poison"
TOML = (
    '[records]\n[retry]\nbase_delay_s = 0.01\n[blobs]\nservice_url = "%s"\n'
    + policy("hide", "Replace", word="swordfish", by="*****")
    + policy("stop", "StopAt", word="*****", by="[ended]")
)
PAINTS: dict[str, Any] = {"provider": "openai-images", "images": {"quality": "low", "count": 2, "previews": 1}}
Requests = dict[str, tuple[str, dict[str, Any]]]
REQUESTS: Requests = {
    **{
        f"tools, a retry and a record, {api}": ("asks", {"provider": api, "tools": [WEATHER], "record": True})
        for api in BASE_PATHS
    },
    "many chunks": ("story", {}),
    "a whole answer": ("story", {"stream": False}),
    "prefill": ("story", {"mode": "prefill", "participant": "Claude"}),
    "a refusal": ("fails", {}),
    "an error in the text": ("breaks", {}),
    "a cut": ("cut", {}),
    "a restart": ("cut", {"on_failure": "restart"}),
    "a continuation": ("cut", {"on_failure": "continue", "provider": "claude"}),
    "images beside text": ("with-text", {"provider": "gemini", "images": {}, "tools": [WEATHER], "max_tool_depth": 1}),
    "previews": ("pictures", PAINTS),
    "a policy that replaces": ("talk", {"policies": ["hide"]}),
    "a policy that ends the run": ("talk", {"policies": ["hide", "stop"]}),
    "cancelled": ("hangs", {}),
    "poisoned": ("hangs", {}),
}
"""Each with the name of its script and what it asks besides."""


def corpus() -> Generator[tuple[Script, str]]:
    """The recorded streams of real providers, if they are here, as scripts with their providers."""
    for number, row in enumerate(recordings() if CORPUS.exists() else ()):
        scripted = Turn(
            says=Recording(stream=str(CORPUS / row["file"])), delivery=Delivery(cuts=Random(seed=1, largest=900))
        )
        script = Script(name=f"recording-{number}", turns=(scripted, Turn(says=Reply(text=""))))
        yield script, PROVIDERS[row["api"]]


@pytest.mark.timeout(300)
async def test_a_pipeline_writes_the_events_that_separate_services_write(
    server: Server, server_url: str, send: Send, keys: Keys, tmp_path: Path
) -> None:
    events: list[dict[str, judge.Log]] = []
    recorded = dict(corpus())
    request = REQUESTS | {
        script.name: (script.name, {"provider": api, "max_tool_depth": 0}) for script, api in recorded.items()
    }
    for name in ("store", *(chain[0] for chain in (SEPARATE, CHAINED))):
        (tmp_path / name).mkdir()
    async with fleet(tmp_path / "store", server_url, keys, "http://127.0.0.1:9", ["blobs"]) as stores:
        for chain in (SEPARATE, CHAINED):
            # Each has a provider of its own, because a provider counts the attempts of a conversation.
            async with MockProvider([*SCRIPTS, *recorded]) as provider:
                toml = TOML % stores.workers[0].url + images_api(provider.url)
                toml += provider_table("claude", "anthropic", provider.url, 'quirks = { models_continuing = [""] }')
                kinds = (*chain, "tools", "policy", "recorder")
                async with fleet(tmp_path / chain[0], server_url, keys, provider.url, kinds, toml):
                    events.append(await _logs(server, keys, send, request))
    for name, log in events[0].items():
        assert log == events[1][name], name
    ends = {name: log[-1]["type"] for name, log in events[0].items()}
    assert (ends["cancelled"], ends["poisoned"], ends["a refusal"]) == ("cancelled", "failed", "failed")
    assert {ends[name] for name in ("many chunks", "prefill", "a restart", "a continuation", "previews")} == {
        "completed"
    }


async def _logs(server: Server, keys: Keys, send: Send, request: Requests) -> dict[str, judge.Log]:
    """Ask for all of it, disturb what is to be disturbed, and return the logs without what depends on time."""
    runs = {name: await send(model, name, **fields) for name, (model, fields) in request.items()}
    for name in ("cancelled", "poisoned"):
        await eventually(lambda run=runs[name]: _heard(server, keys, run, "three"), timeout=60)
    cancel = {"type": "cancel", "run": runs["cancelled"], "reason": "enough"}
    await server.client.xadd(keys.requests, {"__data__": json.dumps(cancel)})
    raw = keys.topic(keys.partition_of(runs["poisoned"]), "raw")
    await server.client.xadd(raw, {runs["poisoned"]: POISON})
    logs: Any = await ended(server.client, keys, list(runs.values()))
    for log in logs.values():
        judge.check(log)
    del logs[runs["poisoned"]][-1]["error"]["where"]  # the poison's id, a time
    published = {name: judge.without_timing(logs[run]) for name, run in runs.items()}
    published["a policy that ends the run"] = _without_amount(published["a policy that ends the run"])
    return {name: log if name in REQUESTS else _numbered(log) for name, log in published.items()}


def _without_amount(log: judge.Log) -> judge.Log:
    """Without what depends on how much the provider had sent when the policy ended the run: chunks may be joined."""
    begun = [event for event in log if event.get("block") != 0 or event["type"] == "block_start"]
    return [{name: value for name, value in event.items() if name != "usage"} for event in begun]


def _numbered(log: judge.Log) -> judge.Log:
    """Number the calls: if a provider gave one no id, its id is made of the run's."""
    text = json.dumps(log)
    for number, call in enumerate(dict.fromkeys(event["tool_id"] for event in log if "tool_id" in event)):
        text = text.replace(call, f"call {number}")
    return json.loads(text)


async def _heard(server: Server, keys: Keys, run: str, word: str) -> bool:
    log: Any = await log_of(server.client, keys, run)
    return word in judge.text(log)


async def test_pipelines_and_separate_services_take_over_from_each_other_in_mid_run(
    server: Server, send: Send, keys: Keys, deployed: Deploy
) -> None:
    async with deployed([STORY], (*CHAINED, "fetcher")) as (_, running):
        runs = [await send("story", on_failure="restart") for _ in range(8)]

        async def streaming() -> bool:
            return all([len(await log_of(server.client, keys, run)) > 10 for run in runs])

        await eventually(streaming, timeout=60)
        await running.start(*SEPARATE)
        running.workers[0].kill()
        await running.start(*CHAINED)
        runs += [await send("story", on_failure="restart") for _ in range(8)]
        logs: Any = await ended(server.client, keys, runs)
    for run in runs:
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
