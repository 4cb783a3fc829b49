"""What one attempt reads of a job, whatever cuts its answers."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ProviderJob, job_decoder
from tokenbus.events.normalized import Failed
from tokenbus.providers.api import Quirks
from tokenbus.providers.openai_responses import provider
from tokenbus.providers.openai_responses.request import jobs
from tokenbus.providers.response.sse import SseDecoder
from tokenbus_services.fetcher.calls.background_job import LONGEST_LOOK_S, Readings, RunningJob
from tokenbus_services.settings import RetrySettings

CUT = ErrorInfo(code="network", kind="network", message="reset", retryable=True)


def seed(*, stream: bool = True) -> ProviderJob:
    return ProviderJob("", 0, 1, 0, "openai-responses", "m", stream, 0)


def events(end: str) -> list[bytes]:
    """Five events, whose lines end in this."""
    bodies = [
        {"type": "response.queued", "response": {"id": "resp_1", "status": "queued"}},
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "a\n\nb"},
        {"type": "response.output_text.delta", "delta": "é"},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "output": []}},
    ]
    numbered = ({**body, "sequence_number": number} for number, body in enumerate(bodies))
    return [f"event: x{end}data: {msgspec.json.encode(body).decode()}{end}{end}".encode() for body in numbered]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("repeats", [0, 2], ids=["", "and the provider repeats two events"])
def test_a_stream_cut_at_any_byte_is_passed_on_once_and_whole(end: str, repeats: int) -> None:
    all_events = events(end)
    stream = b"".join(all_events)
    for cut in range(len(stream) + 1):
        job = RunningJob(jobs, seed())
        passed = job.feed(stream[:cut])
        read = job.job.after
        if job.running:
            call = job.next_call(look=False)
            assert (call.method, call.path, call.query["starting_after"]) == ("GET", "/resp_1", str(read))
            rest = b"".join(all_events[max(0, read + 1 - repeats) :])
            for at in range(0, len(rest), 7):
                passed += job.feed(rest[at : at + 7])
            passed += job.end()
        else:
            assert cut < len(all_events[0]) or job.job.over
        assert not job.known or (SseDecoder().feed(passed), job.job.over) == (SseDecoder().feed(stream), True)
        assert not job.has_news or job_decoder.decode(job.mark()) == job.job


def test_a_look_at_a_streamed_job_that_is_over_ends_its_stream() -> None:
    job = RunningJob(jobs, seed())
    job.feed(events("\n")[0])
    assert job.next_call(look=True).query == {}
    job.feed(b'{"id": "resp_1",\n "status": "in_progress"}')
    assert (job.end(), job.running) == (b"", True)
    job.next_call(look=True)
    job.feed(b'{"id": "resp_1",\n "status": "completed",\n "output": []}')
    expected = b'data: {"type":"response.completed","response":{"id":"resp_1","status":"completed","output":[]}}\n\n'
    assert job.end().partition(b"\n")[2] == expected
    assert job.job.over


@pytest.mark.parametrize(
    ("status", "code"), [("expired", "job_expired"), ("cancelled", "cancelled"), ("failed", "response_failed")]
)
@pytest.mark.parametrize("stream", [True, False])
def test_each_status_that_ends_a_job_without_an_answer_is_an_error(status: str, code: str, stream: bool) -> None:
    job = RunningJob(jobs, seed(stream=stream))
    job.feed(events("\n")[0] if stream else b"{}")
    job.next_call(look=True)
    job.feed(msgspec.json.encode({"object": "response", "id": "resp_1", "status": status, "output": []}))
    decoder = provider.decoder(status=200, headers={}, stream=stream, quirks=Quirks())
    last = [*decoder.feed(job.end()), *decoder.end()][-1]
    assert isinstance(last, Failed)
    assert (last.error.code, job.job.over) == (code, True)


def test_reading_on_ends_after_as_many_calls_without_an_event_as_retry_says() -> None:
    job = RunningJob(jobs, seed())
    job.feed(events("\n")[0])
    readings = Readings(job, RetrySettings(max_attempts=3, base_delay_s=1.0, max_delay_s=1.5))
    waits: list[float] = []
    while readings.after(CUT, read=0) is None:
        waits.append(readings.wait_s)
    assert waits == [1.0, 1.5]
    readings = Readings(job, RetrySettings(max_attempts=3))
    for _ in range(9):  # each brings an event
        assert readings.after(CUT, read=-1) is None
    assert readings.after(ErrorInfo(code="auth", kind="auth", message="no"), read=0) is not None


def test_a_silent_job_is_looked_at_and_a_look_that_answers_is_no_failure() -> None:
    job = RunningJob(jobs, seed())
    job.feed(events("\n")[0])
    readings = Readings(job, RetrySettings(max_attempts=2))
    silent = ErrorInfo(code="idle_timeout", kind="timeout", message="silent", retryable=True)
    for _ in range(9):
        assert readings.after(silent, read=0) is None
        assert readings.next_call().query == {}
        assert readings.after(None, read=0) is None
        assert 0 < readings.wait_s <= LONGEST_LOOK_S
        assert readings.next_call().query["stream"] == "true"
