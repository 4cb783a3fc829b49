"""The scripts of a run's life as intake and gateway send them, for tests that need the call and not who makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import Arg, ScriptCall
from tokenbus.bus.scripts.runs import away
from tokenbus.bus.stage.partition import Partition
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, PutAway, encode

TTL_MS = 60_000


def accept_call(
    keys: Keys,
    run: str,
    *,
    at_ms: int = 1,
    frame: bytes = b"accepted",
    work: bytes = b"work",
    parent: str = "",
    fields: Sequence[Arg] = (),
    **more: Any,
) -> ScriptCall:
    """The run is accepted; ``fields`` come after its request."""
    partition = keys.partition_of(run)
    return scripts.accept(
        keys.run(run),
        keys.topic(partition, "events"),
        keys.topic(partition, "turns"),
        keys.lease(partition, "parser"),
        keys.log(run),
        keys.run(parent or run),
        open_runs=keys.open_runs(partition),
        ended_runs=keys.ended_runs(partition),
        run=run,
        accepted_ms=at_ms,
        frame=frame,
        work=work,
        fields=["request", b"{}", *fields],
        **{"ttl_ms": TTL_MS, **more},
    )


def cancel_call(
    keys: Keys, run: str, *, frame: bytes = b"cancelled", told: bytes = b"told", awaited_ms: int = TTL_MS
) -> ScriptCall:
    """The run is cancelled; ``told``: what the control stream has of it."""
    partition = keys.partition_of(run)
    return scripts.cancel(
        keys.run(run),
        keys.topic(partition, "events"),
        keys.topic(partition, "raw"),
        keys.topic(partition, "control"),
        parser_lease=keys.lease(partition, "parser"),
        normalizer_lease=keys.lease(partition, "normalizer"),
        run=run,
        awaited_ms=awaited_ms,
        frame=frame,
        control_frame=told,
    )


def put_away_call(keys: Keys, part: Partition, runs: Sequence[away.AwayRun]) -> ScriptCall:
    """The parser that has this partition puts the runs away."""
    return away.put_away(
        part.lease_key,
        part.stream,
        keys.away(part.number),
        runs,
        token=part.token,
        offset=part.offset,
        forget=encode(EventFrame(0, CONTROL_ATTEMPT, 8, [PutAway()])),
        ttl_ms=TTL_MS,
    )


def put_back_call(keys: Keys, run: str) -> ScriptCall:
    """A parser's clock finds that the run is due."""
    p = keys.partition_of(run)
    return away.put_back(keys.run(run), keys.topic(p, "events"), keys.lease(p, "parser"), keys.away(p), run=run)
