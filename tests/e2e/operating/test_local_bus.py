"""`tokenbus.testing.LocalBus`: what a user's test relies on beside what docs/guides/testing.md shows."""

from __future__ import annotations

import json
import threading

import pytest

from tests.waiting import eventually
from tokenbus.errors import RunCancelled, RunFailed, SettingsError
from tokenbus.testing import LocalBus, NoSuchModel, Reply, Stall, ToolCall, Turn


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

    with pytest.raises(NoSuchModel, match="model_says"):
        ask()


def test_wrong_settings_are_an_error_at_the_start_and_nothing_is_left() -> None:
    before = threading.active_count()
    with pytest.raises(SettingsError, match="limits"):
        LocalBus("[limits]\nlag_bytes = -1\n").start()
    assert threading.active_count() == before
