"""Model fallback through the running services: the subscriber gets one answer, from whichever model."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import judge
from tests.e2e.conftest import WEATHER, Deploy, Send
from tests.e2e.fleet import BASE_PATHS, PIPELINE, WITH_TOOLS, ended, fleet, log_of, provider_table
from tests.waiting import eventually
from tokenbus import Client
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus_services.mock_provider import (
    CutOff,
    ErrorEvent,
    HangUp,
    MockProvider,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
)
from tokenbus_services.mock_provider.script import Fault

REPLY = "It was said by another, and once."
BROKEN = Reply(thinking="Let me think of it first.", text="Nobody is to hear of this, not a word.")
QUICK = """
[retry]
base_delay_s = 0.02
max_attempts = 2
"""
FAULTS: dict[str, tuple[Fault, int]] = {
    "refused": (Status(status=401), 1),
    "unknown": (Status(status=404), 1),
    "busy": (Status(status=529), 2),
    "gone": (HangUp(), 2),
    "cut": (CutOff(after_text="think"), 2),
    "silent": (Stall(after_text="think"), 2),
}
"""What goes wrong, and how often the first is asked."""
SPEAKS = Script(name="speaks", turns=(Turn(says=Reply(text=REPLY)),), repeat_last=True)
PNG = b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()
GIF = b64encode(b"GIF89a" + bytes(64)).decode()


def picture(media_type: str, data: str) -> list[dict[str, Any]]:
    source = {"type": "base64", "media_type": media_type, "data": data}
    return [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]}]


def to(provider: str, model: str = "speaks", **more: Any) -> dict[str, Any]:
    return {"provider": provider, "model": model, **more}


def switches(log: judge.Log) -> list[Any]:
    return [e.get("fallback") for e in log if e["type"] == "retrying"]


OTHER = {
    "anthropic": "gemini",
    "gemini": "gemini-interactions",
    "gemini-interactions": "openai-chat",
    "openai-chat": "openai-responses",
    "openai-responses": "anthropic",
}
"""Each API, and the one that its fallback calls."""


async def test_a_fallback_answers_if_the_first_fails_before_visible_output(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    assert set(OTHER) == set(BASE_PATHS)
    faults = {f"{api}-{n}": (api, fault, tries) for api in OTHER for n, (fault, tries) in FAULTS.items()}
    bad = [Script(name=name, turns=(Turn(says=BROKEN, fault=fault),)) for name, (_, fault, _) in faults.items()]
    async with MockProvider([*bad, SPEAKS]) as provider:
        tables = [provider_table(f"impatient-{api}", api, provider.url, "idle_timeout_s = 2") for api in OTHER]
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, QUICK + "".join(tables)):
            runs = {
                name: await send(name, provider=f"impatient-{api}", fallback=[to(OTHER[api])])
                for name, (api, _, _) in faults.items()
            }
            logs: Any = await ended(server.client, keys, list(runs.values()))
        requests = [exchange.request.model for exchange in provider.requests if exchange.request]
    for name, (api, _, tries) in faults.items():
        log, other = logs[runs[name]], OTHER[api]
        judge.check(log)
        assert log[-1]["type"] == "completed", log[-1]
        assert log[0]["fallback"] == [to(other)]
        assert switches(log) == [None] * (tries - 1) + [to(other)], name
        [usage] = [e for e in log if e["type"] == "usage"]
        assert usage["provider"] == other
        assert judge.text(log) == REPLY
        assert judge.blocks(log) == [("text", REPLY)]
        assert requests.count(name) == tries
    assert requests.count("speaks") == len(faults)


async def test_after_visible_text_no_fallback_is_tried(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    script = Script(name="heard", turns=(Turn(says=Reply(text=REPLY), fault=ErrorEvent(after_text="another")),))
    async with deployed([script, SPEAKS], PIPELINE, QUICK) as (provider, _):
        run = await send("heard", fallback=[to("gemini")])
        log: Any = (await ended(server.client, keys, [run]))[run]
        request_count = len(provider.requests)
    judge.check(log)
    assert (log[-1]["type"], switches(log), request_count) == ("failed", [], 1)
    assert REPLY.startswith(judge.text(log))


async def test_the_turns_after_tools_stay_with_the_provider_that_answered(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    """The first calls a tool and then fails; the second reads the first's call and its result."""
    calls = Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Bern"}),))
    first = Script(name="first", turns=(Turn(says=calls), Turn(says=BROKEN, fault=Status(status=400))))
    second = Script(name="second", turns=(Turn(says=calls), Turn(says=calls), Turn(says=Reply(text=REPLY))))
    async with deployed([first, second], WITH_TOOLS, QUICK) as (provider, _):
        run = await send("first", fallback=[to("openai-responses", "second")], tools=[WEATHER])
        log: Any = (await ended(server.client, keys, [run]))[run]
        requests = [
            (exchange.request.model, exchange.request.turn) for exchange in provider.requests if exchange.request
        ]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert requests == [("first", 0), ("first", 1), ("second", 1), ("second", 2)]
    assert [e["provider"] for e in log if e["type"] == "usage"] == ["anthropic", *["openai-responses"] * 2]
    assert [kind for kind, _ in judge.blocks(log)] == ["tool_call", "tool_result"] * 2 + ["text"]


