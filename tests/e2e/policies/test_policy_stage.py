"""The policy stage in running services: withheld output is not published, and blocked calls do not run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.contract.bus.state import everything, put_back
from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import CHAINED, PIPELINE, SEPARATE, Kind, ended, fleet, log_of
from tests.servers import cluster
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import Delivery, MockProvider, Recording, Reply, Script, ToolCall, Turn

POLICY: tuple[Kind, ...] = ("policy",)
TALK = Script(
    name="talk",
    turns=(Turn(says=Reply(text="The password is swordfish, remember it well")),),
)
SHORT = Script(name="short", turns=(Turn(says=Reply(text="That is all.")),))
LONG = Script(
    name="long",
    turns=(Turn(says=Reply(text=" ".join(f"word{i}" for i in range(60))), delivery=Delivery(pace=40)),),
)
CALLS = Script(
    name="calls",
    turns=(
        Turn(
            says=Reply(
                text="Let me look.",
                tool_calls=(
                    ToolCall(name="touch", arguments={"name": "secret"}),
                    ToolCall(name="weather", arguments={"city": "Rome"}),
                ),
            )
        ),
        Turn(says=Reply(text="It is done.")),
    ),
)
TOUCH = """
import os, pathlib

def touch(name: str) -> str:
    (pathlib.Path(os.environ["MARKS"]) / name).touch()
    return "touched"
