"""What `top` draws on a narrow terminal, and what `doctor` advises about a server."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios

import pytest
from redis.exceptions import AuthenticationError
from rich.console import Console, Group

from tests.waiting import eventually
from tokenbus.bus.activity import Failure
from tokenbus.errors import ServerError, ServerTooOld, ServerUnavailable, SettingsError
from tokenbus_services.cli.doctor.checks import server_todo
from tokenbus_services.cli.inspect import BlobFailure, FailingModel, SilentModel, Trouble
from tokenbus_services.cli.top import Rates, Sample, TopScreen, screen_parts
from tokenbus_services.runtime.deployment_snapshot import DeploymentSnapshot, PartitionFacts, QueueFacts, StageFacts


def refused(url: str, cause: Exception | None = None) -> ServerUnavailable:
    error = ServerUnavailable(url, "no")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (refused("redis://h:1", AuthenticationError("WRONGPASS x")), "TOKENBUS_REDIS_PASSWORD"),
        (ServerTooOld("redis://h:1", "5.0", "6.2"), "6.2 or newer"),
        (SettingsError("redis_url", "scheme", "must be redis"), "fix the url"),
        (SettingsError("environment", "TOKENBUS_REDIS_URL", "not set"), "directory of `tokenbus up`"),
        (refused("rediss://h:1", TimeoutError()), "speaks no TLS"),
        (refused("redis://h:1", ConnectionError()), "speaks TLS"),
    ],
)
def test_the_advice_about_a_server_is_by_what_is_wrong(error: ServerError | SettingsError, advice: str) -> None:
    assert advice in server_todo(error)


LIMITED = Failure(
    provider="openai-chat", model="a-long-name-of-a-model-2026-01", kind="rate_limit", code="tokens", status=429
)
TROUBLE = Trouble(
    failing=[
        FailingModel(
            failure=LIMITED, failed=9, attempts=12, all_failed=9, since_ms=90_000, last_ms=7_000, is_over=False
        )
    ],
    silent=[SilentModel(provider="gemini", model="flash", calls=4, since_ms=40_000, answered=0)],
    blobs=BlobFailure(code="blob_quota_exceeded", ago_s=5),
)


def test_top_is_whole_on_a_terminal_of_60_columns() -> None:
    stages = [
        StageFacts(
            name=name,
            ages_ms={"a-very-long-host-name:1234": 0},
            partitions=[PartitionFacts(owner="a-very-long-host-name:1234", lag_bytes=7_777)] * 8,
        )
        for name in ("normalizer", "parser", "policy")
    ]
    groups = ("intake", "fetcher", "tools", "recorder")
    queues = [QueueFacts(name=name, ages_ms={"a-very-long-host-name:1234": 0}) for name in groups]
    rates = Rates(
        requests=1.0, attempts=1.0, tool_calls=1.0, chunks=1.0, stage_bytes={stage.name: 1e6 for stage in stages}
    )
    now = DeploymentSnapshot(at_ms=0, stages=stages, queues=queues, chunks=1, gateways=["g"])
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(Group(*screen_parts(Sample(now, [], rates, TROUBLE), rows=8, narrow=True)))
    shown = console.export_text()
    for word in ("normalizer", "parser", "policy", *groups, "open runs", "active", "pipelines 1", "gateways 1"):
        assert word in shown
    for word in ("9 of 12 calls", "HTTP 429", "7 s ago", "4 calls silent", "40 s", "blob_quota_exceeded, 5 s ago"):
        assert word in " ".join(shown.split())
    assert "…" not in shown
    assert [line.split()[0] for line in shown.splitlines()[-9:] if line.strip()] == [str(n) for n in range(8)]


def test_partitions_that_do_not_fit_are_reached_by_scrolling() -> None:
    behind = [PartitionFacts(owner="w", lag_bytes=1000 - n) for n in range(20)]
    stages = [StageFacts(name=name, partitions=behind) for name in ("normalizer", "parser")]
    now = DeploymentSnapshot(at_ms=0, stages=stages, queues=[], chunks=1)
    rates = Rates(
        requests=None, attempts=None, tool_calls=None, chunks=None, stage_bytes=dict.fromkeys(("normalizer", "parser"))
    )

    def shown(scroll: int) -> tuple[list[str], str]:
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(Group(*screen_parts(Sample(now, [], rates), rows=8, narrow=False, scroll=scroll)))
        lines = [line for line in console.export_text().splitlines() if line.strip()]
        return [line.split()[0] for line in lines[-9:-1]], lines[-1]

    assert shown(0) == ([str(n) for n in range(8)], "and 12 more, none further behind (arrow keys)")
    assert shown(5) == ([str(n) for n in range(5, 13)], "and 5 above, 7 more, none further behind (arrow keys)")
    assert shown(12) == ([str(n) for n in range(12, 20)], "and 12 above (arrow keys)")


async def test_keys_of_a_terminal_scroll_and_leave_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        before = termios.tcgetattr(terminal)
        monkeypatch.setattr(sys, "stdin", terminal)
        stages = [
            StageFacts(name="parser", partitions=[PartitionFacts(owner="w", lag_bytes=100 - n) for n in range(90)])
        ]
        now = DeploymentSnapshot(at_ms=0, stages=stages, queues=[], chunks=1)
        rates = Rates(requests=None, attempts=None, tool_calls=None, chunks=None, stage_bytes={"parser": None})
        out = io.StringIO()
        with TopScreen(Console(width=100, height=30, file=out, force_terminal=True), "x") as screen:
            screen.show(Sample(now, [], rates))
            for key, words in ((b"\x1b[B", "1 above"), (b"j", "2 above"), (b"G", "77 above"), (b"g", "77 more")):
                os.write(ours, key)
                await eventually(lambda w=words: w in out.getvalue())
        assert termios.tcgetattr(terminal) == before
    os.close(ours)