async def test_on_failure_continue_applies_to_the_provider_that_wrote_the_text(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    """The first cannot continue from a text and says nothing; the second can, and breaks in the middle."""
    first = Script(name="first", turns=(Turn(says=BROKEN, fault=Status(status=401)),))
    second = Script(name="second", turns=(Turn(says=Reply(text=REPLY), first=(CutOff(after_text="another"),)),))
    async with MockProvider([first, second]) as provider:
        toml = QUICK + provider_table("claude", "anthropic", provider.url, 'quirks = { models_continuing = [""] }')
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            run = await send("first", provider="openai-chat", fallback=[to("claude", "second")], on_failure="continue")
            log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert switches(log) == [to("claude", "second"), None]
    assert [e.get("continues", False) for e in log if e["type"] == "retrying"] == [False, True]
    assert judge.text(log) == REPLY


async def test_a_run_is_resumed_with_the_provider_that_answered_and_the_fallbacks_after_it(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    first = Script(name="first", turns=(Turn(says=BROKEN, fault=Status(status=401)),))
    second = Script(name="second", turns=(Turn(says=Reply(text=REPLY), first=(CutOff(after_text="another"),)),))
    async with MockProvider([first, second]) as provider:
        toml = QUICK + provider_table("claude", "anthropic", provider.url, 'quirks = { models_continuing = [""] }')
        async with (
            fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml),
            Client(server_url, prefix=keys.prefix) as bus,
        ):
            fallback = [to("claude", "second"), to("gemini")]
            run = await send("first", provider="openai-chat", fallback=fallback)
            log: Any = (await ended(server.client, keys, [run]))[run]
            resumed = await bus.resume(run)
            more: Any = (await ended(server.client, keys, [resumed.id]))[resumed.id]
    assert log[-1]["type"] == "incomplete"
    assert (more[0]["provider"], more[0]["model"], more[0]["fallback"]) == ("claude", "second", [to("gemini")])
    assert judge.text(log) + judge.text(more) == REPLY


async def test_the_end_of_prefill_text_is_read_as_its_provider_marks_it(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    first = Script(name="first", turns=(Turn(says=BROKEN, fault=Status(status=401)),))
    second = Script(name="second", turns=(Turn(says=Reply(text=f" {REPLY}<|eot|>\n\nHuman: nobody is to hear this")),))
    async with deployed([first, second], PIPELINE, QUICK):
        run = await send("first", mode="prefill", participant="Claude", fallback=[to("gemini", "second")])
        log: Any = (await ended(server.client, keys, [run]))[run]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert judge.text(log).strip() == REPLY


async def test_an_image_that_was_moved_out_of_the_request_reaches_the_next_as_well(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    first = Script(name="first", turns=(Turn(says=BROKEN, fault=Status(status=401)),))
    async with deployed([first, SPEAKS], PIPELINE, QUICK + "\n[blobs]\ninline_characters = 1\n") as (provider, _):
        messages = picture("image/png", PNG)
        run = await send("first", messages=messages, fallback=[to(api) for api in ("openai-chat", "gemini")])
        log: Any = (await ended(server.client, keys, [run]))[run]
        bodies = [exchange.http_request.body for exchange in provider.requests]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert len(bodies) == 2
    assert all(PNG.encode() in body for body in bodies)


async def test_an_unsuitable_provider_is_refused_by_name_or_skipped_with_a_note(
    server: Server, keys: Keys, send: Send, deployed: Deploy
) -> None:
    route = (
        '\n[[fallback_routes]]\nproviders = ["anthropic"]\nmodels = ["fi*"]\n'
        'fallback = [{ provider = "gemini", model = "speaks" }, { provider = "openai-chat", model = "speaks" }]\n'
    )
    first = Script(name="first", turns=(Turn(says=BROKEN, fault=Status(status=401)),))
    own = {
        "fallback[1]": {"fallback": [to("gemini"), to("nobody")]},
        "fallback[0]": {"fallback": [to("openai-responses")], "mode": "prefill", "participant": "Claude"},
        "a GIF": {"fallback": [to("gemini")], "messages": picture("image/gif", GIF)},
        "a file": {
            "fallback": [to("openai-chat")],
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}]}
            ],
        },
    }
    async with deployed([first, SPEAKS], PIPELINE, QUICK + route):
        refused = [await send("first", **fields) for fields in own.values()]
        routed = await send("first", messages=picture("image/gif", GIF))
        alone = await send("first", fallback=[])
        failing = await send("first", on_failure="fail")
        logs: Any = await ended(server.client, keys, [*refused, routed, alone, failing])
    for run, place in zip(refused, ("fallback[1]", "fallback[0]", "fallback[0]", "fallback[0]"), strict=True):
        [end] = logs[run]
        assert (end["type"], end["error"]["code"], end["error"]["where"]) == ("failed", "request_invalid", place)
    log = logs[routed]
    judge.check(log)
    assert judge.text(log) == REPLY
    assert log[0]["fallback"] == [to("openai-chat")]
    [note] = log[0]["notes"]
    assert note.startswith("no fallback to speaks at gemini, which cannot take this request:")
    assert "image/gif" in note
    for run in (alone, failing):
        assert logs[run][-1]["error"]["class"] == "auth", "no other provider is called"
        assert "fallback" not in logs[run][0]


