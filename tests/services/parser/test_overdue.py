"""When the parser's clock rings: a function of a run's state, the settings and the time."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.core.run.gated_scripts import HeldStory
from tests.unit.core.run.script import START_MS, Story, call, text
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ToolReturned
from tokenbus_services.parser.timeouts import MAX_LOSSES, PolicyStageObserver, PolicyStageStatus, Timeouts
from tokenbus_services.settings import LimitSettings, McpStdio, ProviderSettings, PythonTool, Settings

SETTINGS = Settings(
    providers={"anthropic": ProviderSettings(api="anthropic", first_event_timeout_s=5, idle_timeout_s=2)},
    tools={"f": PythonTool(call="a:b", timeout_s=20), "g": PythonTool(call="a:b")},
    mcp={"wet": McpStdio(command="x", prefix="weather", timeout_s=7)},
    limits=LimitSettings(tool_slack_s=10, silent_run_s=100),
)
PATIENCE = Timeouts.of(SETTINGS)


def in_tools(name: str, **changes: object) -> Story:
    scenario = Story(**changes)
    scenario.provider(*call(0, "a", name), *call(1, "b", name), n.Done("tool_use"))
    return scenario


def vanished(scenario: Story, after_s: float) -> list[str]:
    return [p.call.tool_id for p in PATIENCE.overdue_calls(scenario.run.state, scenario.at_ms + round(after_s * 1000))]


def test_a_deadline_passes_at_its_moment_and_without_one_never() -> None:
    s = Story(deadline_ms=START_MS + 50).run.state
    assert not PATIENCE.deadline_passed(s, START_MS + 49)
    assert PATIENCE.deadline_passed(s, START_MS + 50)
    assert not PATIENCE.deadline_passed(Story().run.state, 2**60)
    s.waits_since_ms = START_MS
    assert not PATIENCE.deadline_passed(s, START_MS + 50), "it waits for somebody"


@pytest.mark.parametrize(
    ("name", "asked_s", "allowed_s"), [("f", None, 20), ("f", 3.0, 3), ("g", None, 60), ("weather", None, 7)]
)
def test_a_call_has_its_timeout_and_the_slack(name: str, asked_s: float | None, allowed_s: float) -> None:
    scenario = in_tools(name, tool_timeout_s=asked_s)
    assert vanished(scenario, allowed_s + 10) == []
    assert vanished(scenario, allowed_s + 10.001) == ["a", "b"]


def test_a_call_with_its_result_has_not_vanished() -> None:
    scenario = in_tools("f")
    scenario.control(ToolReturned(1, "late but here", False))
    assert vanished(scenario, 1000) == ["a"]


def test_a_retry_that_waits_is_not_silent_before_it_is_due() -> None:
    scenario = Story()
    wait = ErrorInfo(code="rate_limit", kind="rate_limit", message="", retryable=True, retry_after_s=20)
    scenario.provider(n.Failed(wait))
    assert not PATIENCE.is_silent(scenario.run.state, scenario.at_ms + 119_000)
    assert PATIENCE.is_silent(scenario.run.state, scenario.at_ms + 121_000)


HERE = PolicyStageStatus(alive_ms=START_MS, alive=True, lag_bytes=0, read_ms=START_MS)
NOBODY = PolicyStageStatus(alive_ms=0, alive=False, lag_bytes=100, read_ms=0)
FULL = msgspec.structs.replace(NOBODY, lag_bytes=SETTINGS.limits.lag_bytes)


def drafted() -> HeldStory:
    """A run whose first draft waits for a ruling; its policies have a second."""
    scenario = HeldStory()
    scenario.provider(n.Start("m"), *text(0, "Hello"))
    return scenario


def unjudged(scenario: HeldStory, after_ms: int, judges: PolicyStageStatus) -> bool:
    return PATIENCE.policies_overdue(scenario.run.state, scenario.at_ms + after_ms, judges)


def test_what_a_parser_that_stood_waits_for_has_all_its_time_after_the_stand() -> None:
    stood_s = 105
    held, calls, streaming = drafted(), in_tools("f"), Story()
    for more_ms, expected in ((1, True), (0, False)):
        until_ms = held.at_ms + stood_s * 1000
        now_ms = until_ms + 1_000 + more_ms
        assert PATIENCE.policies_overdue(held.run.state, now_ms, HERE, stood_until_ms=until_ms) is expected
        until_ms = calls.at_ms + stood_s * 1000
        now_ms = until_ms + 30_000 + more_ms
        assert bool([*PATIENCE.overdue_calls(calls.run.state, now_ms, stood_until_ms=until_ms)]) is expected
        until_ms = streaming.at_ms + stood_s * 1000
        now_ms = until_ms + 100_000 + more_ms
        assert PATIENCE.is_silent(streaming.run.state, now_ms, stood_until_ms=until_ms) is expected


@pytest.mark.parametrize("judges", [HERE, NOBODY])
def test_a_run_waits_for_its_policies_as_long_as_they_may_take(judges: PolicyStageStatus) -> None:
    scenario = drafted()
    assert not unjudged(scenario, 1_000, judges)
    assert unjudged(scenario, 1_001, judges)
    scenario.pass_all()
    assert not unjudged(scenario, 2_000, judges)


def test_drafts_that_a_slow_stage_has_not_read_wait_for_their_turn() -> None:
    scenario = drafted()
    slow = msgspec.structs.replace(HERE, lag_bytes=1, read_ms=scenario.at_ms - 1)
    assert not unjudged(scenario, 3_600_000, slow)
    past = msgspec.structs.replace(slow, read_ms=scenario.at_ms + 1_001)
    assert unjudged(scenario, 3_600_000, past)


def test_a_stage_that_was_just_lost_has_the_time_to_come_back() -> None:
    scenario = drafted()
    lost = msgspec.structs.replace(NOBODY, alive_ms=scenario.at_ms + 3_600_000)
    assert not unjudged(scenario, 3_601_000, lost)
    assert unjudged(scenario, 3_601_001, lost)


def test_a_stage_that_restarts_without_reading_counts_as_unavailable() -> None:
    scenario, seen = drafted(), PolicyStageObserver()
    for loss in range(MAX_LOSSES):
        assert not unjudged(
            scenario,
            0,
            seen.observe(alive=True, lag_bytes=9, read="5-0", read_ms=0, now_ms=scenario.at_ms + loss * 500),
        )
        away = seen.observe(alive=False, lag_bytes=9, read="5-0", read_ms=0, now_ms=scenario.at_ms + loss * 500 + 250)
        assert not unjudged(scenario, loss * 500 + 250, away)
    lost_ms = (MAX_LOSSES - 1) * 500
    seen.observe(alive=True, lag_bytes=9, read="5-0", read_ms=0, now_ms=scenario.at_ms + lost_ms + 500)
    away = seen.observe(alive=False, lag_bytes=9, read="5-0", read_ms=0, now_ms=scenario.at_ms + lost_ms + 1_001)
    assert unjudged(scenario, lost_ms + 1_001, away)


def test_a_stage_that_reads_on_between_its_losses_has_the_time_to_come_back() -> None:
    scenario, seen = drafted(), PolicyStageObserver()
    for loss in range(3 * MAX_LOSSES):
        seen.observe(alive=True, lag_bytes=9, read=f"{loss}-0", read_ms=0, now_ms=scenario.at_ms + loss * 500)
        away = seen.observe(
            alive=False, lag_bytes=9, read=f"{loss}-0", read_ms=0, now_ms=scenario.at_ms + loss * 500 + 250
        )
        assert not unjudged(scenario, loss * 500 + 250, away)


def test_a_run_that_is_held_back_for_others_drafts_waits_no_longer_than_they() -> None:
    scenario = HeldStory()
    assert scenario.drafts == []
    assert not unjudged(scenario, 1_000, FULL)
    assert unjudged(scenario, 1_001, FULL)
    for judges in (NOBODY, msgspec.structs.replace(FULL, alive=True)):
        assert not unjudged(scenario, 3_600_000, judges)
