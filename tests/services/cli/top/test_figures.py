"""What happened between two looks."""

from __future__ import annotations

import msgspec

from tokenbus_services.cli.top import Sample, lines, rates
from tokenbus_services.runtime.deployment_snapshot import (
    DeploymentSnapshot,
    NodeFacts,
    PartitionFacts,
    QueueFacts,
    StageFacts,
    StreamFacts,
)

NODE = NodeFacts(name="h:1", memory_bytes=3 * 2**20, memory_limit=0, commands_per_s=7, clients=2, now_ms=1_000)


def snapshot(at_ms: int, *, added: int | None, chunks: int | None, done: int) -> DeploymentSnapshot:
    partition = PartitionFacts(owner="w", lag_bytes=5, lag_entries=1, done_bytes=done, open=2)
    stages = [StageFacts(name=name, ages_ms={"w": 0}, partitions=[partition] * 2) for name in ("normalizer", "parser")]
    streams = [StreamFacts(added=added)]
    queues = [QueueFacts(name=name, ages_ms={"w": 0}, streams=streams) for name in ("intake", "fetcher", "tools")]
    return DeploymentSnapshot(at_ms=at_ms, stages=stages, queues=queues, chunks=chunks)


def test_rates_are_by_the_servers_clock():
    found = rates(snapshot(1_000, added=10, chunks=100, done=0), snapshot(3_000, added=14, chunks=300, done=50))
    assert (found.requests, found.attempts, found.tool_calls, found.chunks) == (2, 2, 2, 100)
    assert found.stage_bytes == {"normalizer": 50, "parser": 50}


def test_what_is_not_counted_or_counted_anew_has_no_rate():
    found = rates(snapshot(1_000, added=None, chunks=100, done=9), snapshot(2_000, added=3, chunks=1, done=0))
    assert (found.requests, found.chunks, found.stage_bytes["parser"]) == (None, None, None)


def test_two_samples_at_one_moment_give_no_rate():
    now = snapshot(1_000, added=1, chunks=1, done=1)
    assert rates(now, now).chunks is None


def test_open_runs_are_those_of_the_parser():
    now = snapshot(1_000, added=1, chunks=1, done=1)
    assert now.open_runs == 4
    busy = msgspec.structs.replace(now.stages[0], partitions=[PartitionFacts(open=99)])
    assert msgspec.structs.replace(now, stages=[busy, now.stages[1]]).open_runs == 4


def test_a_sample_has_a_line_for_each_group_and_server():
    before, now = snapshot(1_000, added=1, chunks=1, done=1), snapshot(2_000, added=3, chunks=11, done=1)
    head, server, *groups = lines(Sample(now, [NODE], rates(before, now)))
    assert head.startswith("open runs 4  requests 2.0/s")
    assert "chunks 10.0/s" in head
    assert "memory 3.0 MB  commands 7/s" in server
    assert [line.split()[0] for line in groups] == ["normalizer", "parser", "intake", "fetcher", "tools"]
    assert "partitions owned 2 of 2  behind 2 (10 B)" in groups[1]