"""
TOUCH_TOOL = {"name": "touch", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}


def policy(name: str, use: str, more: str = "", **options: str) -> str:
    """A table of the settings."""
    given = "".join(f'{key} = "{value}"\n' for key, value in options.items())
    return f'\n[policies.{name}]\nuse = "tests.e2e.policies.guards:{use}"\n{more}\n[policies.{name}.options]\n{given}'


async def decisions_of(server: Server, keys: Keys, run: str) -> list[dict[str, Any]]:
    entries = await server.client.xrange(keys.topic(keys.partition_of(run), "decisions"))
    decisions = [msgspec.json.decode(fields[b"__data__"]) for _, fields in entries]
    return [each for each in decisions if each["run"] == run]


async def test_no_output_of_a_run_is_published_before_its_policy_releases_it(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    async with deployed([TALK], (), policy("whole", "WholeRun")) as (_, services):
        await services.start(*PIPELINE, *POLICY, env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["whole"])
        await eventually((tmp_path / f"judging-{run}").exists)
        assert [e["type"] for e in await log_of(server.client, keys, run)] == ["started"]
        (tmp_path / "go").touch()
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert judge.text(log) == "The password is swordfish, remember it well"
    assert (log[-1]["type"], log[-1]["finish"]) == ("completed", "stop")


async def test_a_blocked_tool_never_runs_and_a_parallel_call_does(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    (tmp_path / "touch_tool.py").write_text(TOUCH)
    toml = '[tools.touch]\nkind = "python"\ncall = "touch_tool:touch"\n' + policy("no_touch", "NoTool", word="touch")
    toml += '\n[[policy_routes]]\npolicies = ["no_touch"]\nmodels = ["call*"]\n'
    async with deployed([CALLS], (), toml) as (provider, services):
        await services.start("tools", env={"PYTHONPATH": path_with(tmp_path), "MARKS": str(tmp_path)})
        await services.start(*PIPELINE, *POLICY, env={"MARKS": str(tmp_path)})
        run = await send("calls", tools=[TOUCH_TOOL, WEATHER])
        log: Any = (await ended(server.client, keys, [run]))[run]
        requests = await provider.requested(2)
        decisions_published = await decisions_of(server, keys, run)
    judge.check(log)
    kinds = [(e["kind"], e.get("tool_name")) for e in log if e["type"] == "block_complete"]
    assert kinds == [("text", None), ("tool_call", "weather"), ("tool_result", "weather"), ("text", None)]
    assert not (tmp_path / "secret").exists()
    assert b"not this one" in requests.http_request.body
    assert [(d["policy"], d["action"], d["tool_name"], d["turn"]) for d in decisions_published] == [
        ("no_touch", "block", "touch", 0)
    ]
    assert "secret" in decisions_published[0]["original"]


async def test_a_call_with_a_number_beyond_64_bits_runs_and_holds_up_nothing(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    huge = 10**30
    large = Script(
        name="large",
        turns=(
            Turn(says=Reply(tool_calls=(ToolCall(name="double", arguments={"n": huge}),))),
            Turn(says=Reply(text="It is done.")),
        ),
    )
    (tmp_path / "double_tool.py").write_text("def double(n: int) -> str:\n    return str(2 * n)\n")
    toml = '[tools.double]\nkind = "python"\ncall = "double_tool:double"\n'
    toml += policy("hide", "Replace", word="x", by="y")
    tool = {"name": "double", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    async with deployed([large], (), toml) as (_, services):
        await services.start("tools", env={"PYTHONPATH": path_with(tmp_path)})
        await services.start(*PIPELINE, *POLICY)
        run = await send("large", tools=[tool], policies=["hide"])
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    call, result, _ = (e for e in log if e["type"] == "block_complete")
    assert (call["arguments"], call.get("input")) == (f'{{"n":{huge}}}', {"n": huge})
    assert result["content"] == str(2 * huge)
    assert log[-1]["type"] == "completed"


async def test_policies_in_a_chain_replace_across_pieces_and_end_a_run(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = policy("hide", "Replace", word="swordfish", by="*****")
    toml += policy("stop", "StopAt", word="*****", by="[ended]")
    async with deployed([TALK], (*PIPELINE, *POLICY), toml):
        hidden = await send("talk", policies=["hide"])
        stopped = await send("talk", policies=["hide", "stop"])
        logs: Any = await ended(server.client, keys, [hidden, stopped])
    for log in logs.values():
        judge.check(log)
    assert judge.text(logs[hidden]) == "The password is *****, remember it well"
    assert logs[hidden][-1]["finish"] == "stop"
    assert "swordfish" not in judge.text(logs[stopped])
    assert judge.text(logs[stopped]).endswith("[ended]")
    end = logs[stopped][-1]
    assert (end["type"], end["finish"], end["error"]["code"]) == ("incomplete", "content_filter", "policy_terminated")


async def test_a_policy_that_fails_blocks_the_run_or_lets_it_pass_as_its_settings_say(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = policy("strict", "Broken") + policy("loose", "Broken", 'on_error = "pass"')
    async with deployed([TALK], (*PIPELINE, *POLICY), toml):
        strict = await send("talk", policies=["strict"])
        loose = await send("talk", policies=["loose"])
        logs: Any = await ended(server.client, keys, [strict, loose])
        decisions_published = await decisions_of(server, keys, strict)
    for log in logs.values():
        judge.check(log)
    assert judge.text(logs[strict]) == ""
    assert logs[strict][-1]["type"] == "incomplete"
    assert judge.text(logs[loose]) == "The password is swordfish, remember it well"
    assert [(d["action"], "broken on purpose" in d["reason"]) for d in decisions_published] == [("error", True)]


async def test_without_a_policy_worker_a_run_ends_when_its_patience_does(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = "[limits]\npolicy_slack_s = 0.5\n" + policy("strict", "Broken", "timeout_s = 0.2")
    toml += policy("loose", "Broken", 'timeout_s = 0.2\non_error = "pass"')
    async with deployed([TALK], PIPELINE, toml):
        strict = await send("talk", policies=["strict"])
        loose = await send("talk", policies=["loose"])
        logs: Any = await ended(server.client, keys, [strict, loose])
    for log in logs.values():
        judge.check(log)
    assert (logs[strict][-1]["error"]["code"], judge.text(logs[strict])) == ("policy_silent", "")
    assert judge.text(logs[loose]) == "The password is swordfish, remember it well"


async def test_a_policy_worker_killed_in_mid_run_is_replaced_and_no_text_is_published_twice(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([LONG], PIPELINE, policy("hide", "Replace", word="word1", by="W")) as (_, services):
        (first,) = await services.start(*POLICY)
        runs = [await send("long", policies=["hide"]) for _ in range(3)]

        async def all_heard() -> bool:
            return all([len(await log_of(server.client, keys, run)) > 8 for run in runs])

        await eventually(all_heard)
        first.kill()
        await services.start(*POLICY)
        logs: Any = await ended(server.client, keys, runs)
    for log in logs.values():
        judge.check(log)
        assert judge.text(log) == " ".join(f"word{i}" for i in range(60)).replace("word1", "W")
        assert log[-1]["type"] == "completed"


async def test_output_deferred_by_a_dead_worker_is_judged_again_and_published_once(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    env = {"MARKS": str(tmp_path)}
    async with deployed([TALK], PIPELINE, policy("slow", "Slow")) as (_, services):
        (first,) = await services.start(*POLICY, env=env)
        run = await send("talk", policies=["slow"])
        await eventually((tmp_path / "calls").exists)
        first.kill()
        (tmp_path / "go").touch()
        await services.start(*POLICY, env=env)
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert judge.text(log) == "The password is swordfish, remember it well"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) > len(set(calls))


@pytest.mark.timeout(120)
async def test_policies_hold_on_every_node_of_a_cluster_though_their_worker_dies(keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "touch_tool.py").write_text(TOUCH)
    toml = '[tools.touch]\nkind = "python"\ncall = "touch_tool:touch"\n' + policy("no_touch", "NoTool", word="touch")
    toml += policy("hide", "Replace", word="word1", by="W")
    env = {"MARKS": str(tmp_path)}
    runs = {f"run{n}": ("long", "hide") if n % 2 else ("calls", "no_touch") for n in range(8)}
    assert {keys.partition_of(run) for run in runs} == set(range(keys.partitions))
    with cluster() as url:
        async with (
            MockProvider([LONG, CALLS]) as provider,
            fleet(tmp_path, url, keys, provider.url, (), toml) as services,
            Server(url) as server,
        ):
            await services.start("tools", env={**env, "PYTHONPATH": path_with(tmp_path)})
            *_, first = await services.start(*PIPELINE, *POLICY, env=env)
            for run, (model, name) in runs.items():
                request = {
                    "type": "generate",
                    "id": run,
                    "provider": "openai-chat",
                    "model": model,
                    "messages": [{"role": "user", "content": "go on"}],
                    "tools": [TOUCH_TOOL, WEATHER] if model == "calls" else [],
                    "policies": [name],
                }
                await server.client.xadd(keys.requests, {"__data__": msgspec.json.encode(request)})

            async def all_heard() -> bool:
                return all([len(await log_of(server.client, keys, run)) > 5 for run in runs])

            await eventually(all_heard, timeout=30)
            first.kill()
            await services.start(*POLICY, env=env)
            logs: Any = await ended(server.client, keys, [*runs])
            decisions_published = {run: await decisions_of(server, keys, run) for run in runs}
    for run, (model, _) in runs.items():
        judge.check(logs[run])
        assert logs[run][-1]["type"] == "completed"
        if model == "long":
            assert judge.text(logs[run]) == " ".join(f"word{i}" for i in range(60)).replace("word1", "W")
        else:
            names = [e["tool_name"] for e in logs[run] if e["type"] == "block_complete" and e["kind"] == "tool_call"]
            assert names == ["weather"]
            assert [(d["action"], d["tool_name"]) for d in decisions_published[run]] == [("block", "touch")]
    assert not (tmp_path / "secret").exists()


async def test_a_cancel_ends_a_run_whose_judge_never_answers(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    async with deployed([TALK], (), policy("whole", "WholeRun")) as (_, services):
        await services.start(*PIPELINE, *POLICY, env={"MARKS": str(tmp_path)})
        run = await send("talk", policies=["whole"])
        await eventually((tmp_path / f"judging-{run}").exists)
        await server.client.xadd(keys.requests, {"__data__": msgspec.json.encode({"type": "cancel", "run": run})})
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert [e["type"] for e in log] == ["started", "cancelled"]


async def test_a_policy_that_every_run_meets_may_ask_the_bus_and_does_not_judge_its_own_question(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    toml = policy("asks", "AsksTheBus", "timeout_s = 60") + '\n[[policy_routes]]\npolicies = ["asks"]\n'
    async with deployed([TALK, SHORT], (*PIPELINE, *POLICY), toml) as (provider, _):
        asked_about = await send("talk")
        logs: Any = await ended(server.client, keys, [asked_about])
        assert len(provider.requests) == 2
        # A run that only says of itself that it is a question is judged like any other.
        pretends = await send("talk", metadata={"judges": asked_about})
        logs |= await ended(server.client, keys, [pretends])
        assert len(provider.requests) == 4
        spoken = [
            msgspec.json.decode(fields[b"__data__"])["run"]
            for p in range(keys.partitions)
            for _, fields in await server.client.xrange(keys.topic(p, "visible"))
        ]
    assert set(spoken) == {asked_about, pretends}, "the questions of policies are not published"
    for log in logs.values():
        judge.check(log)
        assert judge.text(log) == "[That is all.] The password is swordfish, remember it well"
        assert log[-1]["type"] == "completed"


async def test_a_run_whose_policies_wait_for_those_of_others_is_patient(
    server: Server, keys: Keys, send: Send, tmp_path: Path, deployed: Deploy
) -> None:
    toml = "[limits]\npolicy_calls_per_worker = 2\npolicy_slack_s = 0.5\n" + policy(
        "whole", "WholeRun", "timeout_s = 90"
    )
    toml += policy("hide", "Replace", "timeout_s = 0.2", word="swordfish", by="*****")
    patience_s, clock = 0.5 + 0.2, asyncio.get_running_loop().time
    async with deployed([TALK], PIPELINE, toml) as (provider, services):
        await services.start(*POLICY, env={"MARKS": str(tmp_path)})
        slow = [await send("talk", policies=["whole"]) for _ in range(2)]
        await eventually(lambda: len(list(tmp_path.glob("judging*"))) == 2)
        quick = await send("talk", policies=["hide"])
        await provider.requested(3)
        until = clock() + 4 * patience_s
        await eventually(lambda: clock() > until)
        assert [e["type"] for e in await log_of(server.client, keys, quick)] == ["started"]
        (tmp_path / "go").touch()
        logs: Any = await ended(server.client, keys, [*slow, quick])
    for log in logs.values():
        judge.check(log)
        assert log[-1]["type"] == "completed"
    assert judge.text(logs[quick]) == "The password is *****, remember it well"


async def test_a_request_that_names_a_policy_which_is_not_there_is_refused(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([TALK], PIPELINE):
        run = await send("talk", policies=["nobody"])
        log: Any = (await ended(server.client, keys, [run]))[run]
    assert (log[-1]["type"], log[-1]["error"]["where"]) == ("failed", "policies[0]")


def path_with(folder: Path) -> str:
    """PYTHONPATH of this process, and this folder."""
    import os

    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


async def test_the_policy_worker_forgets_a_run_whose_end_a_fail_over_lost(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    async with deployed([LONG], (*PIPELINE, *POLICY), policy("good", "Replace", word="word1", by="W")):
        run = await send("long", policies=["good"])

        async def received(events: int) -> bool:
            return len(await log_of(server.client, keys, run)) > events

        async def forgotten() -> bool:
            """No stage and no queue has the run."""
            pending: Any = await server.client.xpending(keys.topic(keys.partition_of(run), "turns"), "fetcher")
            fields = await server.client.hmget(
                keys.lease(keys.partition_of(run), "policy"), ["open", "arrived", "done"]
            )
            return fields[0] == b"0" and fields[1] == fields[2] and not pending["pending"]

        await eventually(lambda: received(8))
        past = await everything(server, keys)
        before = (await ended(server.client, keys, [run]))[run]
        assert before[-1]["type"] == "completed"
        decisions_published = await decisions_of(server, keys, run)
        await eventually(forgotten)
        await put_back(server, keys, past)
        assert (await ended(server.client, keys, [run]))[run] == before
        await eventually(forgotten)
        assert await decisions_of(server, keys, run) == decisions_published


SEARCH: tuple[dict[str, Any], ...] = (
    {"type": "message_start", "message": {"id": "m", "model": "m", "content": []}},
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    },
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"query":'}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '"swordfish"}'}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "content_block_start",
        "index": 1,
        "content_block": {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"title": "swordfish"}]},
    },
    {"type": "content_block_stop", "index": 1},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "A fish."}},
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
)
"""An answer with a search that the provider runs."""


@pytest.mark.parametrize("chained", [True, False])
async def test_what_the_provider_runs_is_heard_in_order_and_policies_see_it(
    server: Server, keys: Keys, send: Send, tmp_path: Path, chained: bool, deployed: Deploy
) -> None:
    framed = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in SEARCH)
    (tmp_path / "search.sse").write_bytes(framed)
    search = Script(name="search", turns=(Turn(says=Recording(stream=str(tmp_path / "search.sse"))),))
    toml = '\n[policies.hide]\nuse = "tokenbus.policy:RedactSecrets"\n[policies.hide.options]\n'
    toml += 'more = [{find = "swordfish", replace = "***"}]\n'
    toml += '\n[policies.deny]\nuse = "tokenbus.policy:ToolRules"\n[policies.deny.options]\ndeny = ["web_search*"]\n'
    kinds = CHAINED if chained else SEPARATE
    async with deployed([search], (), toml) as (_, services):
        await services.start(*kinds, *POLICY)
        chosen: dict[str, list[str]] = {"plain": [], "hidden": ["hide"], "denied": ["deny"]}
        for run, policies in chosen.items():
            await send("search", id=run, provider="anthropic", max_tool_depth=0, policies=policies)
        logs: Any = await ended(server.client, keys, [*chosen])
        decisions = await decisions_of(server, keys, "denied")
    for log in logs.values():
        judge.check(log)
    begun = [(e["kind"], e.get("item"), e.get("tool_name")) for e in logs["plain"] if e["type"] == "block_start"]
    assert begun == [
        ("server_tool", "anthropic.server_tool_use", "web_search"),
        ("server_tool", "anthropic.web_search_tool_result", "web_search"),
        ("text", None, None),
    ]
    call, found, text = ({**e} for e in logs["plain"] if e["type"] == "block_complete")
    assert msgspec.json.decode(call["content"])["input"] == {"query": "swordfish"}
    assert msgspec.json.decode(found["content"])["content"] == [{"title": "swordfish"}]
    assert text["content"] == "A fish."
    assert not any(e["visible"] for e in logs["plain"] if e["type"] == "chunk" and e["kind"] == "server_tool")
    assert b"swordfish" not in msgspec.json.encode(logs["hidden"])
    hidden = [e["content"].replace("***", "swordfish") for e in logs["hidden"] if e["type"] == "block_complete"]
    assert hidden == [call["content"], found["content"], text["content"]]
    assert [e["content"] for e in logs["denied"] if e["type"] == "block_complete"] == ["A fish."]
    assert [(d["action"], d["tool_name"]) for d in decisions] == [("block", "web_search")] * 2
