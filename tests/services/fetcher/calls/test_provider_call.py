"""How long a call may be silent, and how many calls there may be."""

from __future__ import annotations

import asyncio

import msgspec

from tests.services.mock_provider.requests import one_message
from tokenbus.bus import process_clock
from tokenbus.providers.api import HttpCall
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.call_timeouts import DEADLINE_PASSED, CallTimeouts
from tokenbus_services.mock_provider import Delivery, MockProvider, Reply, Script, Turn
from tokenbus_services.settings import ProviderSettings

MANY = 300
"""More than the connections that an HTTP client opens by itself."""


async def test_a_timer_that_ran_to_the_deadline_reports_the_deadline_even_if_it_fired_a_little_early() -> None:
    in_an_hour = asyncio.get_running_loop().time() + 3600
    limit = process_clock.timeout(None)
    async with limit:
        silence = CallTimeouts(limit, in_an_hour, ProviderSettings(api="anthropic", call_timeout_s=7200))
        silence.allow(7200, "idle_timeout", "silent")
        assert silence.error() == DEADLINE_PASSED
        silence.allow(60, "idle_timeout", "silent")
        error = silence.error()
        assert error
        assert error.code == "idle_timeout"
        limit.reschedule(None)


async def test_calls_to_a_silent_provider_do_not_wait_for_a_connection() -> None:
    silent = Script(name="late", turns=(Turn(says=Reply(text="late"), delivery=Delivery(delay_s=3600)),))
    async with MockProvider([silent]) as provider:
        endpoint = Endpoint("p", ProviderSettings(api="openai-chat", base_url=provider.url, api_key_env=""), {})
        request = endpoint.request(
            HttpCall(path="v1/chat/completions", body=msgspec.json.encode(one_message()), headers={})
        )
        calls = [asyncio.create_task(endpoint.send(request)) for _ in range(MANY)]
        await provider.requested(MANY)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await endpoint.close()