@pytest.mark.parametrize("mode", ["chat", "prefill"])
@pytest.mark.parametrize("broken", [CutOff, ErrorEvent])
async def test_another_provider_continues_a_text_in_the_middle(
    server: Server,
    server_url: str,
    keys: Keys,
    send: Send,
    tmp_path: Path,
    mode: str,
    broken: type[CutOff | ErrorEvent],
) -> None:
    """The one that wrote the text fails for good, the next in the list cannot continue a text, the one after it can."""
    said = f" {REPLY}" if mode == "prefill" else REPLY
    more: dict[str, Any] = {"mode": mode, "participant": "Claude"} if mode == "prefill" else {}
    first = Script(
        name="first", turns=(Turn(says=Reply(text=said), first=(broken(after_text="another"), Status(status=401))),)
    )
    second = Script(name="second", turns=(Turn(says=Reply(text=said)),))
    quirks = 'quirks = { models_continuing = [""] }'
    async with MockProvider([first, second, SPEAKS]) as provider:
        toml = QUICK + provider_table("claude", "anthropic", provider.url, quirks)
        toml += provider_table("twin", "gemini", provider.url, quirks)
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml):
            own, skipped = ("openai-responses", [to("openai-responses")]) if mode == "chat" else ("claude", [])
            fallback = [*skipped, to("twin", "second")]
            run = await send("first", provider=own, fallback=fallback, on_failure="continue", **more)
            log: Any = (await ended(server.client, keys, [run]))[run]
        requests = [exchange.request.model for exchange in provider.requests if exchange.request]
    judge.check(log)
    assert log[-1]["type"] == "completed", log[-1]
    assert judge.text(log) == REPLY
    assert judge.blocks(log) == [("text", REPLY)], "one seamless block"
    *_, handed_over = [e for e in log if e["type"] == "retrying"]
    assert (handed_over["continues"], handed_over["fallback"]) == (True, to("twin", "second"))
    assert log[-1]["provider"] == "twin"
    assert "speaks" not in requests
    assert requests[-1] == "second"


async def test_a_fetcher_that_stops_hands_its_text_over_to_a_provider_that_can_continue_it(
    server: Server, server_url: str, keys: Keys, send: Send, tmp_path: Path
) -> None:
    first = Script(name="first", turns=(Turn(says=Reply(text=REPLY), fault=Stall(after_text="another")),))
    second = Script(name="second", turns=(Turn(says=Reply(text=REPLY)),))
    async with MockProvider([first, second]) as provider:
        toml = QUICK + "[stages]\ndrain_s = 0.1\n"
        toml += provider_table("claude", "anthropic", provider.url, 'quirks = { models_continuing = [""] }')
        async with fleet(tmp_path, server_url, keys, provider.url, PIPELINE, toml) as workers:
            how: dict[str, Any] = {"provider": "openai-responses", "fallback": [to("claude", "second")]}
            run = await send("first", on_failure="continue", **how)
            cut = await send("first", **how)

            async def spoken() -> bool:
                logs = [await log_of(server.client, keys, one) for one in (run, cut)]
                return all("another" in judge.text(log) for log in logs)

            await eventually(spoken)
            assert await workers.worker_of("fetcher").stop() == 0
            await workers.start(PIPELINE[0])
            logs: Any = await ended(server.client, keys, [run, cut])
    judge.check(logs[run])
    assert logs[run][-1]["type"] == "completed", logs[run][-1]
    assert judge.blocks(logs[run]) == [("text", REPLY)]
    assert switches(logs[run]) == [to("claude", "second")]
    assert logs[cut][-1]["type"] == "incomplete", "the request did not allow it"
