"""`tokenbus.testing.LocalBus`: what a user's test relies on beside what docs/guides/testing.md shows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import traceback
import warnings
from contextlib import closing
from typing import Any

import pytest
from redis import Redis

from tests.waiting import eventually
from tokenbus import Chunk
from tokenbus.errors import RunCancelled, RunFailed, RunNotFound, SettingsError
from tokenbus.testing import LocalBus, ModelRequest, NoSuchModel, Reply, Stall, ToolCall, Turn
from tokenbus_services.process.embedded_server import free_port


async def test_a_cancel_closes_the_providers_socket_and_a_stalled_answer_resumes() -> None:
    with LocalBus() as local:
        local.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        async with local.client() as bus:
            cancelled = await bus.publish(local.request("slow"))
            await eventually(lambda: [e.state for e in local.exchanges] == ["stalled"])
            await bus.cancel(cancelled)
            with pytest.raises(RunCancelled):
                await cancelled.result()
            await eventually(lambda: local.exchanges[0].state == "disconnected")
            resumed = await bus.publish(local.request("slow"))
            await eventually(lambda: len(local.exchanges) == 2 and local.exchanges[1].state == "stalled")
            local.resume(local.exchanges[1])
            assert (await resumed.result()).text == "one two three"


def test_every_provider_answers_from_the_same_script() -> None:
    with LocalBus() as local, local.sync_client() as bus:
        local.model_says("greeter", "Hello.")
        for provider in ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions"):
            assert bus.publish(local.request("greeter", provider=provider)).result().text == "Hello.", provider


def test_a_tool_knows_the_tenant_and_the_metadata_of_the_run() -> None:
    settings = '[tools.whoami]\nkind = "python"\ncall = "tests.services.tools.sample_tools:whoami"\n'
    with LocalBus(settings) as local, local.sync_client() as bus:
        local.model_says("curious", Reply(tool_calls=(ToolCall(name="whoami", arguments={}),)), "I see.")
        metadata = {"tenant": "acme", "user": 7}
        request = local.request("curious", tools=[{"name": "whoami"}], metadata=metadata)
        response = bus.publish(request).result()
        assert response.text.endswith("I see.")
        assert str(local.requests[1]).count("'tool_result'") == 1
        assert '{"tenant":"acme","metadata":{"tenant":"acme","user":7}}' in json.dumps(local.requests[1]).replace(
            '\\"', '"'
        )


def test_a_model_without_a_script_fails_its_run_and_the_test() -> None:
    def ask() -> None:
        with LocalBus() as local, local.sync_client() as bus:
            with pytest.raises(RunFailed) as caught:
                bus.publish(local.request("nobody")).result()
            assert caught.value.error.kind == "not_found"
            assert "model_says('nobody'" in caught.value.error.message

    with pytest.raises(NoSuchModel, match="model_says"):
        ask()


def test_a_function_answers_each_request_and_its_error_fails_the_call_and_the_test() -> None:
    def echo(request: ModelRequest) -> str:
        return f"{request.user_text}, at turn {request.turn}"

    def broken(request: ModelRequest) -> Reply:
        raise KeyError("no such fixture")

    def ask() -> None:
        with LocalBus() as local, local.sync_client() as bus:
            local.model_says("echo", echo)
            assert bus.publish(local.request("echo", "Hi")).result().text == "Hi, at turn 0"
            with pytest.raises(ValueError, match="single function"):
                local.model_says("echo", echo, "Hi")
            local.model_says("broken", broken)
            with pytest.raises(RunFailed, match="no such fixture"):
                bus.publish(local.request("broken")).result()

    with pytest.raises(KeyError, match="no such fixture"):
        ask()


def test_a_reset_ends_open_runs_and_leaves_nothing_of_the_test_before() -> None:
    with LocalBus("[gateway]\n") as local:
        for number in range(3):
            local.model_says("greeter", f"Hello {number}.")
            local.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
            with local.sync_client() as bus:
                stalled = bus.publish(local.request("slow", id="stalled"))
                next(stalled.events())
                assert bus.publish(local.request("greeter", id="the-same")).result().text == f"Hello {number}."
                assert [info.run for info in bus.runs(state="completed")] == ["the-same"]
                with bus.subscribe("visible", kinds=Chunk, group="speech", from_="start") as chunks:
                    assert "".join(next(chunks).text for _ in range(2)).startswith(("one", "Hello"))
                local.reset()
                with bus.subscribe("visible", kinds=Chunk) as chunks:
                    local.model_says("greeter", "Again.")
                    bus.publish(local.request("greeter"))
                    assert next(chunks).text == "Again."
                local.reset()
                assert list(bus.runs()) == []
                assert local.exchanges == []
                with pytest.raises(RunNotFound):
                    bus.result("the-same", wait_s=0.01)


def test_a_bus_that_stops_with_an_open_run_waits_for_nobody() -> None:
    local = LocalBus()
    local.start()
    local.model_says("slow", Turn(says=Reply(text="one two"), fault=Stall(after_text="one")))
    with local.sync_client() as bus:
        next(bus.publish(local.request("slow")).events())
        local.stop()
    assert [exchange.state for exchange in local.exchanges] == ["disconnected"]


def test_wrong_settings_are_an_error_of_a_few_lines_at_the_start_and_nothing_is_left() -> None:
    before = threading.active_count()
    wrong = {
        "[limits]\nlag_bytes = -1\n": "limits",
        '[policies.p]\nuse = "tokenbus.policy:ReplaceText"\noptions.replcae = 1\n': "Known options: kinds, rules",
        "[http]\ngatway = 1\n": "did you mean 'gateway'",
        "[http\n": "syntax",
    }
    for settings, problem in wrong.items():
        with pytest.raises(SettingsError, match=problem) as caught:
            LocalBus(settings).start()
        assert len(traceback.format_exception(caught.value)) <= 5, "where it was found in the services is noise"
    assert threading.active_count() == before


def test_all_settings_apply_or_are_named() -> None:
    port = free_port()
    settings = f"""
    log_level = "debug"
    prefix = "mine"
    partitions = 2
    [http]
    gateway = {port}
    parser = 1
    [gateway]
    [limits]
    policy_executors = 3
    [providers.anthropic]
    base_url = "https://example.com"
    model_aliases = {{ usual = "greeter" }}
    """
    ours = "http.parser, limits.policy_executors, log_level, providers.anthropic.base_url"
    caught: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        local = LocalBus(settings)
        local.start()
        caught += [str(one.message) for one in found if issubclass(one.category, UserWarning)]
    try:
        assert caught == [f"LocalBus does not use these settings: {ours}"]
        assert local.gateway == f"http://127.0.0.1:{port}"
        local.model_says("greeter", "Hello.")
        with local.sync_client() as bus:
            run = bus.publish(local.request("usual"))
            assert run.result().text == "Hello."
            assert bus.session("kept").configure({"provider": "anthropic", "model": "usual"}).fate.state == "delivered"
            local.reset()
            assert list(bus.runs()) == []
            server: Any = Redis.from_url(local.url)
            with closing(server):
                assert not list(server.scan_iter("*session*"))
                assert server.hget("mine:meta", "partitions") == b"2"
    finally:
        local.stop()


@pytest.mark.parametrize("program", ["starved", "service_ends"])
def test_the_bus_never_ends_the_process_of_the_test(program: str) -> None:
    """In a process of its own: a bus that did would end pytest too."""
    command = [sys.executable, "-m", "tests.e2e.operating.starved_bus", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["lives"]), ended.stdout + ended.stderr
