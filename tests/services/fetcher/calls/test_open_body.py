"""A provider that says its last and leaves the body open: the call is over, and the connection closed by us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.e2e.fleet import BASE_PATHS
from tests.services.fetcher.writing.test_raw_writer import frames, run, writing
from tests.waiting import eventually
from tokenbus.bus import process_clock
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.events.frames import Ended
from tokenbus.events.normalized import Done
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import Generate, Message
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.call_timeouts import CallTimeouts, SilentCalls
from tokenbus_services.fetcher.calls.provider_call import fetch
from tokenbus_services.fetcher.calls.response_relay import PLAIN, CallOptions
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Stall, Turn
from tokenbus_services.runtime.metrics import KnownModels
from tokenbus_services.settings import ProviderSettings, Settings

__all__ = ["run"]

HOUR = 3600.0
LAST: dict[ApiName, str] = {
    "anthropic": '"message_stop"',
    "openai-chat": "[DONE]",
    "openai-responses": '"response.completed"',
}


@asynccontextmanager
async def calling(
    server: Server, keys: Keys, run: str, api: ApiName, provider: MockProvider, options: CallOptions = PLAIN
) -> AsyncGenerator[asyncio.Task[None]]:
    """A call that no silence ends."""
    settings = ProviderSettings(
        api=api,
        base_url=provider.url + BASE_PATHS[api],
        api_key_env="",
        first_event_timeout_s=HOUR,
        idle_timeout_s=HOUR,
    )
    endpoint = Endpoint("p", settings, {})
    request = Generate(provider="p", model="m", messages=[Message(role="user", content="Go")])
    call = endpoint.build(request, []).call
    async with writing(server, keys, run) as attempt:
        task = asyncio.create_task(fetch(endpoint, request, call, writer=attempt, deadline=None, options=options))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await endpoint.close()


@pytest.mark.parametrize("api", LAST)
async def test_the_call_ends_well_and_the_socket_is_closed_by_us(
    server: Server, keys: Keys, run: str, api: ApiName
) -> None:
    turn = Turn(says=Reply(text="one two three"), fault=Stall(after_text=LAST[api]))
    async with (
        MockProvider([Script(name="m", turns=(turn,))]) as provider,
        calling(server, keys, run, api, provider) as call,
    ):
        exchange = await provider.requested()
        await provider.disconnected(exchange)
        await call
    written = await frames(server, keys, run)
    assert written[-1].items[-1] == Ended()
    reader = AttemptReader(1)
    assert isinstance([event for frame in written for event in reader.read(frame)][-1], Done)


async def test_a_silence_after_the_finish_reason_is_not_the_end(server: Server, keys: Keys, run: str) -> None:
    """Usage comes after it."""
    turn = Turn(says=Reply(text="one two three"), fault=Stall(after_text='"finish_reason":"stop"'))
    async with (
        MockProvider([Script(name="m", turns=(turn,))]) as provider,
        calling(server, keys, run, "openai-chat", provider) as call,
    ):
        exchange = await provider.requested()
        await provider.until(lambda: exchange.state == "stalled")
        provider.resume(exchange)
        await call
        assert exchange.state == "sent"


async def test_a_body_that_is_closed_in_time_leaves_the_connection_for_the_next_call(
    server: Server, keys: Keys, run: str
) -> None:
    turn = Turn(says=Reply(text="one two three"))
    async with (
        MockProvider([Script(name="m", turns=(turn,))]) as provider,
        calling(server, keys, run, "anthropic", provider) as call,
    ):
        await call
        assert provider.open_connections == 1


async def test_a_provider_that_answers_200_and_nothing_more_is_in_the_log_long_before_its_timeout(
    server: Server, keys: Keys, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus_services.fetcher.calls.provider_call.SILENT_S", 0.01)
    turn = Turn(says=Reply(text="never"), fault=Stall(after_bytes=0))
    models = KnownModels(Settings(providers={"p": ProviderSettings(api="openai-chat")}))
    silent = SilentCalls(server, keys, registry := CollectorRegistry(), worker="w", models=models)
    options = CallOptions(silent=silent, called_ms=1)

    def now_silent() -> float | None:
        return registry.get_sample_value("tokenbus_attempts_silent", {"provider": "p", "model": "m"})

    with capture_logs() as lines:
        async with (
            MockProvider([Script(name="m", turns=(turn,))]) as provider,
            calling(server, keys, run, "openai-chat", provider, options),
        ):
            await eventually(lambda: any(line["event"] == "attempt_silent" for line in lines))
            assert now_silent() == 1
    assert now_silent() == 0
    silent.answered("p", "m")
    assert registry.get_sample_value("tokenbus_attempts_silent", {"provider": "p", "model": "m"}) == 0
    [line] = [line for line in lines if line["event"] == "attempt_silent"]
    assert line.items() >= {"run": run, "attempt": 1, "provider": "p", "model": "m", "timeout_s": HOUR}.items()
    assert "first_event_timeout_s in [providers.p]" in line["hint"]


async def test_a_provider_that_answered_is_not_reported_as_silent() -> None:
    reported: list[str] = []

    def report() -> Callable[[], None]:
        reported.append("silent")
        return lambda: reported.append("answered")

    settings = ProviderSettings(api="anthropic")
    silence = CallTimeouts(process_clock.timeout(None), None, settings)
    silence.report_after(0, report)  # no timeout yet: there is nothing to report before
    await asyncio.sleep(0)
    async with process_clock.timeout(None) as limit:
        silence = CallTimeouts(limit, None, settings)
        silence.allow(HOUR, "first_event_timeout", "silent")
        silence.report_after(0, report)
        silence.stop_report()
        for _ in range(3):
            await asyncio.sleep(0)
        assert reported == []
        silence.report_after(0, report)
        await eventually(lambda: reported == ["silent"])
        for _ in range(2):
            silence.stop_report()
        assert reported == ["silent", "answered"]
