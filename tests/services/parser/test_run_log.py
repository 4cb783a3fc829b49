"""The log lines of a run, and the content that they never hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import LogCapture

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import RunLifetimes
from tokenbus.bus.scripts import Commit
from tokenbus.core.run.attempts import WORKER_LOST
from tokenbus.events import normalized as n
from tokenbus.events.error_info import IN_ANSWER, ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, BusEvent, CancelRequested, EventFrame, RunLimits, encode
from tokenbus.events.usage import Usage
from tokenbus_services.parser.logic import ParserLogic
from tokenbus_services.parser.metrics import RunLog

KEYS = Keys("t", 1)
CONTENT = "the moon is made of cheese"
SECRET = "sk-planted-0123456789"


@pytest.fixture
def lines() -> Iterator[LogCapture]:
    capture = LogCapture()
    before = structlog.get_config()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    yield capture
    structlog.configure(**before)


class Parser:
    """A parser that logs; each frame is 100 ms after the last."""

    def __init__(self) -> None:
        self.logic = ParserLogic(0, KEYS, topics=(), lifetimes=RunLifetimes(60_000, 60_000), observers=[RunLog()])
        self._at_ms = 1000

    def feed(self, *events: BusEvent, attempt: int = 1, turn: int = 0) -> None:
        self.logic.apply("r1", encode(EventFrame(turn, attempt, self._at_ms, list(events))))
        self.logic.flush(Commit(KEYS.lease(0, "parser"), KEYS.topic(0, "events")))
        self._at_ms += 100

    def accept(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"provider": "openai", "model": "gpt", "on_failure": "before_first_visible"}
        self.feed(
            Accepted(max_tool_depth=1, rules=RunLimits(), tools=[], **{**fields, **changes}), attempt=CONTROL_ATTEMPT
        )


def story(lines: LogCapture) -> list[str]:
    return [entry["event"] for entry in lines.entries]


def line(lines: LogCapture, event: str) -> Mapping[str, Any]:
    [found] = [entry for entry in lines.entries if entry["event"] == event]
    return found


def test_a_retried_run_is_printed_line_by_line(lines: LogCapture) -> None:
    parser = Parser()
    parser.accept(metadata={"tenant": "acme"})
    busy = ErrorInfo(
        code="http_529", kind="overloaded", message=CONTENT, retryable=True, status=529, request_id="req-1", raw=SECRET
    )
    parser.feed(n.Failed(busy, 1010))
    parser.feed(
        n.Start("gpt-2026", "resp-2", called_ms=1150, request_id="req-2"),
        n.BlockStart(0, "text"),
        n.TextDelta(0, CONTENT),
        n.BlockStop(0),
        attempt=2,
    )
    parser.feed(n.Done("stop", usage=Usage(input=7, output=3, cache_read=2)), attempt=2)
    assert story(lines) == ["run_started", "attempt_ended", "attempt_retried", "attempt_ended", "run_ended"]
    started, failed, retried, ended, over = map(dict, lines.entries)
    assert started | {"tenant": "acme", "provider": "openai", "model": "gpt"} == started
    assert (
        failed | {"outcome": "error", "class": "overloaded", "status": 529, "request_id": "req-1", "ms": 90} == failed
    )
    assert failed["log_level"] == "warning"
    assert retried["next_attempt"] == 2
    assert retried["delay_ms"] > 0
    assert retried["class"] == "overloaded"
    assert ended["request_id"] == "req-2"
    assert ended["response_id"] == "resp-2"
    assert ended["answered_model"] == "gpt-2026"
    assert (ended["first_byte_ms"], ended["first_text_ms"], ended["ms"]) == (50, 50, 150)
    assert (ended["input_tokens"], ended["output_tokens"], ended["cache_read_tokens"]) == (7, 3, 2)
    assert over | {"status": "completed", "attempts": 2, "turns": 1, "ms": 300} == over


def test_no_line_holds_text_of_the_run_or_of_a_providers_error(lines: LogCapture) -> None:
    parser = Parser()
    parser.accept(metadata={"note": CONTENT}, on_failure="fail")
    parser.feed(n.Start("gpt"), n.BlockStart(0, "text"), n.TextDelta(0, CONTENT))
    parser.feed(n.Failed(ErrorInfo(code="bad", kind="invalid_request", message=CONTENT, raw=SECRET, where=CONTENT)))
    logged = msgspec.json.encode(lines.entries, enc_hook=str).decode()
    assert "attempt_ended" in logged
    assert CONTENT not in logged
    assert SECRET not in logged


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (ErrorInfo(code="key_missing", kind="auth", message="m", where="OPENAI_API_KEY"), "OPENAI_API_KEY"),
        (ErrorInfo(code="http_404", kind="not_found", message="m", status=404), "base_url in [providers.openai]"),
        (ErrorInfo(code="invalid_api_key", kind="auth", message="m", status=401), "api_key_env"),
        (ErrorInfo(code="network", kind="network", message="m"), "base_url in [providers.openai]"),
        (ErrorInfo(code="network", kind="network", message="m", where=IN_ANSWER), "in the middle of answers"),
        (ErrorInfo(code="connect_timeout", kind="timeout", message="m"), "base_url in [providers.openai]"),
        (ErrorInfo(code="stream_cut", kind="network", message="m"), "base_url in [providers.openai]"),
        (ErrorInfo(code="http_429", kind="rate_limit", message="m", status=429), "[limits.providers.openai]"),
        (
            ErrorInfo(code="first_event_timeout", kind="timeout", message="m"),
            "first_event_timeout_s in [providers.openai]",
        ),
        (ErrorInfo(code="idle_timeout", kind="timeout", message="m"), "idle_timeout_s in [providers.openai]"),
    ],
)
def test_an_error_of_the_settings_comes_with_the_setting_to_look_at(
    lines: LogCapture, error: ErrorInfo, named: str
) -> None:
    parser = Parser()
    parser.accept()
    parser.feed(n.Failed(error))
    entry = line(lines, "attempt_ended")
    assert named in entry["hint"]
    assert entry["log_level"] == "warning"
    ended = line(lines, "run_ended")
    assert (ended["code"], ended["status"], ended.get("http_status")) == (error.code, "failed", error.status)


def test_an_attempt_that_a_cancel_ends_is_no_error(lines: LogCapture) -> None:
    parser = Parser()
    parser.accept()
    parser.feed(n.Start("gpt"))
    parser.feed(CancelRequested("the user left"), attempt=CONTROL_ATTEMPT)
    assert line(lines, "attempt_ended")["outcome"] == "cancelled"
    assert line(lines, "attempt_ended")["log_level"] == "info"
    assert line(lines, "run_ended")["status"] == "cancelled"


def test_an_attempt_whose_worker_was_lost_is_reported_once(lines: LogCapture) -> None:
    parser = Parser()
    parser.accept()
    parser.feed(n.Cut("killed", ErrorInfo(code=WORKER_LOST, kind="internal", message="killed", retryable=True)))
    parser.feed(n.Start("gpt"), n.Done("stop"), attempt=2)
    assert [entry["outcome"] for entry in lines.entries if entry["event"] == "attempt_ended"] == ["lost", "ok"]


def test_a_replay_logs_nothing(lines: LogCapture) -> None:
    parser = Parser()
    accepted = Accepted(provider="p", model="m", on_failure="fail", max_tool_depth=0, rules=RunLimits(), tools=[])
    parser.logic.apply("r1", encode(EventFrame(0, CONTROL_ATTEMPT, 1, [accepted])))
    parser.logic.apply("r1", encode(EventFrame(0, 1, 2, [n.Start("m"), n.Done("stop")])))
    parser.logic.discard_outputs()
    parser.logic.flush(Commit(KEYS.lease(0, "parser"), KEYS.topic(0, "events")))
    assert lines.entries == []
